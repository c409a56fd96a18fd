"""Run many schedules of the hand-off: `python -P tests/sim/explore.py --seeds 100000`. Prints every seed that fails.

The first line about such a seed is the law that it breaks, by its number in docs/handoff.md, section 7.

A long run may be split: `--first 20000 --seeds 20000 --out FILE` adds the results to FILE, with the commit, a part for every
5,000 schedules: a run that is killed keeps what it has found. `--within` ends a part early, between two schedules, and records
where. `--jobs 16` runs sixteen parts in parallel. With `--files` every schedule has files of KV, pulls, and restarts.

A seed is the same schedule with the same minor version of Python: callbacks of asyncio count in it, and versions differ in them.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from handoff_sim.hashes import fix_hashes  # noqa: E402
from handoff_sim.world import run_all  # noqa: E402

_PART = 5000
"""Schedules that are recorded together."""
_COUNTS = (
    "callbacks",
    "with_files",
    "restarts",
    "ranges_from_files",
    "ranges_served_from_files",
    "damaged_files",
    "ranges_pulled",
)
"""Of all schedules: what they did, so that a run without violations shows that there was something to violate."""
_LOOK_S = 20.0
"""How often the progress of parts that run side by side is printed."""


_PROGRESS = "... "
"""A line of progress begins with it."""
_NEW_LINE = "\n" if sys.stdout.isatty() else ""
"""Behind progress, which a terminal shows in one line."""


def note(out: Path, first: int, failed: dict[int, str], counts: dict[str, int], seconds: float) -> None:
    """Add one part to the file; the sums stand at its top. Args: failed: the law that is broken, by seed."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    part = {
        "first": first, **counts, "violations": len(failed), "failing_seeds": list(failed), "failures": list(failed.values()),
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit.stdout.strip(),
        "python": platform.python_version(),
    }  # fmt: skip
    add(out, [part])


def add(out: Path, new: list[dict[str, Any]]) -> None:
    parts = [*(json.loads(out.read_text())["parts"] if out.exists() else []), *new]
    parts.sort(key=lambda part: part["first"])
    total = {name: sum(part.get(name, 0) for part in parts) for name in ("seeds", "violations", *_COUNTS)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"what": "random schedules of the hand-off", **total, "parts": parts}, indent=2) + "\n")


def side_by_side(args: argparse.Namespace) -> int:
    """Run children of this script, each with a part of the seeds."""
    cuts = [args.first + args.seeds * i // args.jobs for i in range(args.jobs + 1)]
    with tempfile.TemporaryDirectory() as folder:
        outs, logs = ([Path(folder, f"{i}.{kind}") for i in range(args.jobs)] for kind in ("json", "log"))
        children = [
            subprocess.Popen(  # ends: after its seeds
                [
                    sys.executable, "-P", __file__, "--first", str(cuts[i]), "--seeds", str(cuts[i + 1] - cuts[i]),
                    "--stop-after", str(args.stop_after), "--within", str(args.within), "--out", str(outs[i]),
                    *(["--files"] if args.files else []),
                ],
                stdout=logs[i].open("w"), stderr=subprocess.STDOUT,
            )
            for i in range(args.jobs) if cuts[i + 1] > cuts[i]
        ]  # fmt: skip
        failed = 0
        for child, log in zip(children, logs, strict=False):
            while not _ended(child):
                print("; ".join(_last_line(one) for one in logs if one.exists()), flush=True)
            failed += child.returncode != 0
            print(_without_progress(log) if child.returncode else _last_line(log), flush=True)
        parts = [part for out in outs if out.exists() for part in json.loads(out.read_text())["parts"]]
        if args.out is not None:
            add(args.out, parts)
    done, broken = (sum(part[name] for part in parts) for name in ("seeds", "violations"))
    last = args.first + args.seeds - 1
    print(f"{'FAILED' if failed else 'ok'}: {done} schedules of seeds {args.first} to {last}, {broken} failed")
    return 1 if failed else 0


def _ended(child: subprocess.Popen[Any]) -> bool:
    """Within _LOOK_S."""
    try:
        child.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _without_progress(log: Path) -> str:
    """What a part that failed has printed: the law that is broken comes first."""
    return "\n".join(line for line in log.read_text().split("\n") if line and not line.startswith(_PROGRESS))


def _last_line(log: Path) -> str:
    return next(reversed(log.read_text().split("\n")[-3:-1]), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these, and no others")
    parser.add_argument("--stop-after", type=int, default=5, help="failing seeds")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds, after which the run ends early")
    parser.add_argument("--out", type=Path, help="add what was found to this JSON file")
    parser.add_argument("--files", action="store_true", help="every schedule has files of KV, pulls, and restarts")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run side by side")
    args = parser.parse_args()
    if args.only:
        if args.out is not None or args.jobs > 1:
            parser.error("--only: a result, and its parts, are ranges of seeds: without --out and --jobs")
        args.first, args.seeds = args.only[0], len(args.only)
    if args.jobs > 1:
        return side_by_side(args)
    began = since = time.monotonic()
    failed: dict[int, str] = {}
    counts, callbacks, num_failed = Counter[str](), 0, 0
    """`counts`, and seeds in `failed` from `num_failed` on: of the schedules that are not recorded yet."""

    def record() -> None:
        nonlocal since, num_failed
        if args.out is not None and counts["seeds"]:
            first = args.first + n - counts["seeds"]
            new = dict(list(failed.items())[num_failed:])
            note(args.out, first, new, dict(counts), time.monotonic() - since)
        since, num_failed = time.monotonic(), len(failed)
        counts.clear()

    seeds = args.only or range(args.first, args.first + args.seeds)
    for n, (seed, problems, world) in enumerate(run_all(seeds, with_files=args.files), 1):
        callbacks += world.loop.num_callbacks
        counts.update(world.counts())
        if problems:
            failed[seed] = world.headline
            print(f"{_NEW_LINE}{world.reported()}\n  " + "\n  ".join(problems), flush=True)
            if len(failed) >= args.stop_after:
                break
        if n % 100 == 0 or n == args.seeds:
            rate = n / (time.monotonic() - began)
            line = f"{n}/{args.seeds} schedules, {callbacks} callbacks, {len(failed)} failed, {rate:.0f}/s, seed {seed}"
            print(f"\r{_PROGRESS}{line}" if _NEW_LINE else f"{_PROGRESS}{line}\n", end="", flush=True)
        if n % _PART == 0:
            record()
        if time.monotonic() - began > args.within:
            break
    record()
    print(f"{_NEW_LINE}{'FAILED' if failed else 'ok'}: seeds {args.first} to {seed}, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    fix_hashes()
    sys.exit(main())
