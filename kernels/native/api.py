"""The compiled library's functions and structs. What the structs hold are addresses: whoever fills one keeps the tensors."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.native.build import functions_of

_ALIGN = 16  # floats: one cache line
_PIECE_BYTES = 64 << 20


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Of the gate, by the name that engine.exec.layers.mlp gives them: what Layer.activation holds."""
MAX_HEAD_DIM = 256
FLOAT_BYTES = 4
FLOATS = 0
BFLOATS = 4
"""Of a pool of bfloat16, which has no scales."""
KV_CODES = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
"""Of a quantized KV pool, by the dtype of its codes: what Model.kv_codes holds."""
GROUP_STEP = 16
"""Groups of inputs are a multiple of this."""
MAX_INT8_INPUTS = (2**31 - 1) // (127 * 128)
"""Whose products' sum int32 holds."""
LORA_PARTS = 3
"""Of a layer with adapters, at most."""
LORA_ROWS = 4
"""With the same adapter, which are computed together."""


class WeightFormat(IntEnum):
    """How packed weights are kept: what Weights.format holds."""

    PLAIN = 0
    BFLOAT16 = 1
    """Plain weights that are bfloat16 values: the same bits come out, with half the memory read."""
    INT8 = 2
    INT4 = 3
    Q8_0 = 4
    Q5_0 = 5
    Q4_1 = 6
    Q4_K = 7
    Q6_K = 8
    BF16 = 9
    """bfloat16 weights, and rows that are rounded to it: see bf16.h."""


class Adapter(ctypes.Structure):
    """An adapter in a slot of a layer, see lora.h: packed matrices a and b, each of bfloat16 or float32.

    ranks: of each part; 0: the part is left alone, and nothing is read for it.
    """

    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("a", "b")),
        *((name, c_int32) for name in ("a_bfloats", "b_bfloats")),
        ("ranks", c_int32 * LORA_PARTS),
        ("unused", c_int32),
    ]


class Lora(ctypes.Structure):
    """The slots of a layer's adapters. width: floats of a row of Step.shrunk, a multiple of Library.lanes. ends: of each part's
    outputs, which are multiples of it, too."""

    _fields_: ClassVar[Any] = [
        ("slots", POINTER(Adapter)),
        *((name, c_int64) for name in ("parts", "width")),
        ("ends", c_int64 * LORA_PARTS),
    ]


class Team(ctypes.Structure):
    """Up to LORA_ROWS rows that have the same slot."""

    _fields_: ClassVar[Any] = [("slot", c_int32), ("count", c_int32), ("rows", c_int32 * LORA_ROWS)]


class Weights(ctypes.Structure):
    """A linear layer: packed weights (Library.pack), and a bias or None; or a part of its outputs in one format.

    order: input order[k] of x meets input k of the weights; None: as they are. next: address of the Weights of the outputs that
    follow, or None. lora: address of the layer's Lora, in its first part; None: it has none. format: of WeightFormat. group:
    inputs that share a scale; 0: the format has no groups.
    """

    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("packed", "bias", "order", "next", "lora")),
        *((name, c_int64) for name in ("format", "group", "outputs")),
    ]


class Layer(ctypes.Structure):
    """One decoder layer: every feature that families differ in is a field, and one that is absent costs nothing.

    Norms are plain float32; None where the layer has none. post_attention_norm and post_feedforward_norm are applied to what
    attention, or the feed-forward part, adds to the residual. A family that multiplies by (1 + w) stores 1 + w here.

    cosines, sines: [positions, head_dim / 2] each. kv: address of block 0's K; its V lies block_size tokens behind. A token's
    codes and scales lie as kv_codes.h says. block_step: floats from one block to the next. group: of Step.groups.
    window: tokens a query sees; 0: all. activation: of ACTIVATIONS. scale: of the queries.
    softcap: a score s becomes softcap * tanh(s / softcap); 0: it stays.
    """

    _fields_: ClassVar[Any] = [
        *(
            (name, c_void_p)
            for name in (
                "input_norm", "q_norm", "k_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm",
            )
        ),
        *((name, Weights) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("cosines", "sines", "kv")),
        *((name, c_int64) for name in ("block_step", "group", "window", "activation")),
        ("scale", c_float),
        ("softcap", c_float),
    ]  # fmt: skip


REDUCE = CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64)
"""Tensor parallelism: (address, rows, columns) of float32, this rank's part of a sum, which becomes the sum of all ranks.
Returns: 0, or that it failed; then the call into the library returns the same at once."""


class Model(ctypes.Structure):
    """What all layers share; with ranks, sizes of this one. kv_codes: FLOATS, BFLOATS, or of KV_CODES. eps: of every norm.
    reduce: of what attention and the feed-forward part add to the rows; not given: there are no ranks."""

    _fields_: ClassVar[Any] = [
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim", "block_size", "kv_codes")),
        ("eps", c_float),
        ("reduce", REDUCE),
    ]


class Group(ctypes.Structure):
    """Where the layers of one KV group keep the step's tokens.

    blocks: the block tables, one after the other, as Step.tiles says. An entry is not read when all of its tokens lie before
    the windows of all rows of its sequence in this step. slots: [rows], in tokens from Layer.kv: where a row's K goes.
    """

    _fields_: ClassVar[Any] = [("blocks", c_void_p), ("slots", c_void_p)]


class Step(ctypes.Structure):
    """x .. up: [rows, ...] buffers; tiles: [num_tiles, 4] as in attention.h; groups: as many as the layers name.

    prepared: [rows, the most Library.prepared_bytes of a linear layer]. teams: [num_teams] Team, of the rows that have adapters.
    shrunk: [rows, the most Lora.width], with teams.
    max_len: tokens of the longest sequence, rounded up to 64. scores: [threads, scores_step], scores_step at least
    Library.tile * max_len.
    """

    _fields_: ClassVar[Any] = [
        *(
            (name, c_void_p)
            for name in ("x", "normed", "qkv", "attended", "gate", "up", "positions", "tiles")
        ),
        ("groups", POINTER(Group)),
        *((name, c_void_p) for name in ("scores", "prepared", "teams", "shrunk")),
        *((name, c_int64) for name in ("rows", "num_tiles", "num_teams", "max_len", "scores_step", "num_threads")),
    ]  # fmt: skip


class Memory(Protocol):
    """Where packed weights go."""

    def take(self, size: int) -> Tensor:
        """[size] float32, contiguous."""
        ...


class Library:
    """Raises: NativeError when the file cannot be loaded."""

    def __init__(self, path: Path) -> None:
        # Calls let go of the interpreter lock: the event loop runs while a step computes.
        function = functions_of(path, ctypes.CDLL)
        self.panel: int = function("panel", returns=c_int64)()
        """Outputs of one panel of packed weights."""
        self.tile: int = function("tile", returns=c_int64)()
        """Queries that go through the KV together."""
        self.lanes: int = function("lanes", returns=c_int64)()
        size_of = function("struct_size", c_int64, returns=c_int64)
        ours = [ctypes.sizeof(kind) for kind in (Weights, Layer, Model, Group, Step, Lora, Adapter, Team)]
        assert [size_of(i) for i in range(len(ours))] == ours, "a struct differs between api.py and decoder.c"
        self._tile_rows = function("tile_rows", c_int64, returns=c_int64)
        self._packed_bytes = function("packed_bytes", *[c_int64] * 4, returns=c_int64)
        self._prepared_bytes = function("prepared_bytes", POINTER(Weights), c_int64, returns=c_int64)
        self._pack_codes = function("pack_codes", c_int64, c_void_p, *[c_int64] * 4, c_void_p)
        self._pack_plane = function("pack_plane", c_int64, c_int64, c_void_p, *[c_int64] * 3, c_void_p)
        self._use_tiles = function("use_tiles", c_int64, returns=c_int64)
        self._norm = function("norm", *[c_void_p] * 3, c_int64, c_int64, c_float)
        self._softcap = function("softcap", c_void_p, c_int64, c_float)
        self._linear = function("linear", POINTER(Weights), *[c_void_p] * 5, *[c_int64] * 5)
        step = (POINTER(Model), POINTER(Step))
        self.layers = function("layers", *step, c_int64, c_int64, returns=c_int64)
        """Layers [first, last). Returns: see REDUCE."""
        self.attention_part = function("attention_part", *step, c_int64)
        self.feed_part = function("feed_part", *step, c_int64, returns=c_int64)
        """Returns: see REDUCE."""

    def tile_rows(self, group: int) -> int:
        """Rows of a tile where `group` query heads share a KV head."""
        return int(self._tile_rows(group))

    def prepared_bytes(self, weights: Weights, inputs: int) -> int:
        """Of a row of so many inputs as the layer reads it."""
        return int(self._prepared_bytes(ctypes.byref(weights), inputs))

    def pack(
        self,
        kind: WeightFormat,
        codes: Tensor,
        memory: Memory,
        *,
        planes: Sequence[Tensor] = (),
        group: int = 0,
        flip: int = 0,
    ) -> Tensor:
        """
        Args:
            codes: [outputs, inputs]: of PLAIN float32, of BFLOAT16 and BF16 bfloat16, else of one byte. code ^ flip is stored.
            planes: the format's scales and the like, see grouped.h; [outputs, ...] each.
            group: inputs that share a scale; 0: the format has no groups.
        Returns: the packed form, flat.
        """
        (outputs, inputs), source = codes.shape, codes.contiguous()
        packed = memory.take(int(self._packed_bytes(kind, outputs, inputs, group)) // FLOAT_BYTES)
        self._pack_codes(kind, source.data_ptr(), outputs, inputs, group, flip, packed.data_ptr())
        for i, plane in enumerate(planes):
            values = plane.contiguous()
            self._pack_plane(kind, i, values.data_ptr(), outputs, inputs, group, packed.data_ptr())
        return packed

    def use_tiles(self, wanted: bool) -> bool:
        """Whether products with bfloat16 weights are made by AMX's tiles, for the whole process; their bits are the same either
        way. Not during a step. Returns: whether they are from now on."""
        return bool(self._use_tiles(wanted))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of [rows, size], contiguous."""
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def softcap(self, values: Tensor, cap: float) -> None:
        """values = cap * tanh(values / cap), in place. values: float32, contiguous."""
        self._softcap(values.data_ptr(), values.numel(), cap)

    def misfit(self, *, hidden: int, ffn: int, head_dim: int, activation: str) -> str | None:
        """Why the layers cannot be of these sizes, or None: they step through a row in whole vectors and panels."""
        if activation not in ACTIVATIONS:
            return f"its activation is {activation}"
        for name, value, step in (
            ("head_dim", head_dim, max(self.panel, 2 * self.lanes)),
            ("hidden_size", hidden, self.lanes),
            ("intermediate_size", ffn, self.panel),
        ):
            if value % step:
                return f"{name} {value} is no multiple of {step}"
        return None if head_dim <= MAX_HEAD_DIM else f"head_dim {head_dim} is above {MAX_HEAD_DIM}"

    def linear(
        self,
        x: Tensor,
        weights: Weights,
        outputs: int,
        num_threads: int,
        teams: np.ndarray | None = None,
        width: int = 0,
    ) -> Tensor:
        """
        Args:
            x: [rows, inputs], contiguous. teams: see Step; None: no row has an adapter. width: of its Lora.
        Returns: [rows, outputs].
        """
        rows, inputs = x.shape
        out = torch.empty(rows, outputs)
        prepared = torch.empty(rows * self.prepared_bytes(weights, inputs), dtype=torch.uint8)
        shrunk = torch.empty(rows * width)
        at, num_teams = (None, 0) if teams is None else (teams.ctypes.data, len(teams))
        places = x.data_ptr(), prepared.data_ptr(), at, shrunk.data_ptr(), out.data_ptr()
        self._linear(ctypes.byref(weights), *places, rows, num_teams, inputs, outputs, num_threads)
        return out


class HugePages:
    """Memory for weights in large pieces that ask for huge pages: a step reads all of them, and with small pages a good
    part of that time went to address translation."""

    def __init__(self, piece_bytes: int = _PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._piece = torch.empty(0)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """[size] float32, at a cache line's start; lives as long as the tensor."""
        if self._used + size > self._piece.numel():
            num_bytes = max(self._piece_bytes, 4 * size)
            piece = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                piece.madvise(mmap.MADV_HUGEPAGE)
            self._piece, self._used = torch.frombuffer(piece, dtype=torch.float32), 0
        taken = self._piece[self._used : self._used + size]
        self._used += -(-size // _ALIGN) * _ALIGN
        return taken
