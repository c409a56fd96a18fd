"""CUDA graphs of steps with few prompt tokens, whose kernels take less time than Python needs to launch them one by one:
prompts alone, and beside decoding sequences.

A step replays the least graph that holds its decode rows and its chunks' tokens. Rows are padded behind each of the two: slot
-1 stores nothing, length 0 attends to nothing. The list of chunks is padded with empty ones, the list of tiles with tiles of
the last of these, and the rows whose logits are wanted with row 0.

    rows    d0 d1 .. | a0 a1 a2 b0 b1 .. | ..
            decode     chunks A, B         padding
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from diptych.engine.exec.backends.base import Hooks
from diptych.engine.exec.cuda.batch import CudaBatch, StepTensors
from diptych.engine.exec.cuda.decoder import CudaDecoder
from diptych.engine.exec.cuda.graphs import kinds_of
from diptych.engine.exec.cuda.upload import ALIGN, Section, Upload
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych.kernels.triton_decode import choose_splits
from diptych.kernels.triton_prefill import prefill_tiles
from diptych.kernels.triton_sample import feed_ids

Shape = tuple[int, int]
"""Padded numbers of decode rows and of the chunks' tokens."""

MAX_TOKENS = 512
"""An 8B model's step of 512 tokens keeps an H200 busy for as long as its launches take; a larger one longer."""
CHUNK_GRAPHS: tuple[Shape, ...] = (
    *((0, tokens) for tokens in range(64, MAX_TOKENS + 1, 64)),
    *((rows, tokens) for rows in (16, 64, 256) for tokens in (64, 256)),
    *((rows, MAX_TOKENS) for rows in (16, 32, 64, 128, 256)),
)
"""Padded rows are computed, too. Beside sequences that decode, an engine with prompts waiting fills its steps to MAX_TOKENS."""
MAX_CHUNKS = 8
"""Of one step; those with more are launched kernel by kernel."""
_SECTIONS = 9
"""Besides the slots, of which each KV group has its own."""


class ChunkGraphs:
    """Captured at construction: before readiness. Args: drawn, slots: see DecodeGraphs."""

    def __init__(
        self,
        decoder: CudaDecoder,
        device: torch.device,
        drawn: Tensor,
        *,
        num_groups: int,
        num_kv_heads: int,
        num_programs: int,
        shapes: Sequence[Shape] = CHUNK_GRAPHS,
        slots: bool = False,
    ) -> None:
        self._decoder, self._num_groups = decoder, num_groups
        self._shapes = sorted(shapes, key=sum)
        capacity = max(sum(-(-len(s) // ALIGN) * ALIGN for s in self._empty(shape)) for shape in shapes)
        self._upload = Upload(device, capacity)
        self._kinds = kinds_of(slots)
        self._graphs: dict[tuple[Shape, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        largest_first = sorted(shapes, key=sum, reverse=True)  # the others then fit into the first one's memory
        for shape, adapted in product(largest_first, self._kinds):
            splits = choose_splits(max(1, shape[0]), num_kv_heads, num_programs)
            step, sources = self._tensors(self._upload.send(self._empty(shape)), splits, adapted)
            if shape[0]:
                feed_ids(step.token_ids[: shape[0]], sources, drawn)
            decoder.forward(step, Hooks(), want_logits=True)  # compiles kernels, and lets cuBLAS choose its own
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                if shape[0]:
                    feed_ids(step.token_ids[: shape[0]], sources, drawn)
                logits = decoder.forward(step, Hooks(), want_logits=True)
            if logits is None:
                raise AssertionError("a step with sampled rows has logits")
            self._graphs[shape, adapted] = (graph, logits)
            pool = pool or graph.pool()

    def shape_of(self, batch: CudaBatch) -> Shape | None:
        """The least graph that holds this step; None: none does."""
        decode, chunks = batch.num_decode, len(batch.counts)
        if not 0 < chunks <= MAX_CHUNKS or not 0 < len(batch.sample_rows) <= decode + chunks:
            return None
        tokens = len(batch.token_ids) - decode
        for shape in self._shapes:
            # Without decode rows only graphs without them: a padded one is computed, too.
            if shape[0] >= decode and bool(shape[0]) == bool(decode) and shape[1] >= tokens:
                return shape
        return None

    def replay(self, batch: CudaBatch, table_rows: Sequence[int], shape: Shape, sources: Sequence[int] = ()) -> Tensor:
        """Args: table_rows: of the block tables, of each decode row and chunk. shape: shape_of(batch). sources: of decode
        rows, see DecodeGraphs. Returns: logits of batch.sample_rows, valid until the next replay."""
        self._upload.send(self._sections(shape, batch, table_rows, sources))
        graph, logits = self._graphs[shape, batch.adapters is not None or len(self._kinds) == 1]
        graph.replay()
        return logits[: len(batch.sample_rows)]

    def _empty(self, shape: Shape) -> list[Section]:
        return self._sections(shape, CudaBatch([], [], [], [[]] * self._num_groups, 0, [], [], [], [], [], None), [])

    def _sections(
        self, shape: Shape, batch: CudaBatch, table_rows: Sequence[int], sources: Sequence[int] = ()
    ) -> list[Section]:
        """Of a length that `shape` decides."""
        decode, room = shape
        count = batch.num_decode
        gap, tail = decode - count, room - (len(batch.token_ids) - count)

        def padded(values: Sequence[int], nothing: int) -> list[int]:
            return [*values[:count], *([nothing] * gap), *values[count:], *([nothing] * tail)]

        chunks = batch.chunk_words(table_rows[count:], decode)
        chunks += [0] * (4 * (MAX_CHUNKS + 1) - len(chunks))
        group, rows = self._decoder.group, self._decoder.tile_rows
        tiles = prefill_tiles(batch.counts, batch.starts, group, rows)
        most = room // (rows // group) + MAX_CHUNKS
        tiles += [MAX_CHUNKS, 0] * (most - len(tiles) // 2)
        samples = [row if row < count else row + gap for row in batch.sample_rows]
        samples += [0] * (decode + MAX_CHUNKS - len(samples))
        positions = padded(batch.positions, 0)
        return [
            padded(batch.token_ids, 0),
            positions,
            [p + 1 for p in batch.positions[:count]] + [0] * gap,
            [*table_rows[:count], *([0] * gap)],
            chunks,
            tiles,
            samples,
            padded(batch.adapters or [-1] * len(batch.token_ids), -1),
            [*sources, *([-1] * (decode - len(sources)))],
            *(padded(slots, -1) for slots in batch.slots),
        ]

    @staticmethod
    def _tensors(sections: Sequence[Tensor], splits: int, adapted: bool) -> tuple[StepTensors, Tensor]:
        """Returns: also the sources of the decode rows."""
        ids, positions, lens, rows, chunks, tiles, samples, adapters, sources = sections[:_SECTIONS]
        step = StepTensors(
            token_ids=ids,
            positions=positions,
            slots=sections[_SECTIONS:],
            decode_lens=lens,
            decode_rows=rows,
            chunks=chunks.view(-1, 4),
            tiles=tiles.view(-1, 2),
            sample_rows=samples,
            splits=splits,
            rows=StepRows(adapters) if adapted else PLAIN_ROWS,
        )
        return step, sources
