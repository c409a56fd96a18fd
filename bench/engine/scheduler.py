"""The scheduler and block manager without a model: time of a decode step, and allocated but unused KV.

    python -m diptych.bench.engine.scheduler [--out FILE]

A step is everything the engine does except the model: schedule, results, events. Wall time depends on the machine's
load, CPU time does not. Waste is the mean over all steps of 1 - used / allocated tokens; its floor is the waste of
half-filled last blocks alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.bench.result import surroundings, write
from diptych.common.block_identity import IdentityHeader
from diptych.common.collector import set_collector
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.messages import EngineRequest, StepResult
from diptych.engine.sched.requests.admission import ModelLimits
from diptych.engine.sched.scheduler import Scheduler

BLOCK_SIZE = 16
_LIMITS = ModelLimits(max_model_len=8192, vocab_size=50_000, eos_token_ids=frozenset(), kv_bytes_per_token=46_080)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds, medians over the steps. us_per_seq: CPU."""

    num_running: int
    wall_us: float
    wall_p95_us: float
    cpu_us: float
    us_per_seq: float


@dataclass(frozen=True, slots=True)
class Waste:
    load: str
    requests: int
    block_size: int
    mean_share: float
    floor: float
    """(block_size - 1) / 2 tokens of every sequence's last block: the minimum for this block size and load."""


def make_scheduler(
    num_blocks: int, max_num_seqs: int, *, block_size: int = BLOCK_SIZE, **settings: object
) -> Scheduler:
    config = EngineConfig(
        num_blocks,
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_step_time_s=None,
        mixed_step_time_s=None,
        **settings,  # type: ignore[arg-type]
    )
    return Scheduler(config, _LIMITS, IdentityHeader(b"k" * 32, "m", "t", "float32", block_size))


def one_step(scheduler: Scheduler) -> tuple[float, float, int]:
    """Returns: the scheduler's wall and CPU seconds, and the number of sequences."""
    wall, cpu = time.perf_counter(), time.thread_time()
    out = scheduler.schedule(wall)
    scheduler.take_copies()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    result = StepResult([(7,) if seq.sample else () for seq in out.seqs])  # in place of the model
    wall_after, cpu_after = time.perf_counter(), time.thread_time()
    scheduler.apply(out, result, 0.01)
    scheduler.take_events()
    return wall + time.perf_counter() - wall_after, cpu + time.thread_time() - cpu_after, len(out.seqs)


def time_steps(num_running: int, num_steps: int, **settings: object) -> StepTime:
    """Decode steps with `num_running` growing sequences of ragged prompts."""
    rng = random.Random(0)
    scheduler = make_scheduler(num_running * 64, num_running, **settings)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=num_steps + 100, ignore_eos=True)
    for i in range(num_running):
        prompt = tuple(rng.randrange(50_000) for _ in range(rng.randrange(16, 257)))
        scheduler.add(EngineRequest(f"r{i}", Prompt(prompt), sampling))
    while sum(request.num_outputs > 0 for request in scheduler.requests.values()) < num_running:
        one_step(scheduler)
    times = [one_step(scheduler) for _ in range(num_steps)]
    assert all(count == num_running for _, _, count in times)
    walls = sorted(wall for wall, _, _ in times)
    cpu = statistics.median(cpu for _, cpu, _ in times)
    return StepTime(
        num_running,
        round(statistics.median(walls) * 1e6, 1),
        round(walls[int(0.95 * len(walls))] * 1e6, 1),
        round(cpu * 1e6, 1),
        round(cpu * 1e6 / num_running, 3),
    )


def measure_waste(
    prompts: tuple[int, int], outputs: tuple[int, int], num_requests: int, block_size: int = BLOCK_SIZE
) -> Waste:
    """A ragged load without shared prefixes, 64 sequences at a time, from its first step to its last."""
    rng = random.Random(1)
    scheduler = make_scheduler(8192 * BLOCK_SIZE // block_size, 64, block_size=block_size, enable_prefix_caching=False)
    for i in range(num_requests):
        prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(*prompts)))
        sampling = SamplingParams(max_tokens=rng.randint(*outputs), ignore_eos=True)
        scheduler.add(EngineRequest(f"r{i}", Prompt(prompt), sampling))
    shares, floors = [], []
    half = (block_size - 1) / 2
    while scheduler.requests:
        one_step(scheduler)
        allocated = scheduler.kv.pool.counts.running * block_size
        used = sum(request.num_computed for request in scheduler.requests.values())
        if allocated:
            shares.append(1.0 - used / allocated)
            running = sum(request.num_computed > 0 for request in scheduler.requests.values())
            floors.append(half * running / (used + half * running))
    load = f"prompts {prompts[0]}-{prompts[1]}, outputs {outputs[0]}-{outputs[1]} tokens"
    return Waste(load, num_requests, block_size, round(statistics.mean(shares), 4), round(statistics.mean(floors), 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    set_collector()  # as in a worker
    facts = surroundings()
    times = [time_steps(count, arguments.steps) for count in (64, 256, 512, 1024, 2048)]
    wastes = [
        measure_waste(prompts, outputs, 300, block_size)
        for prompts, outputs in (((16, 1024), (16, 256)), ((16, 256), (16, 128)))
        for block_size in (8, BLOCK_SIZE, 32)
    ]
    for row in times:
        print(
            f"{row.num_running:5d} running: wall {row.wall_us:9,.1f} us (p95 {row.wall_p95_us:,.1f}), "
            f"CPU {row.cpu_us:9,.1f} us, {row.us_per_seq:.2f} us a sequence"
        )
    for waste in wastes:
        share = f"{waste.mean_share:.2%} with blocks of {waste.block_size}, at least {waste.floor:.2%}"
        print(f"KV allocated and not used: {share}  ({waste.load})")
    if arguments.out is not None:
        report = {
            "bench": "scheduler",
            "machine": facts,
            "steps": [asdict(row) for row in times],
            "waste": [asdict(row) for row in wastes],
        }
        write(arguments.out, report)


if __name__ == "__main__":
    main()
