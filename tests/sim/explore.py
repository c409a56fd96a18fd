"""Run many schedules of the hand-off: `python -P tests/sim/explore.py --seeds 100000`. Prints every seed that fails."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import structlog  # noqa: E402
from handoff_sim.world import run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--stop-after", type=int, default=5, help="failing seeds")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("diptych").setLevel(logging.CRITICAL)
    gc.disable()  # a schedule's loops are garbage all at once; in between there is none
    began, callbacks, failed = time.monotonic(), 0, 0
    for n, seed in enumerate(range(args.first, args.first + args.seeds), 1):
        problems, world = run(seed)
        if n % 50 == 0:
            gc.collect()
        callbacks += world.loop.num_callbacks
        if problems:
            failed += 1
            print(f"\n{world.told()}\n  " + "\n  ".join(problems), flush=True)
            if failed >= args.stop_after:
                break
        if n % 100 == 0 or n == args.seeds:
            rate = n / (time.monotonic() - began)
            line = f"{n}/{args.seeds} schedules, {callbacks} callbacks, {failed} failed, {rate:.0f}/s, seed {seed}"
            print(f"\r{line}", end="" if sys.stdout.isatty() else "\n", flush=True)
    print(f"\n{'FAILED' if failed else 'ok'}: seeds {args.first} to {seed}, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
