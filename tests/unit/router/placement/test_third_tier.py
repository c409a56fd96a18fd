"""Item: tiers as a list. A further tier is one line in common/tiers.py: leases, events, dumps, index, C lookup and charges carry
it, and no code outside of that module names a tier."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

PLUGIN = '''
"""Adds a tier before anything reads the list."""
import sys, types
from importlib.util import find_spec
spec = find_spec("diptych.common.tiers")
with open(spec.origin) as file:
    source = file.read()
line = 'TierSpec("disk", "lru, last blocks first"))'
assert source.count(line) == 1
module = types.ModuleType("diptych.common.tiers")
module.__spec__, module.__file__ = spec, spec.origin
sys.modules["diptych.common.tiers"] = module
exec(compile(source.replace(line, line[:-1] + ', TierSpec("peer"))'), spec.origin, "exec"), module.__dict__)
assert module.TIER_NAMES == ("device", "host", "disk", "peer")
'''
LOOKUPS = "not test_router_native or (beyond_64_workers or lately_used or late_explanation)"
"""Of the tests in C those that look tiers up, once each; all of them run by themselves as well."""


def test_a_further_tier_is_one_line(tmp_path: Path) -> None:
    """The tests of the lookup in C, a walk over sets, and those of a worker's lease, dumps and statistics, with four tiers."""
    (tmp_path / "third_tier_plugin.py").write_text(PLUGIN)
    paths = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if str(ROOT / "src") not in paths:
        paths.append(str(ROOT / "src"))
    files = [
        str(ROOT / "tests/unit/router/placement" / name)
        for name in ("test_router_native.py", "test_tiers_in_the_index.py")
    ]
    files.append(str(ROOT / "tests/integration/worker/test_worker_host_tier.py"))
    ended = subprocess.run(
        [
            sys.executable, "-P", "-m", "pytest", "-q", "-p", "third_tier_plugin", "-p", "no:cacheprovider",
            "-p", "no:schemathesis",
            "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-k", LOOKUPS, *files,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout


FIELD = re.compile(
    r"\b(?:prefill_|decode_|num_)?host_(?:tokens|blocks|sequence|event_sequence|keys|block_keys|usage|bytes_per_s"
    r"|token_ms|masks|tier)\b"
)


def test_no_code_outside_its_module_has_a_field_for_the_host_tier() -> None:
    found = []
    rooms = ("proto", "common", "router", "worker", "rpc", "loadtest", "engine/stats.py", "engine/messages.py")
    for room in rooms:
        root = ROOT / room
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix not in (".py", ".c", ".h", ".proto") or "rpc/v1" in str(path):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if "reserved" not in line and (hit := FIELD.search(line)) and hit[0] != "num_host_blocks":
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


@pytest.mark.parametrize("line", ["host_tokens: int", "uint32 prefill_host_tokens = 1;", "int64_t *host_blocks"])
def test_the_rule_finds_what_it_forbids(line: str) -> None:
    assert FIELD.search(line)
