"""Host overhead of a decode step on one GPU, through the engine: steps planned after the last one's tokens, and ahead.

    python -m diptych.bench.gpu.async_scheduling --out bench/results/gpu-ahead.json

Each row: `batch` sequences of about 1,024 tokens; the median time from one step's results to the next, with events
taken each time, and the device time of a step of that shape (its CUDA graph, and the sampling kernels). Both ways
alternate.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.bench.gpu.step import BLOCK_SIZE, LLAMA_8B, _seqs, random_weights
from diptych.bench.kernels.timing import machine
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import MonotonicClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, ScheduledSeq

PROMPT, OUTPUT, SKIPPED = 1024, 130, 20


def device_seconds(runner: TorchModelRunner, seqs: Sequence[ScheduledSeq], repeats: int = 24) -> float:
    """Median device time of one step, including sampling, without the host: steps are queued two deep."""
    fused = runner._fused
    assert fused is not None
    marks = []
    with torch.inference_mode():
        for _ in range(repeats):
            batch = fused.build(seqs)
            end = torch.cuda.Event(enable_timing=True)
            drawn = fused.launch(seqs, batch, (), ())
            drawn.draw()
            end.record()
            marks.append(end)
            if len(marks) > 2:
                marks[-3].synchronize()
        drawn.result()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks[2:]))) / 1e3


def measure(runner: TorchModelRunner, batch: int, params: SamplingParams, *, steps_ahead: bool) -> dict[str, Any]:
    config = EngineConfig(
        num_blocks=runner.num_blocks, block_size=BLOCK_SIZE, max_num_seqs=256, max_num_batched_tokens=8192,
        max_step_time_s=None, mixed_step_time_s=None, steps_ahead=steps_ahead,
    )  # fmt: skip
    core = EngineCore(
        LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "bfloat16", BLOCK_SIZE), MonotonicClock()
    )
    generator = torch.Generator().manual_seed(batch)
    for i in range(batch):
        prompt = torch.randint(0, runner.vocab_size, (PROMPT,), generator=generator).tolist()
        core.handle(EngineRequest(f"r{i}", Prompt(tuple(prompt)), params))
    scheduler = core.scheduler
    while len(scheduler.running.decoding) < batch:
        core.step()
        core.take_events()
    times = []
    began = time.perf_counter()
    while len(scheduler.running.decoding) == batch:
        core.step()
        core.take_events()
        now = time.perf_counter()
        times.append(now - began)
        began = now
    core.wait_for_step()
    while core.step():
        core.take_events()
    kept = times[SKIPPED:-2]
    return {"median_ms": statistics.median(kept) * 1e3, "p99_ms": sorted(kept)[int(0.99 * len(kept))] * 1e3,
            "steps_ahead": core.steps_ahead, "not_ahead": dict(scheduler.live.not_ahead)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = describe({**LLAMA_8B, "num_hidden_layers": args.layers})
    runner = TorchModelRunner(
        random_weights(model), eos_token_ids=(), num_blocks=19_500, block_size=BLOCK_SIZE, max_model_len=4096
    )
    rows = []
    for batch in args.batches:
        constrained = {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 2}
        for name, fields in (
            ("greedy", {"temperature": 0.0}),
            ("top_p", {"temperature": 0.8, "top_p": 0.95}),
            ("penalties and logprobs", constrained),
        ):
            if name != "greedy" and batch != 64:
                continue
            params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=3, **fields)  # type: ignore[arg-type]
            found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _ in range(args.rounds):
                for steps_ahead in (False, True):
                    found[steps_ahead].append(measure(runner, batch, params, steps_ahead=steps_ahead))
            device = device_seconds(runner, _seqs(runner, batch, PROMPT + OUTPUT // 2, params)) * 1e3
            row: dict[str, Any] = {"batch": batch, "sampling": name, "device_ms": device}
            for steps_ahead, word in ((False, "after"), (True, "ahead")):
                best = min(found[steps_ahead], key=lambda one: one["median_ms"])
                row[f"{word}_ms"], row[f"{word}_p99_ms"] = best["median_ms"], best["p99_ms"]
                row[f"{word}_host_share"] = 1 - device / best["median_ms"]
                row[f"{word}_medians_ms"] = [one["median_ms"] for one in found[steps_ahead]]
            row["steps_ahead"], row["not_ahead"] = found[True][0]["steps_ahead"], found[True][0]["not_ahead"]
            rows.append(row)
            print("  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
