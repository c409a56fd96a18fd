from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = sorted(path.name for path in (ROOT / "src" / "diptych").iterdir() if path.is_symlink())


def test_rooms_are_relative_symlinks_to_the_root():
    assert len(ROOMS) >= 11
    for room in ROOMS:
        assert os.readlink(ROOT / "src" / "diptych" / room) == f"../../{room}"
        assert (ROOT / room / "__init__.py").is_file()


def test_no_folder_named_like_the_package_at_the_root():
    assert not (ROOT / "diptych").exists()


def test_kernels_init_is_inert():
    """transformers runs a top-level package `kernels` if it finds one: ours must do nothing when run."""
    source = (ROOT / "kernels" / "__init__.py").read_text()
    assert not re.search(r"^\s*(import|from) (?!__future__)", source, re.MULTILINE)


_HELP_PROBE = """
import sys
from diptych.cli.bench import command as bench
from diptych.bench.cli.startup import command_paths
from diptych.cli.settings.help import help_text
from diptych.cli.main import build_app
for path in command_paths():
    own = path[1:] if path[:1] == ["bench"] else path
    app = (bench if path[:1] == ["bench"] else sys.modules["diptych.cli.main"]).build_app((own or [""])[0])
    text = help_text(app, "diptych", [*own, "--help"])
    assert text and text.startswith("Usage: diptych " + " ".join(own)), (path, text)
    print(" ".join(path))
heavy = {"torch", "transformers", "grpc", "google.protobuf", "ucxx", "fastapi", "numpy", "httpx", "aiohttp", "redis", "rich"}
heavy |= {"pydantic", "uvloop", "asyncio", "ssl", "structlog", "tokenizers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_help_of_every_command_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-P", "-c", _HELP_PROBE], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = {
        "up",
        "serve",
        "router",
        "prefill",
        "decode",
        "chat",
        "bench",
        "doctor",
        "explain",
        "capacity",
        "bench serve",
    }
    assert named <= set(done.stdout.splitlines())


def test_the_sdk_imports_grpc_and_protobuf_only():
    probe = (
        "import sys; import diptych.client;"
        "others = {'redis', 'blake3', 'numpy', 'torch', 'msgspec', 'pydantic', 'fastapi', 'uvloop'} & set(sys.modules);"
        "assert not others, others"
    )
    subprocess.run([sys.executable, "-P", "-c", probe], check=True, timeout=300, capture_output=True)


def test_no_shared_constraint_on_torch():
    names = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not names & {"torch", "triton"}


def test_the_table_of_rooms_says_who_imports_whom() -> None:
    """docs/architecture.md said that prefill and decode import only `worker`."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    allowed = {
        name: cell for name, cell in re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*)\|$", table, re.MULTILINE) if name in ROOMS
    }
    assert sorted(allowed) == ROOMS
    for room, cell in allowed.items():
        sources = (path for path in (ROOT / room).rglob("*.py") if "bench" not in path.parts)
        found = {
            name
            for path in sources
            for name in re.findall(
                r"^\s*(?:from|import) diptych\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
            )
        }
        declared = set(ROOMS) if cell.strip() == "all" else set(re.findall(r"\w+", cell))
        assert found - {room} <= declared, f"{room} imports {sorted(found - {room} - declared)}"
