"""Breakdown of a decode step's time: the whole step, the step without one part at a time, and variants of the step.

    python -m diptych.bench.gpu.step_parts --out bench/results/gpu-parts.json

A kernel timed alone has an empty GPU before and after it; here a part's cost is what the step gains without it. All
variants are captured first and replayed alternately, so that drift of the card affects all. Omitted parts pass on
buffers of finite numbers; the tokens of such a step are meaningless.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from diptych.bench.gpu.step import BLOCK_SIZE, GREEDY, LLAMA_8B, _seqs, random_weights
from diptych.bench.kernels.timing import machine, read_bandwidth
from diptych.engine.exec.cuda import decoder
from diptych.engine.exec.cuda.backend import CudaBackend
from diptych.engine.exec.kv_pool import KvPool, kv_format_of
from diptych.engine.exec.methods.base import StepRows
from diptych.engine.exec.models.registry import describe
from diptych.kernels import pdl
from diptych.kernels.triton_matmul import MatmulShape

PARTS = ("norm", "rope", "attention", "qkv", "o", "gate_up", "down", "lm_head")
_KEPT: list[dict[tuple[int, ...], Tensor]] = []
"""Graphs read them as long as they are replayed."""


@dataclass(frozen=True)
class Form:
    """One variant of the step.

    Args:
        shapes: tile shapes of our matmul by projection, others use cuBLAS; None: as the decoder chooses.
        overlap: see kernels.pdl.
        patches: (owner, attribute, value) while it is prepared.
        without: omitted parts.
    """

    name: str
    shapes: dict[str, MatmulShape] | None = None
    overlap: bool = True
    patches: tuple[tuple[Any, str, object], ...] = ()
    without: tuple[str, ...] = ()


class Layers:
    """A few layers of Llama-3.1-8B with random weights, and `batch` sequences of `context` tokens."""

    def __init__(self, layers: int, batch: int, context: int, num_blocks: int = 0) -> None:
        model = describe({**LLAMA_8B, "num_hidden_layers": layers})
        self.num_blocks = max(num_blocks, batch * (-(-(context + 64) // BLOCK_SIZE)) + 8)
        self._batch, self._context = batch, context
        self._weights = random_weights(model).weights
        self._pool = KvPool(
            (self.num_blocks,),
            kv_format_of(model, block_size=BLOCK_SIZE, dtype="bfloat16"),
            device=torch.device("cuda"),
        )
        self._seqs: Any = _seqs(self, batch, context, GREEDY)  # type: ignore[arg-type]

    def prepare(self, form: Form) -> Callable[[], object]:
        """Compile and capture. Returns: a function that replays the step."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(patch.object(pdl, "ENABLED", form.overlap))
            for owner, name, value in form.patches:
                stack.enter_context(patch.object(owner, name, value))
            if form.shapes is not None:
                stack.enter_context(patch.object(decoder.CudaDecoder, "_shape", _shapes(form.shapes)))
            for part in form.without:
                stack.enter_context(_left_out(part))
            backend = CudaBackend(
                self._weights, self._pool, max_model_len=self._context + 64, graph_sizes=[self._batch]
            )
            self._pool.tensor.normal_()
        batch = backend.build(self._seqs)
        return lambda: backend.execute(self._seqs, batch, None)


def _shapes(shapes: dict[str, MatmulShape]) -> Callable[..., MatmulShape | None]:
    def shape(self: object, name: str, layer: object, x: Tensor) -> MatmulShape | None:
        return shapes.get(name) if x.shape[0] <= 64 else None

    return shape


def _left_out(part: str) -> Any:
    kept: dict[tuple[int, ...], Tensor] = {}
    _KEPT.append(kept)

    def some(like: Tensor, *shape: int) -> Tensor:
        if shape not in kept:
            kept[shape] = torch.randn(shape, dtype=torch.bfloat16, device=like.device)
        return kept[shape]

    if part == "norm":
        return patch.object(decoder, "rms_norm", lambda x, w, eps, r=None, offset=0.0: some(x, *x.shape[-2:]))
    if part == "rope":
        return patch.object(decoder, "rope_write", lambda qkv, *a, **k: some(qkv, qkv.shape[-2], 32, 128))
    if part == "attention":
        return patch.object(decoder.CudaDecoder, "_attend", lambda self, index, q, step: some(q, *q.shape))
    if part == "gate_up":
        return patch.object(
            decoder.CudaDecoder, "_gate_up", lambda self, block, layer, x, rows: some(x, x.shape[0], 14_336)
        )
    linear = decoder.CudaDecoder._linear

    def skip(self: Any, name: str, layer: Any, x: Tensor, rows: StepRows) -> Tensor:
        return some(x, x.shape[0], layer.weight.shape[0]) if name == part else linear(self, name, layer, x, rows)

    return patch.object(decoder.CudaDecoder, "_linear", skip)


def compare(steps: dict[str, Callable[[], object]], rounds: int = 12, replays: int = 6) -> dict[str, float]:
    """Median seconds of each, alternately."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, step in steps.items():
                marks = []
                for _ in range(
                    replays + 2
                ):  # queued back to back, so that the host does not count from the second one on
                    step()
                    marks.append(torch.cuda.Event(enable_timing=True))
                    marks[-1].record()
                marks[-1].synchronize()
                times[name] += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks[1:])]
    return {name: float(statistics.median(some)) for name, some in times.items()}


def measure(layers: int, batch: int, context: int, forms: Sequence[Form], num_blocks: int = 0) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    step = Layers(layers, batch, context, num_blocks)
    steps: dict[str, Callable[[], object]] = {}
    for form in forms:
        try:
            steps[form.name] = step.prepare(form)
        except Exception as error:  # a tile shape that does not fit the card
            print(f"{form.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
    found = compare(steps)
    base = found[forms[0].name]
    rows = []
    for form in forms:
        if form.name in found:
            seconds = found[form.name]
            rows.append({"batch": batch, "context": context, "form": form.name, "us": seconds * 1e6,
                         "us_a_layer_less": (base - seconds) * 1e6 / layers})  # fmt: skip
            print(f"{batch:>4} {form.name:<44} {seconds * 1e6:9.1f} us {rows[-1]['us_a_layer_less']:8.1f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    facts: dict[str, Any] = {**machine(), "read_tb_s": read_bandwidth() / 1e12, "layers": args.layers}
    print(facts, flush=True)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        rows += measure(args.layers, batch, args.context, [
            Form("as it is"), Form("cuBLAS for every projection", {}), Form("no overlap", overlap=False),
            *(Form(f"without {part}", without=(part,)) for part in PARTS)])  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
