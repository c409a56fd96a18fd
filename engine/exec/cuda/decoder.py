"""Blocks over Triton kernels, fused across layers. No sync and no host decision inside: graphs capture a step as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.engine.exec.backends.base import Hooks, Segment
from diptych.engine.exec.cuda.adapted import ROWS_OF_LORA_LAUNCHES, AdaptedLinear, wanted_by
from diptych.engine.exec.cuda.batch import StepTensors
from diptych.engine.exec.cuda.communicator import CudaCommunicator
from diptych.engine.exec.cuda.parted import own_part
from diptych.engine.exec.cuda.quantized import ROWS_OF_LAUNCHES, QuantizedLinear, Rows
from diptych.engine.exec.ends import cap, embed
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.methods.base import PLAIN_ROWS, LoadedLinear, StepRows
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.rope import table_of_each
from diptych.engine.exec.weights import BlockWeights, ModelWeights
from diptych.engine.runner import StepAborted
from diptych.kernels.triton_decode import paged_decode
from diptych.kernels.triton_invariant_attention import invariant_decode, invariant_prefill, invariant_rows
from diptych.kernels.triton_invariant_matmul import chains_of, distinct_launches, invariant_matmul
from diptych.kernels.triton_lora import lora_expand
from diptych.kernels.triton_lora_rows import MAX_ROWS as MAX_ROWS_OF_READERS
from diptych.kernels.triton_lora_rows import LoraDelta
from diptych.kernels.triton_matmul import FEW_ROWS, MAX_ROWS, MatmulShape, choose_shape, small_matmul
from diptych.kernels.triton_norm import gate_mul, rms_norm, rms_norm_quantized
from diptych.kernels.triton_prefill import paged_prefill, prefill_rows
from diptych.kernels.triton_quantize import quantize_rows
from diptych.kernels.triton_rope import rope_write

PROJECTIONS: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
"""Of few rows: those that our own kernel may take instead of cuBLAS's."""
_SUMMED = ("qkv", "o", "down")
"""Projections whose readers, `rope_write` and `rms_norm`, add up several sums."""
_GATE_UP_FEW, _GATE_UP = MatmulShape(32, 128, 4, 6), MatmulShape(128, 64, 8, 4)
"""Of gate and up without the activation, up to FEW_ROWS and beyond."""
_MOST_ROWS = 16_384
"""Of a step; for kernels that are compiled before readiness."""


class CudaDecoder:
    """Holds weights and rope tables; KV lives in the pool."""

    def __init__(
        self,
        weights: ModelWeights,
        pool: KvPool,
        block_tables: Sequence[Tensor],
        *,
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            block_tables: of each KV group.
            batch_invariant: a row's bits do not depend on the rest of the step: see docs/decisions/batch-invariant.md.
        """
        self._weights, self._description = weights, weights.description
        self._invariant = batch_invariant
        attentions = [block.attention for block in self._description.blocks]
        self._layers = [pool.elements(index) for index in range(len(attentions))]
        self._groups = [group for group, _ in pool.places]
        self._tables = [block_tables[group] for group in self._groups]
        like, first = weights.embedding, attentions[0]
        self.group = first.num_heads // first.num_kv_heads
        if batch_invariant:
            self.tile_rows = invariant_rows(like.element_size(), self.group)
        else:
            self.tile_rows = prefill_rows(first.head_dim, like.element_size(), self.group)
        # fp32 whatever the model's dtype: the kernel rotates in fp32.
        turns = table_of_each(
            [attention.rope for attention in attentions],
            first.head_dim,
            max_model_len,
            dtype=torch.float32,
            device=like.device,
        )
        self._turns = [(cos[:, 0].contiguous(), sin[:, 0].contiguous()) for cos, sin in turns]
        total = len(attentions)
        self._whole = Segment(0, total, True, True, total)
        communicator = weights.communicator
        parted = communicator is not None and communicator.place.tensor_parallel > 1
        self._communicator = communicator if parted else None
        """To the ranks that have other parts of the same layers; None: there are none."""

    def forward(
        self,
        step: StepTensors,
        hooks: Hooks,
        *,
        want_logits: bool,
        segment: Segment | None = None,
        x: Tensor | None = None,
    ) -> Tensor | None:
        """Compute the step's tokens and store their KV.

        Args:
            segment, x: see Runtime.run; None: the whole model.
            hooks: on_layers is not called: what was launched is not computed yet.
        Returns: what comes out of the segment; behind the last layer of step.sample_rows alone, or None if no logits are
            wanted.
        Raises: StepAborted when should_abort() turned true between two layers.
        """
        description, weights, rows = self._description, self._weights, step.rows
        segment = segment or self._whole
        residual = x
        if residual is None:
            residual = embed(step.token_ids, weights.embedding, description.embedding, weights.vocabulary)
        if segment.first == segment.last:
            return self._head(self._final(residual), rows.only(step.sample_rows)) if segment.head else residual
        first = weights.blocks[segment.first]
        normed = _norm(residual, first.attention_norm, wanted=wanted_by(first.qkv, rows))
        last = segment.last - 1 if segment.has_last_layer else None
        for index in range(segment.first, segment.last):
            layer, block = weights.blocks[index], description.blocks[index]
            if hooks.should_abort is not None and hooks.should_abort():
                raise StepAborted
            q = self._project(index, layer, block, normed, step)
            if index == last and not want_logits:
                return None
            attended = self._attend(index, q, step).flatten(1)
            if index == last and step.sample_rows is not None:
                # Behind the last attention only the rows whose logits are wanted matter, in the order wanted.
                attended, residual = (t.index_select(0, step.sample_rows) for t in (attended, residual))
                rows = rows.only(step.sample_rows)
            out, delta = self._summed("o", layer.o, attended, rows)
            wanted = wanted_by(layer.gate_up, rows)
            normed = self._added(out, delta, layer.attention_output_norm, layer.mlp_norm, residual, wanted)
            out, delta = self._summed("down", layer.down, self._gate_up(block, layer, normed, rows), rows)
            if index + 1 < segment.last:
                following = weights.blocks[index + 1]
                after, wanted = following.attention_norm, wanted_by(following.qkv, rows)
            else:  # who comes after the segment norms for itself
                after, wanted = weights.norm, wanted_by(weights.lm_head, rows)
            normed = self._added(out, delta, layer.mlp_output_norm, after, residual, wanted)
        return self._head(normed, rows) if segment.head else residual

    def _final(self, residual: Tensor) -> Rows:
        return _norm(residual, self._weights.norm, wanted=wanted_by(self._weights.lm_head, PLAIN_ROWS))

    def _head(self, x: Rows, rows: StepRows) -> Tensor:
        logits = self._linear("lm_head", self._weights.lm_head, x, rows)
        if self._communicator is not None:
            logits = self._communicator.gather_columns(logits)
        return cap(logits, self._description.head.softcap)

    def _added(
        self,
        out: Tensor,
        delta: LoraDelta | None,
        output_norm: RmsNorm | None,
        after: RmsNorm,
        residual: Tensor,
        wanted: str | None,
    ) -> Rows:
        """residual += output_norm(out + delta), with what the other ranks have of `out`. Returns: after(residual), in the same
        kernel, as the layer that reads it wants it."""
        if self._communicator is not None:
            out = out.contiguous()
            if output_norm is None and isinstance(self._communicator, CudaCommunicator):
                normed = self._communicator.all_reduce_norm(out, after, residual, wanted)
                if normed is not None:
                    return normed
            out = self._communicator.all_reduce(_whole_sum(out, residual.dtype))
        if output_norm is not None:
            out = rms_norm(out, output_norm.weight, output_norm.eps, offset=output_norm.offset, delta=delta)
            delta = None
        return _norm(out, after, residual, wanted=wanted, delta=delta)

    def _project(self, index: int, layer: BlockWeights, block: DecoderBlock, x: Rows, step: StepTensors) -> Tensor:
        """Stores K and V. Returns: the queries, rotated."""
        cos, sin = self._turns[index]
        kv, scales = self._layers[index]
        qkv, delta = self._summed("qkv", layer.qkv, x, step.rows)
        return rope_write(
            qkv,
            kv,
            cos,
            sin,
            step.positions,
            step.slots[self._groups[index]],
            num_q_heads=block.attention.num_heads,
            q_norm=None if layer.q_norm is None else layer.q_norm.weight,
            k_norm=None if layer.k_norm is None else layer.k_norm.weight,
            eps=0.0 if layer.q_norm is None else layer.q_norm.eps,
            offset=0.0 if layer.q_norm is None else layer.q_norm.offset,
            scales=scales,
            dtype=self._weights.embedding.dtype,
            delta=delta,
        )

    def _summed(self, name: str, layer: LoadedLinear, x: Rows, rows: StepRows) -> tuple[Tensor, LoraDelta | None]:
        """As _linear, of qkv, o or down. Returns: also what the reader of the result adds to it."""
        own = own_part(layer)
        if not isinstance(own, AdaptedLinear) or rows.adapters is None:
            return self._linear(name, layer, x, rows), None
        assert isinstance(x, Tensor)  # see wanted_by
        out, delta = self._with_delta(name, own, x, rows, rows.adapters)
        reader_adds = own.joined is not None and (
            name == "qkv" or self._communicator is None
        )  # ranks add up whole results
        if reader_adds and x.shape[0] <= MAX_ROWS_OF_READERS:
            return out, delta
        lora_expand(out, delta, invariant=self._invariant)
        return out, None

    def _with_delta(
        self, name: str, layer: AdaptedLinear, x: Tensor, rows: StepRows, adapters: Tensor
    ) -> tuple[Tensor, LoraDelta]:
        """What the base makes of the rows, and what adapters add."""
        if layer.joined is not None:
            return layer.parted(self._without_adapters(name, layer.joined, x, rows), adapters)
        room = layer.room(x, invariant=self._invariant)
        out = self._without_adapters(name, layer.base, x, rows)
        return out, layer.shrink(x, room, adapters, invariant=self._invariant)

    def _linear(self, name: str, layer: LoadedLinear, x: Rows, rows: StepRows) -> Tensor:
        """Returns: this rank's part: [rows, columns]; of qkv, o and down maybe [splits, rows, columns], see small_matmul and
        invariant_matmul."""
        layer = own_part(layer)
        if isinstance(layer, AdaptedLinear):
            assert rows.adapters is None  # else _summed, or _adapted_gate_up
            layer = layer.base
        return self._without_adapters(name, layer, x, rows)

    def _without_adapters(self, name: str, layer: LoadedLinear, x: Rows, rows: StepRows) -> Tensor:
        """See _linear; of gate and up the sums before the activation."""
        if isinstance(layer, QuantizedLinear):
            gate_up = name == "gate_up" and not self._invariant  # its activation adds up splits, too
            return layer.project(x, summed=gate_up or name in _SUMMED, invariant=self._invariant)
        assert isinstance(x, Tensor)  # see wanted_by
        if self._invariant:
            return self._invariant_linear(name, layer, x)
        shape = self._shape(name, layer, x)
        if shape is not None and name == "gate_up":
            shape = _GATE_UP_FEW if x.shape[0] <= FEW_ROWS else _GATE_UP
        if shape is not None and isinstance(layer, DenseLinear):
            return small_matmul(x, layer.weight, shape=shape)
        return layer(x, rows)

    def _gate_up(self, block: DecoderBlock, layer: BlockWeights, x: Rows, rows: StepRows) -> Rows:
        activation, wanted, linear = block.mlp.activation, wanted_by(layer.down, rows), layer.gate_up
        if isinstance(linear, AdaptedLinear):
            if rows.adapters is not None:
                assert isinstance(x, Tensor)  # see wanted_by
                return self._adapted_gate_up(activation, linear, x, rows)
            linear = linear.base
        if isinstance(linear, QuantizedLinear):
            return linear.gated(x, activation, wanted, invariant=self._invariant)
        assert isinstance(x, Tensor)  # see wanted_by
        out = self._dense_gate_up(activation, linear, x, rows)
        return out if wanted is None else quantize_rows(out, wanted)

    def _adapted_gate_up(self, activation: str, layer: AdaptedLinear, x: Tensor, rows: StepRows) -> Tensor:
        """What adapters add lies before the activation, so that the projection is not fused with it: the kernel that adds is."""
        assert rows.adapters is not None
        out, delta = self._with_delta("gate_up", layer, x, rows, rows.adapters)
        return layer.gated(out, delta, activation, x.dtype, invariant=self._invariant)

    def _dense_gate_up(self, activation: str, layer: LoadedLinear, x: Tensor, rows: StepRows) -> Tensor:
        if self._invariant:
            if activation == "silu" and _dense(layer).bias is None:
                return invariant_matmul(x, _dense(layer).weight, silu=True)
            return gate_mul(self._invariant_linear("gate_up", layer, x), activation)
        shape = self._shape("gate_up", layer, x) if activation == "silu" else None
        if shape is not None and isinstance(layer, DenseLinear):
            return small_matmul(x, layer.weight, silu=True, shape=shape)
        return gate_mul(layer(x, rows), activation)

    def _invariant_linear(self, name: str, layer: LoadedLinear, x: Tensor) -> Tensor:
        dense = _dense(layer)
        return invariant_matmul(x, dense.weight, dense.bias, chains=_chains(name, dense))

    def compile_linears(self) -> None:
        """Those which have other kernels for other numbers of rows: each that a step may need."""
        layer, block = self._weights.blocks[0], self._description.blocks[0]
        like = self._weights.embedding
        for name, loaded in (
            ("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down),
            ("lm_head", self._weights.lm_head),
        ):  # fmt: skip
            own = own_part(loaded)
            linear = own.base if isinstance(own, AdaptedLinear) else own
            if isinstance(own, AdaptedLinear):
                self._compile_adapted(name, block, own)
            if isinstance(linear, QuantizedLinear):
                for rows in ROWS_OF_LAUNCHES:
                    x = torch.zeros((rows, linear.inputs), dtype=like.dtype, device=like.device)
                    if name == "gate_up":
                        wanted = wanted_by(layer.down, PLAIN_ROWS)
                        linear.gated(x, block.mlp.activation, wanted, invariant=self._invariant)
                    else:
                        linear.project(x, summed=name in _SUMMED, invariant=self._invariant)
                continue
            if not self._invariant:
                continue
            dense = _dense(linear)
            weight, chains = dense.weight, _chains(name, dense)
            silu = name == "gate_up" and block.mlp.activation == "silu" and dense.bias is None
            columns, half = weight.shape[0] // (2 if silu else 1), weight.element_size() == 2
            for rows in distinct_launches(columns, silu=silu, chains=chains, half=half, most_rows=_MOST_ROWS):
                x = torch.zeros((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
                invariant_matmul(x, weight, dense.bias, silu=silu, chains=chains)

    def _compile_adapted(self, name: str, block: DecoderBlock, layer: AdaptedLinear) -> None:
        like, base, numbers = self._weights.embedding, layer.base, set(ROWS_OF_LORA_LAUNCHES)
        if isinstance(base, QuantizedLinear):
            numbers |= set(ROWS_OF_LAUNCHES)
        elif self._invariant:
            weight, chains = _dense(base).weight, _chains(name, _dense(base))
            half = weight.element_size() == 2
            numbers |= set(
                distinct_launches(weight.shape[0], silu=False, chains=chains, half=half, most_rows=_MOST_ROWS)
            )
        for rows in sorted(numbers):
            x = torch.zeros((rows, layer.weights.inputs), dtype=like.dtype, device=like.device)
            adapters = torch.full((rows,), -1, dtype=torch.int32, device=like.device)
            if name == "gate_up":
                self._adapted_gate_up(block.mlp.activation, layer, x, StepRows(adapters))
            else:
                self._summed(name, layer, x, StepRows(adapters))

    def _shape(self, name: str, layer: LoadedLinear, x: Tensor) -> MatmulShape | None:
        """How our kernel is cut for this projection; None: cuBLAS takes it."""
        if not isinstance(layer, DenseLinear) or layer.bias is not None or x.dtype == torch.float32:
            return None
        if name not in PROJECTIONS or x.shape[0] > MAX_ROWS:
            return None
        columns, size = layer.weight.shape
        silu = name == "gate_up"
        return choose_shape(x.shape[0], columns // 2 if silu else columns, size, silu=silu)

    def _attend(self, index: int, q: Tensor, step: StepTensors) -> Tensor:
        (kv, scales), tables = self._layers[index], self._tables[index]
        attention = self._description.blocks[index].attention
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decode = step.decode_lens.shape[0]
        if self._invariant:
            self._attend_invariant(q, kv, scales, tables, attention, step, out)
            return out
        if num_decode:
            paged_decode(
                q[:num_decode],
                kv,
                tables,
                step.decode_rows,
                step.decode_lens,
                scale=attention.scale,
                softcap=attention.softcap,
                window=attention.window,
                splits=step.splits,
                out=out[:num_decode],
                scales=scales,
            )
        if step.chunks is not None and step.tiles is not None:
            paged_prefill(
                q,
                kv,
                tables,
                step.chunks,
                step.tiles,
                scale=attention.scale,
                softcap=attention.softcap,
                window=attention.window,
                rows=self.tile_rows,
                out=out,
                scales=scales,
            )
        return out

    @staticmethod
    def _attend_invariant(
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        tables: Tensor,
        attention: Attention,
        step: StepTensors,
        out: Tensor,
    ) -> None:
        num_decode = step.decode_lens.shape[0]
        rule: dict[str, Any] = {
            "scale": attention.scale, "softcap": attention.softcap, "window": attention.window, "scales": scales
        }  # fmt: skip
        if num_decode:
            invariant_decode(
                q[:num_decode],
                kv,
                tables,
                step.decode_rows,
                step.decode_lens,
                splits=step.splits,
                out=out[:num_decode],
                **rule,
            )
        if step.chunks is not None and step.tiles is not None:
            invariant_prefill(q, kv, tables, step.chunks, step.tiles, out=out, **rule)


def _dense(layer: LoadedLinear) -> DenseLinear:
    if not isinstance(layer, DenseLinear):
        raise InternalError(
            f"a {type(layer).__name__} has no batch-invariant kernel: the back end should have refused it"
        )
    return layer


def _chains(name: str, layer: DenseLinear) -> int:
    """Chains of a projection's sums: by its weight alone."""
    return chains_of(*layer.weight.shape) if name in _SUMMED and layer.bias is None else 1


def _norm(
    x: Tensor,
    norm: RmsNorm,
    residual: Tensor | None = None,
    *,
    wanted: str | None = None,
    delta: LoraDelta | None = None,
) -> Rows:
    """Args: wanted: see wanted_by. delta: see rms_norm."""
    if wanted is not None:
        return rms_norm_quantized(x, norm.weight, norm.eps, residual, offset=norm.offset, kind=wanted, delta=delta)
    return rms_norm(x, norm.weight, norm.eps, residual, offset=norm.offset, delta=delta)


def _whole_sum(out: Tensor, dtype: torch.dtype) -> Tensor:
    """As the readers of several sums add them up. out: [rows, size], or [splits, rows, size] fp32."""
    if out.dim() == 2:
        return out
    total = out[0]
    for part in out[1:]:
        total = total + part
    return total.to(dtype)
