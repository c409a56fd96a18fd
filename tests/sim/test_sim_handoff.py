"""The explorer at CI's size, and its detection of every missing guard. See docs/handoff.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CI_SEEDS = 240
MUTATION_SEEDS = 1000
"""Within which each missing guard must be noticed."""
VANISHED_BEHIND_A_QUOTA = (3289, 35152, 39740, 43241)
"""A decode worker vanished that may hold one slab at a time: its legs took turns, a whole lease for each range."""
RECORDED_NOWHERE = (12378, 41055, 98768)
"""With files: a request was cancelled while its blocks were read; what had come stayed in the cache."""
REMOVED_WHILE_IT_WAS_READ = (10914, 30333, 31459, 61651)
"""With files: a block left a worker's account while a request read its file."""
HUNG_FOR_SECONDS = (24392, 82854)
"""With files: a disk that hung has seconds of work left once it goes on."""


def run_parts(commands: list[list[str]], within_s: float) -> list[str]:
    """Side by side; fails with what the children printed."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
    children = [
        subprocess.Popen(  # ends: after its seeds
            [sys.executable, "-P", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        for command in commands
    ]
    try:
        outputs = [child.communicate(timeout=within_s)[0] for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output
    return outputs


def explore(num_seeds: int, within_s: float, parts: int = 1) -> None:
    each = num_seeds // parts
    script = str(HERE / "explore.py")
    outputs = run_parts([[script, "--first", str(i * each), "--seeds", str(each)] for i in range(parts)], within_s)
    for output in outputs:
        print(output.splitlines()[-1])
        assert output.splitlines()[-1].startswith("ok: seeds")


def test_no_schedule_breaks_a_law() -> None:
    explore(CI_SEEDS, 3000)


def run_seeds(seeds: tuple[int, ...], *options: str) -> None:
    run_parts([[str(HERE / "explore.py"), *options, "--only", *map(str, seeds)]], 600)


def test_what_a_vanished_decode_worker_holds_is_free_after_two_leases() -> None:
    run_seeds(VANISHED_BEHIND_A_QUOTA)


def test_seeds_with_files_that_once_broke_a_law() -> None:
    run_seeds((*RECORDED_NOWHERE, *REMOVED_WHILE_IT_WAS_READ, *HUNG_FOR_SECONDS), "--files")


def test_a_schedule_that_breaks_a_law_is_told_with_its_seed() -> None:
    code = (
        "import sys, explore; from handoff_sim.mutations import applied; sys.argv[1:] = ['--first', '29', '--seeds', '1']\n"
        "with applied('a_window_group_is_sent_whole'): sys.exit(not explore.main())"
    )
    [output] = run_parts([["-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}"]], 600)
    law = "No block is read, by a step or by packing, that was freed behind a window"
    assert output.startswith(f"seed 29 breaks law 8, {law!r}: ")
    assert output.splitlines()[0].endswith(" is sent and seen by none")
    assert "FAILED: seeds 29 to 29, 1 failed" in output


def test_the_laws_are_those_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    page = (HERE.parents[1] / "docs" / "handoff.md").read_text()
    section = page.partition("## 7. Invariants")[2].partition("\n## ")[0]
    numbered = re.split(r"^(\d+)\. ", section.partition("\n\n`tests/sim`")[0], flags=re.MULTILINE)[1:]
    items = {int(number): " ".join(text.split()) for number, text in zip(numbered[::2], numbered[1::2], strict=True)}
    laws = {law.number: law.text for law in import_module("handoff_sim.laws").Law}
    assert laws.keys() == items.keys()
    assert [number for number, text in laws.items() if text not in items[number]] == []


@pytest.mark.slow
def test_no_schedule_of_a_hundred_thousand_breaks_a_law() -> None:
    explore(100_000, 6 * 3600, parts=2)


def test_every_missing_guard_is_noticed() -> None:
    [output] = run_parts([[str(HERE / "mutate.py"), "--seeds", str(MUTATION_SEEDS)]], 3000)
    assert len(output.splitlines()) >= 20
