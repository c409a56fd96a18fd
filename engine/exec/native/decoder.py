"""Blocks on the compiled kernels: a step is a handful of calls, each of one layer or several."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.exec.backends.base import Hooks, Segment
from diptych.engine.exec.ends import embed
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.methods.base import PLAIN_ROWS, LoadedLinear
from diptych.engine.exec.native.batch import NativeBatch, NativeBatchBuilder
from diptych.engine.exec.native.lora import teams_of
from diptych.engine.exec.native.reduction import Reduction
from diptych.engine.exec.native.weights import PackedLinear
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.rope import table_of_each
from diptych.engine.exec.weights import BlockWeights, ModelWeights
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import StepAborted
from diptych.kernels.native.api import (
    ACTIVATIONS,
    BFLOATS,
    FLOAT_BYTES,
    FLOATS,
    KV_CODES,
    Group,
    Layer,
    Library,
    Model,
    Step,
    Weights,
)

_ROW_LAYERS = 128
"""Rows x layers of one call in a step of single tokens: some ten milliseconds. Each call gives up the interpreter lock, and
getting it back from a busy event loop takes longer than the look whether the step is still wanted is worth."""

_SCORES = 96 << 10
"""Scores of the queries that go through a chunk's tokens together: they stay in the second-level cache."""


class NativeRuntime:
    """Implements backends.base.Runtime. Holds rope tables; KV lives in the pool."""

    def __init__(self, library: Library, weights: ModelWeights, pool: KvPool, max_model_len: int) -> None:
        self._library, self._weights = library, weights
        self._description = description = weights.description
        owned = [i for i, block in enumerate(weights.blocks) if isinstance(block.qkv, PackedLinear)]
        first = description.blocks[owned[0]]
        attention, device = first.attention, torch.device("cpu")
        tile_rows = library.tile_rows(attention.num_heads // attention.num_kv_heads)
        self._batches = NativeBatchBuilder(pool, tile_rows=tile_rows, max_model_len=max_model_len)
        tables = table_of_each(
            [block.attention.rope for block in description.blocks],
            attention.head_dim,
            max_model_len,
            dtype=torch.float32,
            device=device,
        )
        self._kept = (pool, [(cosines.contiguous(), sines.contiguous()) for cosines, sines in tables])
        self._scales = _Scales()
        layers = (Layer * description.num_layers)()
        for i in owned:
            layers[i] = _layer(weights.blocks[i], description.blocks[i], pool, i, *self._kept[1][i], self._scales)
        self._model = Model(
            layers=layers,
            hidden=description.hidden_size,
            ffn=first.mlp.size,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            block_size=pool.block_size,
            kv_codes=_codes(pool),
            eps=first.attention_norm.eps,
        )
        self._reduction = _reduction([weights.blocks[i] for i in owned])
        if self._reduction is not None:
            self._model.reduce = self._reduction.function
        self._buffers = _Buffers(
            first,
            library,
            prepared_bytes=_prepared_bytes(library, weights, owned),
            shrunk_floats=_shrunk_floats(weights, owned),
        )

    def lay_out(self, seqs: Sequence[ScheduledSeq]) -> NativeBatch:
        """See Runtime.lay_out."""
        return self._batches.build(seqs)

    def begin(self, batch: NativeBatch) -> None:
        """Nothing: no slot is read that the sequence does not own."""

    def run(self, x: Tensor | None, batch: NativeBatch, segment: Segment, hooks: Hooks) -> Tensor | None:
        """See Runtime.run. Raises: also what the communicator raises, see Communicator."""
        description, weights, library = self._description, self._weights, self._library
        if x is None:
            x = embed(torch.from_numpy(batch.token_ids), weights.embedding, description.embedding, weights.vocabulary)
        x = x.float()  # rows are kept in float32 from here to the end of the segment, or of the next pipeline stage's
        if segment.first < segment.last:
            x = self._layers(x.contiguous(), batch, segment, hooks)
            if x is None:
                return None
        if segment.head:
            norm = weights.norm
            logits = weights.lm_head(library.norm(x, self._scales.of(norm), norm.eps), PLAIN_ROWS)
            if description.head.softcap is not None:
                library.softcap(logits, description.head.softcap)
            return logits
        return x

    def _layers(self, x: Tensor, batch: NativeBatch, segment: Segment, hooks: Hooks) -> Tensor | None:
        should_abort, on_layers, library = hooks.should_abort, hooks.on_layers, self._library
        step, model = self._buffers.step(x, batch), ctypes.byref(self._model)
        # Behind the last attention only the rows whose logits are wanted matter.
        whole = not segment.has_last_layer or (
            batch.decode_only and batch.sample_rows == list(range(len(batch.token_ids)))
        )
        end = segment.last if whole else segment.last - 1
        stride = max(1, _ROW_LAYERS // x.shape[0]) if batch.decode_only else 1
        for first in range(segment.first, end, stride):
            _give_up(should_abort)
            if first and on_layers is not None:
                on_layers(first)
            self._check(library.layers(model, ctypes.byref(step), first, min(end, first + stride)))
        if whole:
            return x
        _give_up(should_abort)
        if end and on_layers is not None:
            on_layers(end)
        library.attention_part(model, ctypes.byref(step), end)
        if not batch.sample_rows:
            return None
        rows = torch.tensor(batch.sample_rows)
        x, attended = x[rows], self._buffers.attended(batch)[rows]
        step.x, step.attended, step.rows = x.data_ptr(), attended.data_ptr(), len(rows)
        adapters = None if batch.adapters is None else batch.adapters[batch.sample_rows]
        teams = None if adapters is None else teams_of(adapters)
        step.teams, step.num_teams = _teams(teams)
        self._check(library.feed_part(model, ctypes.byref(step), end))
        return x

    def _check(self, failed: int) -> None:
        """Raises: what the communicator raised in the middle of a call."""
        if self._reduction is not None:
            self._reduction.check(failed)


def _give_up(should_abort: Callable[[], bool] | None) -> None:
    if should_abort is not None and should_abort():
        raise StepAborted


def _reduction(blocks: Sequence[BlockWeights]) -> Reduction | None:
    """Of the ranks' parts of what attention and the feed-forward part add to a row; None: there are no ranks."""
    linears = [linear for block in blocks for linear in (block.o, block.down) if isinstance(linear, PackedLinear)]
    communicator = linears[0].communicator
    assert all(linear.communicator is communicator for linear in linears), "a model is cut in all of its layers"
    return None if communicator is None else Reduction(communicator.all_reduce)


def _codes(pool: KvPool) -> int:
    """Of all groups: they are in one dtype."""
    group = pool.kv.groups[0]
    if group.quantized:
        return KV_CODES[group.dtype]
    return BFLOATS if group.dtype == "bfloat16" else FLOATS


def _teams(teams: np.ndarray | None) -> tuple[int | None, int]:
    """As a Step has them."""
    return (None, 0) if teams is None else (teams.ctypes.data, len(teams))


def _packed(linear: LoadedLinear) -> Weights:
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"{type(linear).__name__} is not packed")
    return linear.weights


def _prepared_bytes(library: Library, weights: ModelWeights, layers: Sequence[int]) -> int:
    """Of a row, for that linear layer of these layers that needs the most."""
    declared = weights.description.blocks
    return max(
        library.prepared_bytes(_packed(linear), layer.inputs)
        for i in layers
        for linear, layer in zip(weights.blocks[i].linears, declared[i].linears, strict=True)
    )


def _shrunk_floats(weights: ModelWeights, layers: Sequence[int]) -> int:
    """Of a row with an adapter, for that linear layer of these layers that needs the most."""
    linears = [linear for i in layers for linear in weights.blocks[i].linears]
    return max(linear.shrunk_floats for linear in linears if isinstance(linear, PackedLinear))


class _Scales:
    """Of norms, in float32."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[RmsNorm, Tensor]] = {}

    def of(self, norm: RmsNorm) -> Tensor:
        """The same tensor every time."""
        if id(norm) not in self._found:
            self._found[id(norm)] = (norm, norm.scale.float().contiguous())
        return self._found[id(norm)][1]


def _layer(
    weights: BlockWeights,
    block: DecoderBlock,
    pool: KvPool,
    index: int,
    cosines: Tensor,
    sines: Tensor,
    scales: _Scales,
) -> Layer:
    """index: of the layer in the model."""

    def scale(norm: RmsNorm | None) -> int | None:
        return None if norm is None else scales.of(norm).data_ptr()

    attention, kv = block.attention, pool.layer(index)
    return Layer(
        input_norm=scale(weights.attention_norm),
        qkv=_packed(weights.qkv),
        q_norm=scale(weights.q_norm),
        k_norm=scale(weights.k_norm),
        o=_packed(weights.o),
        post_attention_norm=scale(weights.attention_output_norm),
        pre_feedforward_norm=scale(weights.mlp_norm),
        gate_up=_packed(weights.gate_up),
        down=_packed(weights.down),
        post_feedforward_norm=scale(weights.mlp_output_norm),
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        kv=kv.data_ptr(),
        block_step=pool.groups[pool.places[index][0]].group.block_bytes(pool.kv.shard) // FLOAT_BYTES,
        group=pool.places[index][0],
        window=attention.window or 0,
        activation=ACTIVATIONS[block.mlp.activation],
        scale=attention.scale,
        softcap=attention.softcap or 0.0,
    )


class _Buffers:
    """What a step computes into; it grows to the largest step and is then used again: fresh memory costs a page fault a
    page."""

    def __init__(self, block: DecoderBlock, library: Library, *, prepared_bytes: int, shrunk_floats: int) -> None:
        self._tile = library.tile
        attention, mlp = block.attention, block.mlp
        self._widths = {
            "normed": attention.qkv.inputs,
            "qkv": attention.qkv.outputs,
            "attended": attention.q_size,
            "gate": mlp.size,
            "up": mlp.size,
        }
        self._widths["prepared"] = -(-prepared_bytes // FLOAT_BYTES)
        self._widths["shrunk"] = shrunk_floats
        self._q_size = attention.q_size
        self._tensors: dict[str, Tensor] = {}
        self._scores = torch.empty(0)

    def attended(self, batch: NativeBatch) -> Tensor:
        """[num_rows, num_heads * head_dim] of the step laid out last."""
        return self._tensors["attended"][: len(batch.token_ids) * self._q_size].view(-1, self._q_size)

    def step(self, x: Tensor, batch: NativeBatch) -> Step:
        rows, threads = x.shape[0], torch.get_num_threads()
        for name, width in self._widths.items():
            if name not in self._tensors or self._tensors[name].numel() < rows * width:
                self._tensors[name] = torch.empty((rows + rows // 4) * width)
        max_len = -(-batch.max_len // 64) * 64
        scores_step = max(_SCORES, self._tile * max_len)
        if self._scores.numel() < threads * scores_step:
            self._scores = torch.empty(threads * (scores_step + scores_step // 4))
        teams, num_teams = _teams(batch.teams)
        return Step(
            x=x.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
            positions=batch.positions.ctypes.data,
            tiles=batch.tiles.ctypes.data,
            groups=(Group * len(batch.blocks))(
                *(Group(a.ctypes.data, b.ctypes.data) for a, b in zip(batch.blocks, batch.slots, strict=True))
            ),
            scores=self._scores.data_ptr(),
            teams=teams,
            num_teams=num_teams,
            rows=rows,
            num_tiles=len(batch.tiles),
            max_len=max_len,
            scores_step=scores_step,
            num_threads=threads,
        )
