"""One end of the link measured by pair.py: GPU memory of one process, read by another's kernel into KV blocks.

    python -m diptych.bench.gpu.link lend     allocates, prints the handle, waits to be killed
    python -m diptych.bench.gpu.link pull     reads the handle from stdin, measures, prints JSON

pull: rate of a range that is scattered over the pool; slowdown of a decode step of 8 while one arrives; and whether the
mapping outlives the process that lent the memory.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from typing import Any

import torch

from diptych.bench.gpu.step import LLAMA_8B, random_weights
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.messages import DeviceRange, ScheduledSeq
from diptych.kvtransfer.gpu.memory import GpuMemory
from diptych.kvtransfer.gpu.rate import read_rate

TOKENS = 2048
BATCH, CONTEXT = 8, 1024
REPEATS = 15


def lend() -> None:
    torch.zeros(1, device="cuda")
    size = TOKENS * 131_072
    _, handle = GpuMemory(0, read_rate).allocate(size)
    print(json.dumps({"pid": os.getpid(), "handle": handle.hex(), "size": size}), flush=True)
    time.sleep(600)


def _pull_ms(runner: TorchModelRunner, blocks: list[int], source: DeviceRange) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    pull = runner.unpack(blocks, TOKENS, source)
    assert pull is not None
    pull.wait()
    return (time.perf_counter() - began) * 1e3


def pull() -> None:
    lent = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    runner = TorchModelRunner(
        random_weights(describe(LLAMA_8B)), eos_token_ids=(), num_blocks=1200, block_size=16, max_model_len=4096,
        graph_sizes=[BATCH],
    )  # fmt: skip
    memory = GpuMemory(0, read_rate)
    began = time.perf_counter()
    address = memory.open(bytes.fromhex(lent["handle"]))
    out: dict[str, Any] = {"open_ms": (time.perf_counter() - began) * 1e3}
    out["probe_gb_per_s"] = memory.probe(address, lent["size"]) / 1e9
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(1)).tolist()
    blocks, rest = order[: TOKENS // 16], order[TOKENS // 16 :]
    source = DeviceRange(address, lent["size"])
    times = [_pull_ms(runner, blocks, source) for _ in range(REPEATS)][2:]
    out["pull_256mib_ms"] = statistics.median(times)
    out["pull_gb_per_s"] = lent["size"] / statistics.median(times) / 1e6

    per = CONTEXT // 16 + 8
    params = SamplingParams(max_tokens=1, temperature=0.0)
    seqs = [
        ScheduledSeq(f"s{i}", [i + 1], CONTEXT, (rest[i * per : (i + 1) * per],), True, params, 0) for i in range(BATCH)
    ]

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            runner.execute(seqs)
        return (time.perf_counter() - began) * 1e3

    steps(5)
    alone, beside = [], []
    for _ in range(REPEATS):
        alone.append(steps(3))
        torch.cuda.synchronize()
        began = time.perf_counter()
        coming = runner.unpack(blocks, TOKENS, source)
        for _ in range(3):
            runner.execute(seqs)
        beside.append((time.perf_counter() - began) * 1e3)
        assert coming is not None
        coming.wait()
    out["decode_step_ms"] = statistics.median(alone) / 3
    out["decode_loss_ms_per_256mib"] = statistics.median(b - a for a, b in zip(alone, beside, strict=True))
    os.kill(lent["pid"], signal.SIGKILL)
    time.sleep(1.0)
    out["pull_after_the_lender_died_ms"] = _pull_ms(runner, blocks, source)
    out["steps_go_on"] = steps(3) > 0
    print("LINK " + json.dumps(out), flush=True)


if __name__ == "__main__":
    {"lend": lend, "pull": pull}[sys.argv[1]]()
