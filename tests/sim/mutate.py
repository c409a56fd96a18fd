"""Number of seeds until the explorer detects each missing guard: `python -P tests/sim/mutate.py --seeds 2000`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import handoff_sim.file_mutations  # noqa: E402, F401
from handoff_sim.hashes import fix_hashes  # noqa: E402
from handoff_sim.mutations import MUTATIONS, SEEN_BY, WITH_FILES, applied  # noqa: E402
from handoff_sim.world import run_all  # noqa: E402


def seeds_until_found(name: str, limit: int) -> tuple[int, str]:
    """A seed below `limit` that shows it (-1: there is none), and what it shows. The one that showed it before is tried first,
    whatever the limit."""
    known = [SEEN_BY[name]] if name in SEEN_BY else []
    with applied(name):
        for seed, problems, _ in run_all(itertools.chain(known, range(limit)), with_files=name in WITH_FILES):
            if problems:
                return seed, problems[0]
    return -1, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--list", action="store_true", help="only print their names")
    args = parser.parse_args()
    if args.list:
        print("\n".join(MUTATIONS))
        return 0
    missed = 0
    for name in args.names or list(MUTATIONS):
        began = time.monotonic()
        seed, what = seeds_until_found(name, args.seeds)
        missed += seed < 0
        print(
            f"{name:55} {'NOT FOUND' if seed < 0 else f'seed {seed}':10} {time.monotonic() - began:5.1f} s  {what}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    fix_hashes()
    sys.exit(main())
