"""Benefit and cost of a bound on steps that mix prompts and decoding sequences, on a modelled machine.

    python -P -m diptych.bench mixed-steps [--users 8,32] [--waves 1,4] [--out FILE]

The scheduler is the real one and learns the machine's rates from durations alone. The machine is a model: a step has a
fixed cost and a cost per row. So the figures are the same on any machine and show the effect of the policy. Closed
loop: each user sends again as soon as its answer ends.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diptych.bench.result import write
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, Failed, Finished, ScheduledSeq, TokensOut
from diptych.engine.offline import OfflineEngine

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 16, 2000, 50_000
BOUNDS_S = (None, 0.2, 0.1, 0.07, 0.05, 0.04, 0.03)


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step, of a prompt's row in it, and of a decoding sequence's. The defaults are those of 135 million
    weights in float32 on two cores with AVX-512, from CPU time, including a server on the same cores."""

    step_s: float = 0.006
    prompt_row_s: float = 0.00115
    decode_row_s: float = 0.0015

    def duration_s(self, seqs: Sequence[ScheduledSeq]) -> float:
        rows = sum(len(seq.token_ids) for seq in seqs)
        decodes = sum(len(seq.token_ids) == 1 for seq in seqs)
        return self.step_s + self.prompt_row_s * (rows - decodes) + self.decode_row_s * decodes

    def slower(self, times: float) -> Machine:
        return Machine(times * self.step_s, times * self.prompt_row_s, times * self.decode_row_s)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    tokens_per_s: float
    gaps_ms: npt.NDArray[np.float64]
    """All intervals between two tokens of one answer."""
    first_token_s: npt.NDArray[np.float64]

    def gap_ms(self, percent: float) -> float:
        return float(np.percentile(self.gaps_ms, percent))


def serve(
    users: int,
    waves: int,
    machine: Machine = Machine(),
    *,
    num_prompt: int = 256,
    num_outputs: int = 64,
    **settings: object,
) -> Outcome:
    """`users` times `waves` requests. `settings`: of EngineConfig."""
    clock, rng = FakeClock(), random.Random(5)
    runner = FakeRunner(
        NUM_BLOCKS, BLOCK_SIZE, num_layers=1, head_dim=1, vocab_size=VOCAB_SIZE,
        before_execute=lambda seqs: clock.advance(machine.duration_s(seqs)),
    )  # fmt: skip
    config = EngineConfig(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False, **settings)  # type: ignore[arg-type]
    identity = IdentityHeader(b"k" * 32, "m", "t", "u", BLOCK_SIZE)
    engine = OfflineEngine(LocalExecutor(runner), config, identity, clock=clock)  # type: ignore[arg-type]  # it takes host memory alone
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    added: dict[str, float] = {}
    came: dict[str, list[float]] = {}

    def ask() -> None:
        if len(added) < users * waves:
            attempt = f"r{len(added)}"
            added[attempt], came[attempt] = clock.now(), []
            prompt = tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt))
            engine.send(EngineRequest(attempt, Prompt(prompt), sampling))

    for _ in range(users):
        ask()
    began, ended = clock.now(), 0
    while ended < users * waves:
        for event in engine.step():
            match event:
                case Failed(error=error):
                    raise error
                case TokensOut(attempt=attempt):
                    came[attempt].append(clock.now())
                case Finished():
                    ended += 1
                    ask()
    gaps = np.concatenate([np.diff(times) for times in came.values()]) * 1e3
    first = np.array([times[0] - added[attempt] for attempt, times in came.items()])
    return Outcome(users * waves * num_outputs / (clock.now() - began), gaps, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", default="8,32")
    parser.add_argument("--waves", default="1,4")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine, rows = Machine(), []
    print("users waves bound_s  tokens/s  ITL p50  p99  max ms  TTFT p50  max s")
    for users in map(int, args.users.split(",")):
        for waves in map(int, args.waves.split(",")):
            for bound_s in BOUNDS_S:
                got = serve(users, waves, machine, mixed_step_time_s=bound_s)
                row = {
                    "users": users,
                    "waves": waves,
                    "mixed_step_time_s": bound_s,
                    "tokens_per_s": round(got.tokens_per_s, 1),
                    "itl_p50_ms": round(got.gap_ms(50), 1),
                    "itl_p99_ms": round(got.gap_ms(99), 1),
                    "itl_max_ms": round(float(got.gaps_ms.max()), 1),
                    "ttft_p50_s": round(float(np.median(got.first_token_s)), 2),
                    "ttft_max_s": round(float(got.first_token_s.max()), 2),
                }
                rows.append(row)
                print(*(f"{value!s:>8}" for value in row.values()), flush=True)
    if args.out is not None:
        body = {"what": "bounds on mixed steps, on a modelled machine", "machine": asdict(machine), "rows": rows}
        write(args.out, body)


if __name__ == "__main__":
    main()
