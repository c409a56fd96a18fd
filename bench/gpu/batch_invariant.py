"""--batch-invariant on one GPU: is every sequence the same to the bit, and what does it cost?

    python -m diptych.bench.gpu.batch_invariant --out bench/results/gpu-batch-invariant.json

kernels   each kernel at the 8B shape: a row alone, in tiles of every launch, by one program or several: how many bits differ;
          and other launches' times, which may not change a bit
small, big   random bf16 weights of a small and of the 8B shape, 43 prompts, greedy and seeded: ids and logprobs alone, beside
          all others in steps of any size, behind a cached prefix (also of KV that decoding computed), preempted, from KV handed
          to another pool; bytes of KV in chunks of any size; the same without the flag, which need not be equal
timing    decode at batch 1, 8, 64, 256 and prefill of 2,048 and 8,192 at the 8B shape, without and with the flag in turns
cluster   `diptych up` on this GPU with all requests at once, and `diptych serve` with one at a time, over HTTP

The exit code is 1 when ids, KV or a kernel's bits differ, or a block failed or was not reached in time. --rehearse runs the
identity blocks on a CPU, through Triton's interpreter, on a model of nothing.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.bench.gpu.step import GREEDY, LLAMA_8B, RandomTensors, _seqs
from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.kv_pool import KvPool, kv_format_of
from diptych.engine.exec.loading import PlacedModel, load_weights
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, ScheduledSeq
from diptych.engine.offline import OfflineEngine, OfflineResult

BLOCKS = ("kernels", "timing", "big", "small", "cluster")
BLOCK_SIZE = 16
SMALL = {**LLAMA_8B, "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4}  # fmt: skip
TINY = {**SMALL, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
BUDGETS = {"decode 64": 0.15, "prefill 2048": 0.25}
Row = dict[str, Any]


class Report:
    """What was found, saved after every block."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.begun, self._out, self._seconds = time.monotonic(), out, seconds
        self.result: Row = {"blocks": {}, "failures": []}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f}] {text}", flush=True)

    def fail(self, text: str) -> None:
        self.result["failures"].append(text)
        self.say(f"FAILED: {text}")

    def left(self) -> float:
        return self._seconds - (time.monotonic() - self.begun)

    def block(self, name: str, run: Callable[[Row], None]) -> None:
        """An error in one block does not keep the others from running."""
        if self.left() <= 0:
            self.fail(f"{name}: not run, the time is over: give it a run of its own, --blocks {name}")
            return
        self.say(f"== {name}")
        row: Row = {}
        self.result["blocks"][name] = row
        try:
            run(row)
        except Exception:
            traceback.print_exc()
            self.fail(f"{name}: {traceback.format_exc(limit=-1).splitlines()[-1]}")
        self.write()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.result, indent=1) + "\n")


def differing(a: Tensor, b: Tensor) -> str:
    """ "" where all bits are equal; else how many elements differ, in how many rows, and by how much."""
    if torch.equal(a, b):
        return ""
    wrong = a != b
    rows = int(wrong.flatten(0, -2).any(-1).sum()) if wrong.dim() > 1 else 1
    away = (a.float() - b.float()).abs().max().item()
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ, in {rows} rows, by at most {away:.3g}"


# ---- kernels ----------------------------------------------------------------------------------------------------------


def kernels(report: Report, row: Row) -> None:
    from diptych.bench.kernels.cases import LLAMA_8B as HEADS
    from diptych.bench.kernels.cases import Heads

    torch.manual_seed(0)
    for name, columns, size, silu in (
        ("qkv", 6144, 4096, False), ("o", 4096, 4096, False), ("gate_up", 14_336, 4096, True),
        ("down", 4096, 14_336, False), ("lm_head", 128_256, 4096, False),
    ):  # fmt: skip
        row[name] = linear(report, name, columns, size, silu=silu)
    attention(report, "attention", HEADS, None)
    attention(report, "attention with a window", HEADS, 700)
    attention(report, "attention with 3 heads of 64 a group", Heads(9, 3, 64), None)


def linear(report: Report, name: str, columns: int, size: int, *, silu: bool) -> Row:
    """Bits of every launch against one of all rows, and the times of other launches beside cuBLAS."""
    from torch.nn.functional import linear as cublas

    from diptych.bench.kernels.timing import graph_time_s
    from diptych.kernels import triton_invariant_matmul as ours

    chains = 1 if silu or name == "lm_head" else ours.chains_of(columns, size)
    weights = [
        torch.randn((2 if silu else 1) * columns, size, device="cuda", dtype=torch.bfloat16).mul_(size**-0.5)
        for _ in range(2 if name in ("gate_up", "lm_head") else 4)
    ]
    weight = weights[0]
    x = torch.randn(600 if name == "lm_head" else 2048, size, device="cuda", dtype=torch.bfloat16)
    whole = ours.invariant_matmul(x, weight, silu=silu, chains=chains)
    for first, count in ((0, 1), (7, 1), (3, 8), (11, 16), (10, 64), (64, 65), (100, 128), (200, 256), (300, 270)):
        some = ours.invariant_matmul(x[first : first + count], weight, silu=silu, chains=chains)
        if found := differing(some, whole[..., first : first + count, :]):
            report.fail(f"{name}: {count} rows from {first}: {found}")
    if not silu:
        exact = x[:64].double() @ weight.double().T
        total = whole[..., :64, :].double().sum(0) if chains > 1 else whole[:64].double()
        error = ((total - exact).norm() / exact.norm()).item()
        report.say(f"{name}: relative error {error:.2e}; beside cuBLAS: "
                   f"{differing(total.bfloat16(), cublas(x, weight)[:64]) or 'the same bits'}")  # fmt: skip
        if not error < 8e-3:
            report.fail(f"{name}: relative error {error:.2e}")
    times: Row = {}
    for rows in (1, 64, 256, x.shape[0]):
        some = x[:rows]
        times[f"{rows} cuBLAS"] = 1e6 * graph_time_s([partial(cublas, some, w) for w in weights])
        best = ours.invariant_shape(rows, columns, silu=silu, chains=chains)
        others = _others(rows, silu) if name in ("o", "gate_up", "down") else []
        for shape in dict.fromkeys((best, *others)):
            try:
                calls = [
                    partial(ours.invariant_matmul, some, w, silu=silu, chains=chains, shape=shape) for w in weights
                ]
                if found := differing(calls[0](), whole[..., :rows, :]):
                    report.fail(f"{name}: {rows} rows as {shape}: {found}")
                label = f"{rows} {shape.block_m}x{shape.block_n}x{shape.block_k} {shape.num_warps}w {shape.num_stages}s"
                label += (" tma" if shape.tma else "") + (" (chosen)" if shape == best else "")
                times[label] = 1e6 * graph_time_s(calls)
            except Exception as error:
                report.say(f"{name}: {rows} rows as {shape}: {type(error).__name__}: {str(error)[:200]}")
                if shape == best:
                    report.fail(f"{name}: {rows} rows: {type(error).__name__}")
                    traceback.print_exc()
    report.say(f"{name}: us: " + ", ".join(f"{key}: {value:.1f}" for key, value in times.items()))
    return times


def _others(rows: int, silu: bool) -> list[Any]:
    """Launches that may be faster."""
    from diptych.kernels.triton_invariant_matmul import InvariantShape as Shape

    if rows <= 64:
        wide = [Shape(64, 128, 64, 4, 4)] if not silu else [Shape(64, 64, 64, 8, 4), Shape(64, 32, 128, 4, 4)]
        return [Shape(64, 64, 128, 4, 3), Shape(64, 32, 128, 4, 4), Shape(64, 64, 64, 4, 4, tma=True), *wide]
    if rows <= 256:
        return [
            Shape(128, 64, 64, 4, 4, tma=True),
            Shape(128, 128, 64, 8, 3, tma=True),
            Shape(64, 64, 64, 4, 4, tma=True),
        ]
    wide = [Shape(128, 128, 64, 8, 3, tma=True), Shape(128, 128, 64, 8, 4)]
    return wide if silu else [*wide, Shape(128, 256, 64, 8, 3, tma=True), Shape(128, 256, 64, 8, 3)]


def attention(report: Report, name: str, heads: Any, window: int | None) -> None:
    """Every position of two prompts as a decoding row, by one program and by several, against the whole prompts."""
    from diptych.bench.kernels.cases import paged_case
    from diptych.kernels.triton_invariant_attention import (
        invariant_decode,
        invariant_prefill,
        invariant_rows,
        prefill_tiles,
    )

    lens = [1300, 1537]
    case = paged_case(heads, lens, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(sum(lens), heads.num_q_heads, heads.head_dim, device="cuda", dtype=torch.bfloat16)
    rule: Row = {"scale": heads.head_dim**-0.5, "window": window}

    def int32(values: Iterable[Any]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device="cuda")

    def prefill(starts: Sequence[int]) -> Tensor:
        """The prompts' tokens from `starts` on, in the rows of q."""
        counts = [n - start for n, start in zip(lens, starts, strict=True)]
        chunks = int32(
            [base + start, count, start, int(case.rows[i])]
            for i, (base, count, start) in enumerate(zip((0, lens[0]), counts, starts, strict=True))
        )
        tiles = prefill_tiles(counts, starts, heads.group, invariant_rows(2, heads.group))
        return invariant_prefill(q, case.kv, case.tables, chunks, int32(tiles).view(-1, 2), **rule)

    whole = prefill([0, 0])
    for starts in ([7, 1000], [512, 64], [1299, 1500]):
        some = prefill(starts)
        for i, (base, start) in enumerate(zip((0, lens[0]), starts, strict=True)):
            if found := differing(some[base + start : base + lens[i]], whole[base + start : base + lens[i]]):
                report.fail(f"{name}: prompt {i} from {start}: {found}")
    table_rows = torch.cat([case.rows[i : i + 1].expand(n) for i, n in enumerate(lens)]).contiguous()
    positions = int32(p + 1 for n in lens for p in range(n))
    for splits in (1, 2, 8):
        for first, count in ((0, sum(lens)), (1290, 40), (2000, 1)):
            span = slice(first, first + count)
            some = invariant_decode(
                q[span], case.kv, case.tables, table_rows[span], positions[span], splits=splits, **rule
            )
            if found := differing(some, whole[span]):
                report.fail(f"{name}: {count} decoding rows from {first}, {splits} programs: {found}")
    report.say(f"{name}: looked at {sum(lens)} rows")


# ---- identity ---------------------------------------------------------------------------------------------------------


class Weights:
    """One set of random weights, with and without the flag."""

    def __init__(self, config: Row, device: str, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = describe(config), device, dtype
        torch.manual_seed(0)
        self._kv = kv_format_of(self.model, block_size=BLOCK_SIZE, dtype=str(dtype).removeprefix("torch."))
        self.weights: ModelWeights = load_weights(_Tensors(device, dtype), self.plan(True)).weights

    def plan(self, batch_invariant: bool) -> Any:
        return plan_for(
            self.model, self._kv, device_type=self.device, dtype=self.dtype, wanted="triton",
            batch_invariant=batch_invariant,
        )  # fmt: skip

    def runner(
        self, num_blocks: int, *, batch_invariant: bool, graph_sizes: Sequence[int] | None = None
    ) -> TorchModelRunner:
        placed = PlacedModel(self.plan(batch_invariant), self.weights)
        return TorchModelRunner(
            placed, eos_token_ids=(), num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=4096,
            graph_sizes=graph_sizes,
        )  # fmt: skip


class _Tensors(RandomTensors):
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        scale = 1.0 if "embed" in name else shape[1] ** -0.5
        return torch.randn(shape, device=self._device, dtype=self._dtype).mul_(scale)


class Prompts:
    """43 prompts (5 when it is rehearsed), every other one seeded, and others that keep them company."""

    def __init__(self, vocab: int, *, tiny: bool) -> None:
        rng = random.Random(11)
        count, self.output = (5, 3) if tiny else (43, 24)
        lengths = [
            rng.choice((7, 20, 33, 45) if tiny else (5, 70, 128, 333, 511, 700, 1025, 1500)) for _ in range(count)
        ]
        self.tokens = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
        self.others = [[rng.randrange(3, vocab) for _ in range(rng.choice(lengths))] for _ in range(2 if tiny else 21)]

    def params(self, i: int, output: int) -> SamplingParams:
        fields: Row = {"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {"temperature": 0.0}
        return SamplingParams(max_tokens=output, ignore_eos=True, logprobs=0, **fields)

    def requests(self, which: Sequence[int] | None = None, *, company: bool = False) -> list[EngineRequest]:
        which = range(len(self.tokens)) if which is None else which
        out = [EngineRequest(f"r{i}", Prompt(tuple(self.tokens[i])), self.params(i, self.output)) for i in which]
        if company:
            out += [
                EngineRequest(f"o{i}", Prompt(tuple(tokens)), self.params(i, self.output + 9))
                for i, tokens in enumerate(self.others)
            ]
        return out


def generate(
    runner: TorchModelRunner, batches: Sequence[Sequence[EngineRequest]], *, apart: int = 0, **fields: Any
) -> tuple[list[OfflineResult], Any]:
    """One engine; batches one after the other. apart: steps between two arrivals. Returns: also its statistics."""
    config: Row = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "enable_prefix_caching": False, **fields}
    engine = OfflineEngine(
        LocalExecutor(runner),
        EngineConfig(runner.num_blocks, BLOCK_SIZE, max_step_time_s=None, mixed_step_time_s=None, **config),
        IdentityHeader(b"k" * 32, "m", "t", runner.kv_dtype, BLOCK_SIZE),
    )
    results: list[OfflineResult] = []
    for batch in batches:
        results += engine.generate(batch, [i * apart for i in range(len(batch))])
    return results, engine.stats()


class Identity:
    """Ids (and logprobs) of the prompts, however they are computed, against those of each prompt alone."""

    def __init__(self, report: Report, row: Row, name: str, prompts: Prompts) -> None:
        self._report, self._row, self._name, self._prompts = report, row, name, prompts
        self.alone: list[OfflineResult] = []

    def compare(self, what: str, results: Sequence[OfflineResult], *, skipped: int = 0, strict: bool = True) -> None:
        """results: the first of them are the prompts'. skipped: outputs that are part of the prompt now."""
        equal, bits, first = 0, 0, []
        for i, alone in enumerate(self.alone):
            got, want = results[i].token_ids, alone.token_ids[skipped:]
            equal += got == want
            bits += [e.logprob for e in results[i].logprobs] == [e.logprob for e in alone.logprobs[skipped:]]
            if got != want:
                at = next((k for k, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(got))
                first.append(f"prompt {i} of {len(self._prompts.tokens[i])} tokens from output {at}")
        count = len(self.alone)
        self._row[what] = {"equal_ids": equal, "equal_logprobs": bits, "of": count, "different": first[:8]}
        self._report.say(f"{self._name}, {what}: ids of {equal} of {count} equal, logprobs of {bits}")
        if strict and equal != count:
            self._report.fail(f"{self._name}, {what}: ids of {equal} of {count} equal: {'; '.join(first[:4])}")
        elif strict and bits != count:
            self._report.say(f"{self._name}, {what}: logprobs differ where ids do not: look at KV below")


def identity(report: Report, row: Row, name: str, weights: Weights, *, tiny: bool) -> None:
    prompts = Prompts(weights.model.vocab_size, tiny=tiny)
    num_blocks = 200 if tiny else 8000
    sizes = [] if tiny else [1, 8, 64]
    run = Identity(report, row, name, prompts)
    runner = weights.runner(num_blocks, batch_invariant=True, graph_sizes=sizes)
    run.alone, _ = generate(runner, [[request] for request in prompts.requests()])
    report.say(f"{name}: {len(run.alone)} prompts alone")
    everyone = prompts.requests(company=True)
    run.compare("beside all others", generate(runner, [everyone])[0])
    if report.left() < 25:
        report.fail(f"{name}: the time is over")
        return
    run.compare("arriving one by one", generate(runner, [everyone], apart=2)[0])
    small_step = 16 if tiny else 256
    run.compare(f"steps of {small_step} tokens", generate(runner, [everyone], max_num_batched_tokens=small_step)[0])
    run.compare(
        "chunks of at most 100", generate(runner, [everyone], long_prefill_token_threshold=11 if tiny else 100)[0]
    )
    run.compare("without steps ahead", generate(runner, [everyone], steps_ahead=False)[0])
    cached(run, runner, prompts, everyone)
    preempted(run, weights, prompts, tiny=tiny)
    handed_over(report, run, weights, runner, prompts, tiny=tiny)
    del runner
    if not tiny:
        plain = weights.runner(num_blocks, batch_invariant=False, graph_sizes=[1, 64])
        with_flag, run.alone = run.alone, generate(plain, [[request] for request in prompts.requests()])[0]
        run.compare("without the flag: beside all others", generate(plain, [everyone])[0], strict=False)
        run.compare("without the flag: the ids with it", with_flag, strict=False)


def cached(run: Identity, runner: TorchModelRunner, prompts: Prompts, everyone: list[EngineRequest]) -> None:
    """Twice, the second time from the cache; then each prompt with half of its answer behind it, whose KV decoding computed."""
    half = prompts.output // 2
    longer = [
        EngineRequest(
            f"c{i}",
            Prompt((*prompts.tokens[i], *alone.token_ids[:half])),
            SamplingParams(max_tokens=prompts.output - half, ignore_eos=True, logprobs=0, temperature=0.0),
        )
        for i, alone in enumerate(run.alone)
    ]
    again = [EngineRequest(f"again-{r.attempt}", r.prompt, r.sampling) for r in everyone]
    results, _ = generate(runner, [everyone, again, longer], enable_prefix_caching=True)
    count = len(everyone)
    run.compare("cold, with a prefix cache", results[:count])
    warm = results[count : 2 * count]
    run.compare(f"cached ({sum(r.num_cached_tokens for r in warm)} tokens)", warm)
    # Greedy ones only: a seeded draw depends on its place among the outputs, which is another one now.
    alone, kept = run.alone, [i for i in range(len(run.alone)) if i % 2 == 0]
    run.alone = [alone[i] for i in kept]
    continued = [results[2 * count + i] for i in kept]
    tokens = sum(r.num_cached_tokens - len(prompts.tokens[i]) for i, r in zip(kept, continued, strict=True)
                 if r.num_cached_tokens > len(prompts.tokens[i]))  # fmt: skip
    run.compare(f"behind their own answers ({tokens} tokens by decoding, cached)", continued, skipped=half)
    run.alone = alone


def preempted(run: Identity, weights: Weights, prompts: Prompts, *, tiny: bool) -> None:
    """In a pool for a part of them, behind others that grow: computed anew, now in a chunk, what decoding computed before."""
    runner = weights.runner(10 if tiny else 700, batch_invariant=True, graph_sizes=[] if tiny else [1, 8, 32])
    others = [
        EngineRequest(f"o{i}", Prompt(tuple(tokens)), prompts.params(i, 24 if tiny else 300))
        for i, tokens in enumerate(prompts.others)
    ]
    results, stats = generate(runner, [[*others, *prompts.requests()]], preemption_mode="recompute")
    run.compare(f"preempted {stats.preemptions_total} times", results[len(others) :])


def handed_over(
    report: Report, run: Identity, weights: Weights, runner: TorchModelRunner, prompts: Prompts, *, tiny: bool
) -> None:
    """Prefill in one pool, in chunks of several sizes; its KV's bytes compared, and moved to another pool that decodes."""
    there = weights.runner(200 if tiny else 6000, batch_invariant=True, graph_sizes=[] if tiny else [64])
    per_token = runner.kv_bytes_per_token
    decoding: list[tuple[int, list[int], list[int]]] = []
    used = 0
    for i, tokens in enumerate(prompts.tokens):
        n, params = len(tokens), prompts.params(i, prompts.output)
        blocks = -(-n // BLOCK_SIZE)
        table, payloads, drawn = list(range(blocks)), [], []
        for chunk in (n, n - 1, 9, 16) if tiny else (n, n - 1, 512, 100):
            runner.pool.tensor[table] = float("nan")
            row: Any = ()
            for start in range(0, n, max(1, chunk)):
                end = min(n, start + max(1, chunk))
                seq = ScheduledSeq(f"h{i}-{chunk}", list(tokens[start:end]), start, (table,), end == n, params, 0)
                seq.first_blocks = (0,)
                [row] = runner.execute([seq]).token_ids
            payload = bytearray(n * per_token)
            runner.pack(table, n, memoryview(payload))
            payloads.append((chunk, payload))
            drawn.append(list(row))
            if i % 7 and not tiny:
                break  # every seventh prompt in all sizes: the others are handed over only
        for chunk, payload in payloads[1:]:
            if payload != payloads[0][1]:
                a, b = (torch.frombuffer(p, dtype=torch.uint8) for p in (payload, payloads[0][1]))
                count = int((a != b).sum())
                report.fail(f"KV of prompt {i}, {n} tokens: chunks of {chunk}: {count} of {len(payload)} bytes differ")
        if any(row != drawn[0] for row in drawn):
            report.fail(f"first tokens of prompt {i}, {n} tokens, differ by the chunks: {drawn}")
        own = blocks + -(-prompts.output // BLOCK_SIZE) + 1
        target = list(range(used, used + own))
        used += own
        there.unpack(target[:blocks], n, memoryview(payloads[0][1]))
        decoding.append((i, target, drawn[0]))
    for step in range(prompts.output - 1):
        seqs = []
        for i, table, out in decoding:
            start = len(prompts.tokens[i]) + step
            params = prompts.params(i, prompts.output)
            seq = ScheduledSeq(f"d{i}", [out[-1]], start, (table,), True, params, step + 1)
            seq.first_blocks = (0,)
            seqs.append(seq)
        for (_, _, out), row in zip(decoding, there.execute(seqs).token_ids, strict=True):
            out.extend(row)
    equal = sum(out == run.alone[i].token_ids for i, _, out in decoding)
    run._row["handed over"] = {"equal_ids": equal, "of": len(decoding)}
    report.say(
        f"{run._name}, handed over to another pool and decoded together: ids of {equal} of {len(decoding)} equal"
    )
    if equal != len(decoding):
        report.fail(f"{run._name}, handed over: ids of {equal} of {len(decoding)} equal")


# ---- timing -----------------------------------------------------------------------------------------------------------


class _Blocks:
    """What step._seqs asks of a runner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks


def timing(report: Report, row: Row, weights: Weights) -> None:
    from diptych.bench.gpu.step_parts import compare
    from diptych.engine.exec.cuda.backend import CudaBackend

    sizes, num_blocks = [1, 8, 64, 256], 18_000
    kv = kv_format_of(weights.model, block_size=BLOCK_SIZE, dtype="bfloat16")
    pool = KvPool((num_blocks,), kv, device=torch.device("cuda"))
    backends: dict[str, Any] = {}
    with torch.inference_mode():
        for name, flag in (("without", False), ("with", True)):
            begun = time.monotonic()
            backends[name] = CudaBackend(
                weights.weights, pool, max_model_len=16_384, graph_sizes=sizes, batch_invariant=flag
            )
            report.say(f"{name} the flag: kernels and graphs in {time.monotonic() - begun:.1f} s")
        pool.tensor.normal_()
    for batch, context in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 8192)):
        seqs: Any = _seqs(_Blocks(num_blocks), batch, context, GREEDY)  # type: ignore[arg-type]
        steps: dict[str, Callable[[], object]] = {}
        for name, backend in backends.items():
            steps[name] = partial(backend.execute, seqs, backend.build(seqs), None)
        keep(report, row, f"decode {batch}" + (f" x {context}" if context != 1024 else ""), compare(steps))
    for length in (512, 2048, 8192):
        [seq] = _seqs(_Blocks(num_blocks), 1, length, GREEDY)  # type: ignore[arg-type]
        seq.start, seq.token_ids = 0, [(i * 7919) % weights.model.vocab_size for i in range(length)]
        times: dict[str, list[float]] = {name: [] for name in backends}
        with torch.inference_mode():
            for _ in range(9):
                for name, backend in backends.items():
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    backend.execute([seq], backend.build([seq]), None)
                    torch.cuda.synchronize()
                    times[name].append(time.perf_counter() - begun)
        keep(report, row, f"prefill {length}", {name: statistics.median(some[2:]) for name, some in times.items()})


def keep(report: Report, row: Row, name: str, seconds: dict[str, float]) -> None:
    more = seconds["with"] / seconds["without"] - 1
    row[name] = {**{key: 1e3 * value for key, value in seconds.items()}, "more": more}
    text = f"{name}: {1e3 * seconds['without']:.2f} ms without, {1e3 * seconds['with']:.2f} with, {more:+.1%}"
    if name in BUDGETS:
        text += f" (budget {BUDGETS[name]:.0%}{'' if more <= BUDGETS[name] else ': EXCEEDED'})"
    report.say(text)


# ---- cluster ----------------------------------------------------------------------------------------------------------


def cluster(report: Report, row: Row, work: Path) -> None:
    """Real processes: prefill and decode on this GPU, and one worker that does both."""
    from diptych.bench.gpu import over_http
    from diptych.bench.gpu.random_model import Shape, write_model

    model = write_model(work / "bf16", Shape(8, 1024, 4096, 16, 4, 32_000, 8192, "bfloat16"), "cuda")
    torch.cuda.empty_cache()
    prompts = Prompts(32_000, tiny=False)
    args = argparse.Namespace(
        seed=1, device="cuda", tiny=False, work=str(work), out=str(work / "over-http.json"), blocks="identity"
    )
    bench = over_http.Bench(args)
    flags = ["--batch-invariant", "--max-num-batched-tokens", "512"]

    def fields(i: int) -> Row:
        return {"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {}

    async def go() -> None:
        found: dict[str, list[list[int]]] = {}
        with bench.up("pd", model, flags, gpus="0"):
            answers = await asyncio.gather(
                *(bench.one(p, 48, local_prefill_max_tokens=0, **fields(i)) for i, p in enumerate(prompts.tokens))
            )
            found["P/D, all at once"] = [answer.token_ids for answer in answers]
            row["over_transport"] = sum(answer.kv_bytes > 0 for answer in answers)
            again = [await bench.one(p, 48, **fields(i)) for i, p in enumerate(prompts.tokens)]
            found["P/D, one by one, cached"] = [answer.token_ids for answer in again]
            row["errors"] = [answer.error for answer in (*answers, *again) if answer.error][:4]
        with bench.serve("serve", model, flags[:1]):
            alone = [(await bench.one(p, 48, **fields(i))).token_ids for i, p in enumerate(prompts.tokens)]
            both = await asyncio.gather(*(bench.one(p, 48, **fields(i)) for i, p in enumerate(prompts.tokens)))
            found["serve, all at once, cached"] = [answer.token_ids for answer in both]
        for name, ids in found.items():
            equal = sum(a == b and len(a) == 48 for a, b in zip(ids, alone, strict=True))
            row[name] = {"equal_ids": equal, "of": len(alone)}
            report.say(f"cluster: {name}: ids of {equal} of {len(alone)} equal serve's, one by one")
            if equal != len(alone):
                report.fail(f"cluster: {name}: ids of {equal} of {len(alone)} equal")
        if row["errors"]:
            report.fail(f"cluster: {row['errors']}")
        if late := bench.late_kernels():
            report.fail(f"cluster: {len(late)} kernels were compiled after readiness: {late[0]}")

    asyncio.run(go())


# ---- all of it --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="of %(default)s")
    parser.add_argument("--seconds", type=float, default=190.0, help="no block begins later")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/diptych-batch-invariant"))  # noqa: S108
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, through Triton's interpreter")
    args = parser.parse_args()
    report, blocks = Report(args.out, args.seconds), args.blocks.split(",")
    if args.rehearse:
        from diptych.bench.kernels.ordered_dot import replaced

        setattr(*replaced())
        tiny = Weights(TINY, "cpu", torch.float32)
        report.block("tiny", lambda row: identity(report, row, "tiny", tiny, tiny=True))
    else:
        from diptych.bench.kernels.timing import machine

        report.result["machine"] = machine()
        report.say(json.dumps(report.result["machine"]))
        if "kernels" in blocks:
            report.block("kernels", lambda row: kernels(report, row))
        if "small" in blocks:
            small = Weights(SMALL, "cuda", torch.bfloat16)
            report.block("small", lambda row: identity(report, row, "small", small, tiny=False))
            del small
        if {"big", "timing"} & set(blocks):
            big = Weights(LLAMA_8B, "cuda", torch.bfloat16)
            if "timing" in blocks:
                report.block("timing", lambda row: timing(report, row, big))
            if "big" in blocks:
                report.block("big", lambda row: identity(report, row, "8B", big, tiny=False))
            del big
        if "cluster" in blocks:
            report.block("cluster", lambda row: cluster(report, row, args.work))
    report.write()
    failures = report.result["failures"]
    report.say(f"{len(failures)} failures, in {args.out}" if failures else f"identity holds, in {args.out}")
    for text in failures:
        print(f"  {text}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
