"""Tensor parallelism over the GPUs of one host: `python -P -m diptych.bench gpu-ranks --out FILE`. One process for each rank.

link       latency of an all-reduce by size: NCCL, one launch over inboxes, and that launch with residual and norm beside NCCL and
           the norm's own launch; each captured in a graph. Sums are compared with those of all addends in fp32, bit by bit.
identity   a small model: ids of all ranks together and of one rank alone, prompts whole and in chunks, decoding after each step
           and ahead (fp32), and the largest difference of a logit (bf16)
decode     steps at Llama-3.1-70B's shape with random weights. Floor: (a rank's weights + KV) / read bandwidth, and two
           all-reduces a layer at the fastest latency of that size in this run.
prefill    chunks of the same model. Floor: FLOPs of a rank / cuBLAS's peak.
lost       one rank is killed in between two steps: until the other one says so
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.bench.gpu.step import GREEDY, LLAMA_8B, Rows, graph_seconds
from diptych.bench.kernels.timing import graph_time_s, machine, matmul_peak, read_bandwidth
from diptych.common import child
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.cuda.communicator import CudaCommunicator, reads_of
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import load_weights
from diptych.engine.exec.methods.base import cut_out
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace
from diptych.engine.exec.parallel.rank_runner import connect
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import RunnerLost
from diptych.engine.step_messages import UNKNOWN_TOKEN
from diptych.kernels.triton_all_reduce import one_shot_all_reduce
from diptych.kernels.triton_norm import rms_norm

LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
SMALL = {
    **LLAMA_8B, "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
BLOCK_SIZE = 16
PARTS = ("link", "identity", "decode", "prefill", "lost")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
"""Of a message of the 70B model: 16 KiB each in bf16."""
LOST_DEADLINE_S = 2.0


class RandomTensors:
    """Implements engine.exec.loading.WholeModel: the same random numbers for a name on every rank; norms are ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> Tensor:
        if len(shape) == 1:
            return cut_out(torch.ones(shape, device="cuda", dtype=self._dtype), where)
        numbers = torch.Generator("cuda").manual_seed(sum(name.encode()) * 7919 + len(name))
        x = torch.empty(shape, device="cuda", dtype=self._dtype).normal_(generator=numbers)
        return cut_out(x.mul_(1.0 if "embed" in name else shape[1] ** -0.5), where)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def file_of(self, name: str) -> str:
        return name

    def drop(self, suffixes: Iterable[str]) -> None: ...

    def finish(self) -> None: ...


def make_runner(
    description: ModelDescription, dtype: torch.dtype, communicator: Communicator | None, **settings: Any
) -> TorchModelRunner:
    """Of this rank; None: of one that has everything."""
    place = WHOLE_PLACE if communicator is None else communicator.place
    name = str(dtype).removeprefix("torch.")
    kv = place.part(kv_format_of(description, block_size=BLOCK_SIZE, dtype=name))
    plan = plan_for(description, kv, device_type="cuda", dtype=dtype, place=place)
    with torch.inference_mode():
        model = load_weights(RandomTensors(dtype), plan, communicator=communicator)
    return TorchModelRunner(model, eos_token_ids=(), block_size=BLOCK_SIZE, **settings)


# ---- what the ranks do ----


def link(communicator: CudaCommunicator) -> Rows:
    rows: Rows = []
    size, dtype = LLAMA_70B["hidden_size"], torch.bfloat16
    assert isinstance(size, int)
    degree, inboxes, peers = communicator.place.tensor_parallel, communicator._inboxes, communicator._peers
    weight = torch.rand(size, device="cuda").to(dtype) + 0.5
    torch.manual_seed(communicator.place.rank)
    for count in ROWS:
        message = torch.randn(count, size, device="cuda").to(dtype)
        parts = communicator.gather_columns(message).view(count, degree, size).float()
        expected = functools.reduce(torch.add, parts.unbind(1)).to(dtype)
        row: dict[str, Any] = {"rows": count, "kib": message.nbytes / 1024}
        ways: dict[str, Callable[[Tensor], Any]] = {}
        if inboxes is not None and inboxes.holds(message, size):
            ways["one_shot"] = lambda x: one_shot_all_reduce(x, inboxes)
        if peers is not None:
            ways["nccl"] = lambda x: (peers.allreduce([x]).wait(), x)[1]
        for name, way in ways.items():
            row[f"{name}_right"] = bool(torch.equal(way(message.clone()), expected))
            some = [torch.zeros_like(message) for _ in range(4)]
            calls = [functools.partial(way, x) for x in some * 5]
            row[f"{name}_us"] = graph_time_s(calls) * 1e6
        residual = torch.zeros_like(message)
        if inboxes is not None and inboxes.holds(message, size):
            communicator.one_shot_bytes = 1 << 30
            norm = _Norm(weight)
            fused = functools.partial(communicator.all_reduce_norm, message, norm, residual, None)  # type: ignore[arg-type]
            row["one_shot_norm_us"] = graph_time_s([fused] * 20) * 1e6
        if peers is not None:

            def apart(x: Tensor = message, residual: Tensor = residual) -> Tensor:
                peers.allreduce([x]).wait()
                return rms_norm(x, weight, 1e-5, residual)

            row["nccl_norm_us"] = graph_time_s([apart] * 20) * 1e6
        rows.append(row)
    return rows


class _Norm:
    eps, offset = 1e-5, 0.0

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def _seq(name: str, tokens: Sequence[int], start: int, table: Sequence[int], params: SamplingParams, index: int = 0,
         sample: bool = True) -> ScheduledSeq:  # fmt: skip
    return ScheduledSeq(name, list(tokens), start, (list(table),), sample, params, index)


def generate(
    runner: TorchModelRunner,
    prompts: Sequence[Sequence[int]],
    count: int,
    chunk: int,
    params: SamplingParams,
    ahead: bool,
) -> list[list[int]]:
    """`count` tokens of each prompt. ahead: decode steps are launched before the one before is read."""
    per = -(-max(len(prompt) + count for prompt in prompts) // BLOCK_SIZE)
    tables = [range(i * per, (i + 1) * per) for i in range(len(prompts))]
    out: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            last = start + chunk >= len(prompt)
            seq = _seq(f"s{i}", prompt[start : start + chunk], start, tables[i], params, sample=last)
            [row] = runner.execute([seq]).token_ids
        out.append(list(row))
    flying: Any = None
    for index in range(1, count):
        seqs = [
            _seq(f"s{i}", [UNKNOWN_TOKEN if flying else out[i][-1]], len(prompt) + index - 1, tables[i], params, index)
            for i, prompt in enumerate(prompts)
        ]
        if not ahead:
            rows = runner.execute(seqs).token_ids
        else:
            step = runner.launch(seqs, range(len(seqs)) if flying else ())
            rows = flying.result().token_ids if flying else []
            step.draw()
            flying = step
        for tokens, row in zip(out, rows, strict=False):
            tokens += row
    if flying:
        for tokens, row in zip(out, flying.result().token_ids, strict=True):
            tokens += row
    return out


def identity(communicator: CudaCommunicator) -> dict[str, Any]:
    rng = random.Random(5)
    description = describe(SMALL)
    prompts = [[rng.randrange(4096) for _ in range(n)] for n in (1, 7, 64, 300, 700)]
    settings: dict[str, Any] = {
        "num_blocks": 512, "max_model_len": 2048, "graph_sizes": [1, 8], "chunk_graphs": [(0, 64), (0, 256)]
    }  # fmt: skip
    seeded = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.9, seed=11)
    runs = {
        "whole": (1000, GREEDY, False), "chunks": (96, GREEDY, False), "ahead": (1000, GREEDY, True),
        "seeded": (256, seeded, True),
    }  # fmt: skip
    ids: dict[str, dict[str, Any]] = {}
    logits: dict[str, Tensor] = {}
    for name, own in (("ranks", communicator), ("alone", None)):
        fp32 = make_runner(description, torch.float32, own, **settings)
        ids[name] = {
            run: generate(fp32, prompts, 32, chunk, params, ahead) for run, (chunk, params, ahead) in runs.items()
        }
        del fp32
        bf16 = make_runner(description, torch.bfloat16, own, **settings)
        fused = bf16._fused
        assert fused is not None
        found = []
        with torch.inference_mode():
            for i, prompt in enumerate(prompts):
                seqs = [_seq(f"b{i}", prompt, 0, range(50), GREEDY)]
                got = fused.execute(seqs, fused.build(seqs), None)
                assert got is not None
                found.append(got.float().clone())
        logits[name] = torch.cat(found)
        del bf16, fused
        torch.cuda.empty_cache()
    apart = (logits["ranks"] - logits["alone"]).abs().max().item()
    return {
        "ids_equal": {run: ids["ranks"][run] == ids["alone"][run] for run in runs},
        "all_runs_alike": ids["alone"]["whole"] == ids["alone"]["chunks"] == ids["alone"]["ahead"],
        "bf16_largest_logit_difference": apart,
        "bf16_logit_spread": logits["alone"].std().item(),
        "bf16_first_ids_equal": bool((logits["ranks"].argmax(1) == logits["alone"].argmax(1)).all()),
    }


def _decode_seqs(runner: TorchModelRunner, batch: int, context: int) -> list[ScheduledSeq]:
    blocks = -(-(context + 64) // BLOCK_SIZE)
    return [
        _seq(f"d{batch}-{i}", [i + 1], context - 1, range(i * blocks, (i + 1) * blocks), GREEDY) for i in range(batch)
    ]


def _wall(runner: TorchModelRunner, seqs: Sequence[ScheduledSeq], count: int, *, ahead: bool) -> float:
    """Median seconds of a step, each launched with the last one's tokens."""
    times, flying = [], None
    for _ in range(count):
        began = time.perf_counter()
        if ahead:
            step = runner.launch(seqs, range(len(seqs)) if flying else ())
            step.draw()
            if flying is not None:
                flying.result()
            flying = step
        else:
            runner.execute(seqs)
        for seq in seqs:
            seq.start += 1
            if ahead:
                seq.token_ids = [UNKNOWN_TOKEN]
        times.append(time.perf_counter() - began)
    if flying is not None:
        flying.result()
    for seq in seqs:
        seq.start, seq.token_ids = seq.start - count, [1]
    return statistics.median(times[4:])


def steps(communicator: CudaCommunicator, layers: int, latencies: Rows, parts: Sequence[str]) -> dict[str, Any]:
    degree = communicator.place.tensor_parallel
    description = describe({**LLAMA_70B, "num_hidden_layers": layers})
    bandwidth, peak = read_bandwidth(), matmul_peak()
    began = time.perf_counter()
    batches = (1, 8, 16, 64)
    runner = make_runner(
        description, torch.bfloat16, communicator, num_blocks=64 * 70 + 600, max_model_len=8192,
        graph_sizes=batches, chunk_graphs=[(0, 512)],
    )  # fmt: skip
    weights = 2 * (description.layer_weights + description.head_weights) // degree
    out: dict[str, Any] = {
        "layers": layers, "of_layers": LLAMA_70B["num_hidden_layers"], "load_s": time.perf_counter() - began,
        "read_tb_s": bandwidth / 1e12, "matmul_tflop_s": peak / 1e12, "weights_gb_per_rank": weights / 1e9,
        "kv_bytes_per_token_per_rank": runner.kv_bytes_per_token, "decode": [], "prefill": [],
    }  # fmt: skip
    runner.pool.tensor.normal_()
    for batch in batches if "decode" in parts else ():
        context = 1024
        seqs = _decode_seqs(runner, batch, context)
        _wall(runner, seqs, 8, ahead=False)
        reduces = 2 * layers * fastest_us(latencies, batch) / 1e6
        reads = (weights + batch * context * runner.kv_bytes_per_token) / bandwidth
        wall, ahead = _wall(runner, seqs, 24, ahead=False), _wall(runner, seqs, 24, ahead=True)
        device = graph_seconds(runner, seqs)
        floor = reads + reduces
        out["decode"].append(
            {"batch": batch, "context": context, "wall_ms": wall * 1e3, "ahead_ms": ahead * 1e3, "device_ms": device * 1e3,
             "floor_ms": floor * 1e3, "floor_reads_ms": reads * 1e3, "floor_all_reduces_ms": reduces * 1e3,
             "of_floor": ahead / floor, "device_of_floor": device / floor}
        )  # fmt: skip
    for tokens in (512, 2048, 8192) if "prefill" in parts else ():
        prompt = [(i * 7919) % description.vocab_size for i in range(tokens)]
        times = []
        for _ in range(5):
            began = time.perf_counter()
            runner.execute([_seq("p", prompt, 0, range(tokens // BLOCK_SIZE + 1), GREEDY)])
            times.append(time.perf_counter() - began)
        wall = statistics.median(times[2:])
        attention = 2 * sum(b.attention.q_size for b in description.blocks) * tokens * (tokens + 1)
        flops = (2 * description.layer_weights * tokens + attention + 2 * description.head_weights) / degree
        out["prefill"].append(
            {"tokens": tokens, "wall_ms": wall * 1e3, "floor_ms": flops / peak * 1e3, "of_floor": wall * peak / flops}
        )
    return out


def fastest_us(latencies: Rows, rows: int) -> float:
    """Of an all-reduce alone, of the least message of at least so many rows."""
    row = next(row for row in latencies if row["rows"] >= rows)
    return float(min(row[name] for name in ("one_shot_us", "nccl_us") if name in row))


def lost(communicator: CudaCommunicator) -> dict[str, Any]:
    """Rank 1 ends by SIGKILL. Returns: what rank 0 saw."""
    runner = make_runner(
        describe(SMALL),
        torch.bfloat16,
        communicator,
        num_blocks=64,
        max_model_len=256,
        graph_sizes=[1],
        chunk_graphs=[],
    )
    seq = _seq("l", [1], 3, range(4), GREEDY)
    for _ in range(4):
        runner.execute([seq])
    assert communicator._inboxes is not None
    communicator._inboxes.limit.fill_(reads_of(LOST_DEADLINE_S))
    communicator.agree_min(0)
    if communicator.place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    try:
        runner.execute([seq])
    except RunnerLost as error:
        return {"told_after_s": time.perf_counter() - began, "deadline_s": LOST_DEADLINE_S, "error": str(error)}
    return {"told_after_s": None}


def run_rank(args: argparse.Namespace) -> None:
    place = RankPlace(args.rank, len(args.devices))
    torch.cuda.set_device(args.devices[args.rank])
    communicator = connect(place, device="cuda", rendezvous=args.rendezvous, deadline_s=120.0)
    assert isinstance(communicator, CudaCommunicator)

    def say(name: str, value: Any) -> None:
        if place.rank == 0:
            print(f"RESULT {json.dumps([name, value])}", flush=True)

    say("facts", {"nccl": communicator._peers is not None, "inboxes": communicator._inboxes is not None})
    latencies: Rows = []
    if "link" in args.parts:
        latencies = link(communicator)
        communicator.one_shot_bytes = args.one_shot_kib << 10
        say("link", latencies)
    if "identity" in args.parts:
        say("identity", identity(communicator))
    if {"decode", "prefill"} & set(args.parts):
        say("steps", steps(communicator, args.layers, latencies, args.parts))
    if "lost" in args.parts:
        say("lost", lost(communicator))
    communicator.check()
    if "lost" not in args.parts:
        communicator.agree_min(0)
    os._exit(0)  # at once: what is mapped here is another rank's


def run_all(parts: Sequence[str], args: argparse.Namespace, deadline_s: float) -> dict[str, Any]:
    """Start the ranks. Returns: what rank 0 said."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="diptych-ranks-") as folder:
        command = [
            sys.executable, "-P", "-m", "diptych.bench.gpu.ranks", "--rendezvous", f"file://{folder}/meet",
            "--layers", str(args.layers), "--one-shot-kib", str(args.one_shot_kib), "--parts", *parts,
            "--devices", *map(str, args.devices),
        ]  # fmt: skip
        ranks = [
            child.start([*command, "--rank", str(rank)], stdout=subprocess.PIPE) for rank in range(len(args.devices))
        ]
        try:
            out, _ = ranks[0].communicate(timeout=deadline_s)
            for line in out.decode().splitlines():
                word, _, rest = line.partition(" ")
                if word == "RESULT":
                    name, value = json.loads(rest)
                    result[name] = value
            result["exit_code"] = ranks[0].returncode
        except subprocess.TimeoutExpired:
            result["exit_code"] = f"none after {deadline_s:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--devices", nargs="+", type=int, default=[0, 1], help="the GPU of each rank")
    parser.add_argument("--layers", type=int, default=80, help="of the 70B model")
    parser.add_argument("--one-shot-kib", type=int, default=4096, help="larger messages are NCCL's")
    parser.add_argument("--deadline-s", type=float, default=420.0, help="of the ranks")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args)
        return
    result: dict[str, Any] = {"machine": machine(), "devices": args.devices}
    most = [part for part in args.parts if part != "lost"]
    if most:
        result |= run_all(most, args, args.deadline_s)
    if "lost" in args.parts:
        result["lost"] = run_all(["lost"], args, 120.0).get("lost")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
