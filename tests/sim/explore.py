"""Run many schedules of the hand-off: `python -P tests/sim/explore.py --seeds 100000`. Prints every seed that fails.

A long run may be split: `--first 20000 --seeds 20000 --out FILE` adds the results to FILE, with the commit, a part for every
5,000 schedules: a run that is killed keeps what it has found. `--within` ends a part early, between two schedules, and records
where. `--jobs 16` runs sixteen parts in parallel.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from handoff_sim.hashes import fix_hashes  # noqa: E402
from handoff_sim.world import run_all  # noqa: E402

_PART = 5000
"""Schedules that are recorded together."""


def note(out: Path, first: int, num: int, failed: list[int], callbacks: int, seconds: float) -> None:
    """Add one part to the file; the sums stand at its top."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    part = {
        "first": first, "seeds": num, "violations": len(failed), "failing_seeds": failed, "callbacks": callbacks,
        "seconds": round(seconds, 1), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(), "python": platform.python_version(),
    }  # fmt: skip
    add(out, [part])


def add(out: Path, new: list[dict[str, Any]]) -> None:
    parts = [*(json.loads(out.read_text())["parts"] if out.exists() else []), *new]
    parts.sort(key=lambda part: part["first"])
    total = {name: sum(part[name] for part in parts) for name in ("seeds", "violations", "callbacks")}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"what": "random schedules of the hand-off", **total, "parts": parts}, indent=2) + "\n")


def side_by_side(args: argparse.Namespace) -> int:
    """Run children of this script, each with a part of the seeds."""
    cuts = [args.first + args.seeds * i // args.jobs for i in range(args.jobs + 1)]
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{i}.json") for i in range(args.jobs)]
        children = [
            subprocess.Popen(
                [
                    sys.executable, "-P", __file__, "--first", str(cuts[i]), "--seeds", str(cuts[i + 1] - cuts[i]),
                    "--stop-after", str(args.stop_after), "--within", str(args.within), "--out", str(outs[i]),
                ],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for i in range(args.jobs) if cuts[i + 1] > cuts[i]
        ]  # fmt: skip
        failed = 0
        for child in children:
            output, _ = child.communicate()
            failed += child.returncode != 0
            print(output if child.returncode else output.splitlines()[-1], flush=True)
        if args.out is not None:
            add(args.out, [part for out in outs if out.exists() for part in json.loads(out.read_text())["parts"]])
    print(f"{'FAILED' if failed else 'ok'}: seeds {args.first} to {args.first + args.seeds - 1}, {failed} parts failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--stop-after", type=int, default=5, help="failing seeds")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds, after which the run ends early")
    parser.add_argument("--out", type=Path, help="add what was found to this JSON file")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run side by side")
    args = parser.parse_args()
    if args.jobs > 1:
        return side_by_side(args)
    began, callbacks = time.monotonic(), 0
    failed: list[int] = []
    recorded = (0, 0, 0, began)
    """Schedules, failed ones and callbacks up to the last part that was recorded, and when that was."""

    def record() -> None:
        nonlocal recorded
        schedules, failures, calls, since = recorded
        if args.out is not None and n > schedules:
            first = args.first + schedules
            note(args.out, first, n - schedules, failed[failures:], callbacks - calls, time.monotonic() - since)
        recorded = (n, len(failed), callbacks, time.monotonic())

    for n, (seed, problems, world) in enumerate(run_all(range(args.first, args.first + args.seeds)), 1):
        callbacks += world.loop.num_callbacks
        if problems:
            failed.append(seed)
            print(f"\n{world.reported()}\n  " + "\n  ".join(problems), flush=True)
            if len(failed) >= args.stop_after:
                break
        if n % 100 == 0 or n == args.seeds:
            rate = n / (time.monotonic() - began)
            line = f"{n}/{args.seeds} schedules, {callbacks} callbacks, {len(failed)} failed, {rate:.0f}/s, seed {seed}"
            print(f"\r{line}", end="" if sys.stdout.isatty() else "\n", flush=True)
        if n % _PART == 0:
            record()
        if time.monotonic() - began > args.within:
            break
    record()
    print(f"\n{'FAILED' if failed else 'ok'}: seeds {args.first} to {seed}, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    fix_hashes()
    sys.exit(main())
