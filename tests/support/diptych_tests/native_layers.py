"""Decoder layers of any description, on the compiled kernels and in plain torch: what the tests of kernels/native share."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.lora import LayerAdapter, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import LinearWeights
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.methods.quantized import GgufWeights, Int4Weights, Int8Weights
from diptych.engine.exec.native.lora import PackedSlots, teams_of
from diptych.engine.exec.native.reduction import Reduction
from diptych.engine.exec.native.weights import Packer
from diptych.kernels.kv_codes import dequantize
from diptych.kernels.native.api import ACTIVATIONS, BFLOATS, FLOATS, KV_CODES, Group, Layer, Library, Model, Step

NOWHERE = 0
"""A block of NaN."""
NORMS = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")


@dataclass(frozen=True)
class Sizes:
    hidden: int = 96
    ffn: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 8
    eps: float = 1e-6


@dataclass(frozen=True)
class Features:
    """Of one layer. window, softcap: 0 for none. group: its KV group."""

    post_norms: bool = False
    qk_norm: bool = False
    bias: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.17
    theta: float = 10_000.0
    stretch: float = 1.0
    activation: str = "silu"
    group: int = 0


LLAMA = Features()
QWEN3 = Features(qk_norm=True, bias=True)
GEMMA2 = (
    Features(post_norms=True, window=13, softcap=0.7, scale=0.3, activation="gelu_tanh", group=1),
    Features(post_norms=True, softcap=0.7, scale=0.3, activation="gelu_tanh"),
)
GEMMA3 = (
    Features(post_norms=True, qk_norm=True, window=11, scale=0.4, activation="gelu_tanh", group=1),
    Features(post_norms=True, qk_norm=True, scale=0.4, theta=1e6, stretch=8.0, activation="gelu_tanh"),
)


INT4_GROUP = 32
LINEARS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Method:
    """keep(weight, bias) -> what a method loads; product(x, weight) -> the reference in float64, without a bias."""

    keep: Callable[[Tensor, Tensor | None], LinearWeights]
    product: Callable[[Tensor, Tensor], Tensor]


def int8_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of each row."""
    scales = weight.float().abs().amax(1) / 127
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    codes, scales = int8_of(weight)
    rows, factors = int8_of(x)
    return (rows.double() @ codes.double().T) * (factors[:, None] * scales).double()


def int4_of(weight: Tensor, group: int, *, order: Tensor | None = None) -> Int4Weights:
    """Codes from 0 to 15 with a zero for each group."""
    outputs, inputs = weight.shape
    ordered = weight if order is None else weight[:, order]
    groups = ordered.float().view(outputs, inputs // group, group)
    scales = (groups.amax(2) - groups.amin(2)) / 15
    zeros = (-groups.amin(2) / scales).round().clamp(0, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return Int4Weights(packed, scales, zeros.to(torch.uint8), group, None if order is None else order.int(), None)


GGUF_HALVES = {"Q8_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 of a block begin."""


def gguf_of(kind: str, outputs: int, inputs: int) -> GgufWeights:
    """Random blocks with scales of a common size."""
    facts = KINDS[kind]
    blocks = torch.randint(0, 256, (outputs, inputs // facts.weights, facts.size_bytes), dtype=torch.uint8)
    for at in GGUF_HALVES[kind]:
        blocks[..., at : at + 2] = (torch.rand(blocks.shape[:2]) + 0.5).half()[..., None].view(torch.uint8)
    return GgufWeights(kind, blocks.flatten(1), torch.randn(outputs))


def in_fixed_point(x: Tensor, group: int) -> Tensor:
    """Rows as they meet weights with groups, float64: in each stretch of a group multiples of a power of two, of which the
    largest value has 15 bits."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for first in range(0, x.shape[1], group):
        for begin in range(first, first + group, 128):
            span = slice(begin, min(begin + 128, first + group))
            most = x[:, span].double().abs().amax(1, keepdim=True)
            factor = 2.0 ** (15 - torch.frexp(most).exponent.double())
            factor = torch.where(most * factor > 127 * 256 + 127, factor / 2, factor)
            out[:, span] = (x[:, span].double() * factor).round() / factor
    return out


def int4_product(x: Tensor, weights: Int4Weights) -> Tensor:
    """In float64."""
    codes = torch.stack((weights.codes & 15, weights.codes >> 4), -1).flatten(1).double()
    zeros, scales = (part.double().repeat_interleave(weights.group_size, 1) for part in (weights.zeros, weights.scales))
    rows = x.double() if weights.order is None else x.double()[:, weights.order.long()]
    return rows @ ((codes - zeros) * scales).T


METHODS = {
    PLAIN: Method(PlainWeights, lambda x, weight: x @ weight.T),
    "bfloat16": Method(
        lambda weight, bias: PlainWeights(weight.bfloat16(), bias),
        lambda x, weight: x.bfloat16().double() @ weight.bfloat16().double().T,
    ),
    "int8": Method(lambda weight, bias: Int8Weights(*int8_of(weight), bias), int8_product),
    "int4": Method(
        lambda weight, bias: replace(int4_of(weight, INT4_GROUP), bias=bias),
        lambda x, weight: int4_product(x, int4_of(weight, INT4_GROUP)),
    ),
}


MAX_RANK = 12
"""Of random adapters. Whole stretches of ranks on no machine."""


def random_adapter(rng: random.Random, slots: LoraSlots, inputs: int, max_rank: int = MAX_RANK) -> LayerAdapter:
    """For a layer with these slots: of another rank in every part, some of which are left alone. Every second matrix holds
    values of bfloat16."""
    ranks = tuple(min(max_rank, rng.choice((0, 1, 5, 8, max_rank))) for _ in slots.part_outputs)
    a, b = torch.zeros(len(ranks), max(ranks), inputs), torch.zeros(sum(slots.part_outputs), max(ranks))
    first = 0
    for part, (rank, outputs) in enumerate(zip(ranks, slots.part_outputs, strict=True)):
        a[part, :rank] = torch.randn(rank, inputs) * inputs**-0.5
        b[first : first + outputs, :rank] = torch.randn(outputs, rank) * 0.5
        first += outputs
    a, b = (rng.choice((one, one.bfloat16())).to(slots.dtype) for one in (a, b))
    return LayerAdapter(a, b, ranks)


def packed_slots(library: Library, slots: LoraSlots) -> PackedSlots:
    """The same adapters on the kernels, in memory of exactly their size."""
    sizes = LoraSizes(slots.num_slots, slots.max_rank)
    packed = PackedSlots(library.lanes, slots.part_outputs, slots.inputs, sizes, slots.dtype)
    for slot, ranks in enumerate(slots.ranks.tolist()):
        if rank := max(ranks):
            adapter = LayerAdapter(slots.a[slot, :, :rank], slots.b[slot, :, :rank], tuple(ranks))
            packed.install(slot, packed.pack(adapter, Exact()))
    return packed


def dense_delta(slots: LoraSlots, slot: int) -> Tensor:
    """What a slot adds to a layer's weight: [outputs, inputs], float64."""
    parts = slots.b[slot].double().split(list(slots.part_outputs))
    return torch.cat([b @ a for a, b in zip(slots.a[slot].double(), parts, strict=True)])


class Exact:
    """Memory of exactly the size asked for."""

    def take(self, size: int) -> Tensor:
        return torch.empty(size)


@dataclass
class Prompt:
    """tables: one for each group. done: tokens whose KV is in the pool. slot: of its adapter, -1: none."""

    x: Tensor
    tables: list[list[int]]
    done: int = 0
    slot: int = -1
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def output(self) -> Tensor:
        return torch.cat(self.outputs)


class Layers:
    """Random layers on the kernels, with KV pages of each group in a pool of its own.

    nowhere: what a block table holds for blocks behind every window.
    codes: dtype of a quantized pool, or bfloat16; None: it holds floats.
    method: of the linear layers, of METHODS.
    loras: slots of adapters in every linear layer, filled with random ones of different ranks; 0: none.
    """

    def __init__(
        self, library: Library, features: Sequence[Features], sizes: Sizes = Sizes(), *, num_blocks: int = 64,
        max_len: int = 256, seed: int = 0, nowhere: int = NOWHERE, codes: torch.dtype | None = None,
        method: str = PLAIN, loras: int = 0,
    ) -> None:  # fmt: skip
        self.method = METHODS[method]
        self.library, self.features, self.sizes = library, tuple(features), sizes
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        s, self.nowhere, self.codes = sizes, nowhere, codes
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.weights: list[dict[str, Tensor]] = []
        self.loras: list[dict[str, LoraSlots]] = []
        self.tables = []
        for f in self.features:
            w = {name: torch.rand(s.hidden) + 0.5 for name in NORMS if f.post_norms or not name.startswith("post")}
            if f.qk_norm:
                w |= {name: torch.rand(s.head_dim) + 0.5 for name in ("q_norm", "k_norm")}
            for name, outputs, inputs in (
                ("qkv", qkv, s.hidden), ("o", s.hidden, s.heads * s.head_dim), ("gate_up", 2 * s.ffn, s.hidden),
                ("down", s.hidden, s.ffn),
            ):  # fmt: skip
                w[name] = torch.randn(outputs, inputs) * 2 * inputs**-0.5
                if f.bias:
                    w[f"{name}_bias"] = torch.randn(outputs) * 0.5
            self.weights.append(w)
            self.loras.append(self._random_loras(loras, qkv) if loras else {})
            inverse = f.theta ** -(torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim) / f.stretch
            angles = torch.outer(torch.arange(max_len, dtype=torch.float64), inverse)
            self.tables.append((angles.cos().float(), angles.sin().float()))
        self.groups = 1 + max(f.group for f in self.features)
        counts = [sum(f.group == g for f in self.features) for g in range(self.groups)]
        floats = {None: s.head_dim, torch.bfloat16: s.head_dim // 2}
        self.slot = s.kv_heads * floats.get(codes, s.head_dim // 4 + 1)
        """Floats of a token's K in one layer."""
        page = 2 * s.block_size * self.slot
        self.pools = [torch.full((num_blocks, count, page), float("nan")) for count in counts]
        self.free = [self.rng.sample(range(1, num_blocks), num_blocks - 1) for _ in counts]
        self._kept: list[object] = []
        self._prepared_bytes = self._shrunk = 0
        self._reduction: Reduction | None = None
        self._degree = 1
        self._model = self.make_model()

    def _random_loras(self, count: int, qkv: int) -> dict[str, LoraSlots]:
        """Of one layer. Some adapters leave parts alone."""
        s, made = self.sizes, {}
        kv = s.kv_heads * s.head_dim
        dtype = torch.bfloat16 if self.codes == torch.bfloat16 else torch.float32
        for name, parts, inputs in (
            ("qkv", (qkv - 2 * kv, kv, kv), s.hidden), ("o", (s.hidden,), s.heads * s.head_dim),
            ("gate_up", (s.ffn, s.ffn), s.hidden), ("down", (s.hidden,), s.ffn),
        ):  # fmt: skip
            slots = LoraSlots(parts, inputs, LoraSizes(count, MAX_RANK), torch.empty(0, dtype=dtype))
            for slot in range(count):
                slots.install(slot, random_adapter(self.rng, slots, inputs))
            made[name] = slots
        return made

    def make_model(self) -> Model:
        s, at = self.sizes, [0] * self.groups
        layers = (Layer * len(self.features))()
        every = zip(layers, self.features, self.weights, self.tables, self.loras, strict=True)
        for layer, f, w, (cosines, sines), loras in every:
            kept = {name: self.method.keep(w[name], w.get(f"{name}_bias")) for name in LINEARS}
            packer = Packer(self.library, Exact())
            packed = {name: packer(weights) for name, weights in kept.items()}
            packed |= {name: packed[name].with_lora(packed_slots(self.library, slots)) for name, slots in loras.items()}
            self._shrunk = max([self._shrunk, *(linear.shrunk_floats for linear in packed.values())])
            self._kept.append((w, packed))
            for name, linear in packed.items():
                room = self.library.prepared_bytes(linear.weights, w[name].shape[1])
                self._prepared_bytes = max(self._prepared_bytes, room)
            for name, linear in packed.items():
                setattr(layer, name, linear.weights)
            for name, tensor in w.items():
                if name.endswith("norm"):
                    setattr(layer, name, tensor.data_ptr())
            pool = self.pools[f.group]
            layer.cosines, layer.sines = cosines.data_ptr(), sines.data_ptr()
            layer.kv, layer.block_step = pool[:, at[f.group]].data_ptr(), pool.stride(0)
            at[f.group] += 1
            layer.group, layer.window, layer.activation = f.group, f.window, ACTIVATIONS[f.activation]
            layer.scale, layer.softcap = f.scale, f.softcap
        kinds = {None: FLOATS, torch.bfloat16: BFLOATS} | {
            getattr(torch, name): kind for name, kind in KV_CODES.items()
        }
        kind = kinds[self.codes]
        model = Model(layers, s.hidden, s.ffn, s.heads, s.kv_heads, s.head_dim, s.block_size, kind, s.eps)
        if self._reduction is not None:
            model.reduce = self._reduction.function
        return model

    def rank(self, shard: Shard, all_reduce: Callable[[Tensor], Tensor]) -> Layers:
        """What a tensor-parallel rank computes of these layers, with a pool of its own. all_reduce: see Reduction."""
        s, heads, ffn = self.sizes, shard.units(self.sizes.heads, "heads"), shard.units(self.sizes.ffn, "ffn")
        kv_heads = shard.heads(s.kv_heads)
        sizes = replace(s, heads=len(heads), kv_heads=len(kv_heads), ffn=len(ffn))
        mine = copy(self)
        mine.sizes, mine.slot, mine._kept = sizes, self.slot * len(kv_heads) // s.kv_heads, []
        mine.pools = [
            torch.full((len(pool), pool.shape[1], 2 * s.block_size * mine.slot), float("nan")) for pool in self.pools
        ]
        mine.free = [list(free) for free in self.free]
        numbers = torch.arange((s.heads + 2 * s.kv_heads) * s.head_dim).view(-1, s.head_dim)
        q, k, v = numbers.split([s.heads, s.kv_heads, s.kv_heads])
        attended, wide = (
            q[heads.start : heads.stop].flatten(),
            torch.arange(2 * s.ffn).view(2, -1)[:, ffn.start : ffn.stop],
        )
        of_heads = [part[kv_heads.start : kv_heads.stop].flatten() for part in (k, v)]
        outputs = {"qkv": torch.cat([attended, *of_heads]), "gate_up": wide.flatten()}
        inputs = {"o": attended, "down": wide[0]}
        mine.weights = []
        for weights in self.weights:
            own = dict(weights)
            for name, rows in outputs.items():
                own |= {key: weights[key][rows] for key in (name, f"{name}_bias") if key in weights}
            for name, columns in inputs.items():
                own[name] = weights[name][:, columns]
                if shard.rank:
                    own.pop(f"{name}_bias", None)
            mine.weights.append(own)
        mine.loras = [
            {name: self._share(name, slots, outputs.get(name), inputs.get(name)) for name, slots in loras.items()}
            for loras in self.loras
        ]
        mine._reduction = Reduction(all_reduce)
        mine._model = mine.make_model()
        return mine

    def _share(self, name: str, slots: LoraSlots, outputs: Tensor | None, inputs: Tensor | None) -> LoraSlots:
        """Of a layer's adapters, which has these outputs and inputs of the whole one; None: all."""
        ends = torch.tensor(slots.part_outputs).cumsum(0)
        counts = slots.part_outputs
        if outputs is not None:
            counts = tuple(torch.bucketize(outputs, ends, right=True).bincount(minlength=len(ends)).tolist())
        columns = slice(None) if inputs is None else inputs
        a, b = slots.a[..., columns], slots.b if outputs is None else slots.b[:, outputs]
        own = LoraSlots(counts, a.shape[3], LoraSizes(slots.num_slots, slots.max_rank), slots.a)
        for slot in range(slots.num_slots):
            ranks = tuple(slots.ranks[slot].tolist())
            own.install(slot, LayerAdapter(a[slot, :, : max(ranks)], b[slot, :, : max(ranks)], ranks))
        return own

    def sequence(self, length: int, *, seed: int = 1) -> Prompt:
        """`length` random rows, with blocks for them."""
        generator = torch.Generator().manual_seed(seed)
        count = -(-length // self.sizes.block_size)
        tables = [[free.pop() for _ in range(count)] for free in self.free]
        return Prompt(torch.randn(length, self.sizes.hidden, generator=generator), tables)

    def release(self, sequence: Prompt) -> None:
        for free, table in zip(self.free, sequence.tables, strict=True):
            free += table

    def _table(self, group: int, sequence: Prompt, first: int) -> list[int]:
        """As a pool that frees what lies behind the window of the row at `first` has it."""
        windows = [f.window for f in self.features if f.group == group]
        seen = 0 if 0 in windows else max(0, first + 1 - max(windows))
        return [
            block if (i + 1) * self.sizes.block_size > seen else self.nowhere
            for i, block in enumerate(sequence.tables[group])
        ]

    def run(self, *parts: tuple[Prompt, int], threads: int = 1) -> None:
        """One step: of each sequence the next so many rows."""
        s, tile = self.sizes, self.library.tile_rows(self.sizes.heads // self.sizes.kv_heads)
        blocks: list[list[int]] = [[] for _ in range(self.groups)]
        slots: list[list[int]] = [[] for _ in range(self.groups)]
        positions: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        for sequence, count in parts:
            for at in range(0, count, tile):
                first = (len(positions) + at, min(tile, count - at), sequence.done + at, len(blocks[0]))
                tiles.append(first)
            for g in range(self.groups):
                table = self._table(g, sequence, sequence.done)
                page = self.pools[g].stride(0) // self.slot
                for p in range(sequence.done, sequence.done + count):
                    slots[g].append(table[p // s.block_size] * page + p % s.block_size)
                blocks[g] += table[: (sequence.done + count - 1) // s.block_size + 1]
            positions += range(sequence.done, sequence.done + count)
        rows = len(positions)
        longest = -(-max(sequence.done + count for sequence, count in parts) // 64) * 64
        x = torch.cat([sequence.x[sequence.done : sequence.done + count] for sequence, count in parts])
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        buffers = [torch.empty(rows * n) for n in (s.hidden, qkv, s.heads * s.head_dim, s.ffn, s.ffn)]
        scores = torch.empty(threads * self.library.tile * longest)
        prepared = torch.empty(rows * self._prepared_bytes, dtype=torch.uint8)
        rows_of = [sequence.slot for sequence, count in parts for _ in range(count)]
        teams, shrunk = teams_of(np.array(rows_of, dtype=np.int32)), torch.full((rows * self._shrunk,), float("nan"))
        numbers = [torch.tensor(values) for values in (positions, tiles, *blocks, *slots)]
        at_blocks, at_slots = numbers[2 : 2 + self.groups], numbers[2 + self.groups :]
        step = Step(
            x.data_ptr(), *(b.data_ptr() for b in buffers), numbers[0].data_ptr(), numbers[1].data_ptr(),
            (Group * self.groups)(
                *(Group(b.data_ptr(), i.data_ptr()) for b, i in zip(at_blocks, at_slots, strict=True))
            ),
            scores.data_ptr(), prepared.data_ptr(), None if teams is None else teams.ctypes.data,
            shrunk.data_ptr(), rows, len(tiles), 0 if teams is None else len(teams), longest, self.library.tile * longest,
            threads,
        )  # fmt: skip
        failed = self.library.layers(ctypes.byref(self._model), ctypes.byref(step), 0, len(self.features))
        if self._reduction is not None:
            self._reduction.check(failed)
        for (sequence, count), out in zip(parts, x.split([count for _, count in parts]), strict=True):
            sequence.outputs.append(out)
            sequence.done += count

    def kept(self, sequence: Prompt, layer: int) -> Tensor:
        """K and V of a layer as they stand in the pool, [2, length, kv_heads, head_dim]; of a quantized pool decoded."""
        s, group = self.sizes, self.features[layer].group
        place = sum(f.group == group for f in self.features[:layer])
        blocks = self.pools[group][sequence.tables[group], place].view(-1, 2, s.block_size, self.slot)
        slots = blocks.transpose(0, 1).flatten(1, 2)[:, : sequence.done]
        if self.codes is None:
            return slots.unflatten(-1, (s.kv_heads, s.head_dim))
        codes = slots[..., : s.kv_heads * s.head_dim // 4].contiguous().view(self.codes)
        return dequantize(codes.unflatten(-1, (s.kv_heads, s.head_dim)), slots[..., -s.kv_heads :])

    def reference(self, x: Tensor, kept: Sequence[Tensor] = (), *, slot: int = -1, degree: int = 1) -> Tensor:
        """The same layers in float64, over one whole sequence. kept: K and V to attend to, of each layer; empty: its own.
        slot: of the sequence's adapter. degree: tensor-parallel ranks."""
        self._degree = degree
        x = x.double()
        for i, (f, weights, tables) in enumerate(zip(self.features, self.weights, self.tables, strict=True)):
            w = {name: value.double() for name, value in weights.items()}
            if slot >= 0:
                w |= {f"{name}_delta": dense_delta(slots, slot) for name, slots in self.loras[i].items()}
            own = kept[i] if kept else None
            attended = self._attention(f, w, tables, self._norm(x, w["input_norm"]), own)
            x = x + self._post(w, "post_attention_norm", attended)
            y = self._linear(self._norm(x, w["pre_feedforward_norm"]), w, "gate_up")
            gate, up = y.chunk(2, dim=-1)
            gate = gelu(gate, approximate="tanh") if f.activation == "gelu_tanh" else silu(gate)
            x = x + self._post(w, "post_feedforward_norm", self._linear(gate * up, w, "down"))
        return x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.sizes.eps).sqrt() * weight

    def _post(self, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        return self._norm(x, w[name]) if name in w else x

    def _attention(
        self, f: Features, w: dict[str, Tensor], tables: tuple[Tensor, Tensor], x: Tensor, kept: Tensor | None
    ) -> Tensor:
        s, length = self.sizes, len(x)
        q, k, v = (
            self._linear(x, w, "qkv")
            .view(length, -1, s.head_dim)
            .transpose(0, 1)
            .split([s.heads, s.kv_heads, s.kv_heads])
        )  # fmt: skip
        if f.qk_norm:
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        cosines, sines = (table[:length].double() for table in tables)

        def turned(y: Tensor) -> Tensor:
            left, right = y.chunk(2, dim=-1)
            return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)

        q, k = turned(q), turned(k)
        if kept is not None:
            k, v = kept.double().transpose(1, 2)
        k, v = (y.repeat_interleave(s.heads // s.kv_heads, dim=0) for y in (k, v))
        scores = q @ k.transpose(1, 2) * f.scale
        if f.softcap:
            scores = f.softcap * torch.tanh(scores / f.softcap)
        behind = torch.arange(length)[:, None] - torch.arange(length)
        seen = (behind >= 0) & (behind < (f.window or length))
        attended = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self._linear(attended.transpose(0, 1).reshape(length, -1), w, "o")

    def _linear(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        cuts = self._degree if name in ("o", "down") else 1
        parts = zip(x.chunk(cuts, -1), w[name].chunk(cuts, 1), strict=True)
        y = sum((self.method.product(*part) for part in parts), torch.zeros((), dtype=torch.float64))
        if f"{name}_delta" in w:
            y = y + x @ w[f"{name}_delta"].T
        return y + w[f"{name}_bias"] if f"{name}_bias" in w else y


def in_chunks(layers: Layers, chunk: int, length: int, *, slot: int = -1) -> Prompt:
    """A prompt of `length` tokens that ran alone, `chunk` of them a step; its blocks are free again."""
    sequence = layers.sequence(length)
    sequence.slot = slot
    while sequence.done < length:
        layers.run((sequence, min(chunk, length - sequence.done)))
    layers.release(sequence)
    return sequence
