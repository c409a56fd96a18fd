"""CUDA graphs of the decode step, one for each padded batch size; two where layers have slots for adapters.

A step of n sequences replays the least graph of at least n rows; rows past n are padded: slot -1 stores nothing, length 0
attends to nothing. Everything that changes from step to step lies in one static buffer, sent as one copy.

A step in which no row has an adapter replays a graph without what adapters add: it costs what it costs without slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from diptych.engine.exec.backends.base import Hooks
from diptych.engine.exec.cuda.batch import CudaBatch, StepTensors
from diptych.engine.exec.cuda.decoder import CudaDecoder
from diptych.engine.exec.cuda.upload import ALIGN, Upload
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych.kernels.triton_decode import choose_splits
from diptych.kernels.triton_sample import feed_ids

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_SECTIONS = 6
"""Besides the slots, of which each KV group has its own."""


_UNIT = 2 << 20
"""Tensors of more than a megabyte are rounded up to it (torch's allocator)."""


def kinds_of(slots: bool) -> tuple[bool, ...]:
    """Of graphs of one size: whether adapters of rows are read. Without slots for adapters a method of weights may read them.

    Args: slots: the layers have slots for adapters. Returns: what takes most memory first.
    """
    return (True, False) if slots else (True,)


def output_bytes(sizes: Sequence[int], row_bytes: int) -> int:
    """What graphs of these sizes keep besides the memory that they share: the logits of each."""
    return sum(-(-size * row_bytes // _UNIT) * _UNIT for size in sizes)


class DecodeGraphs:
    """Captured at construction: before readiness.

    Args:
        drawn: [at least max(sizes)] int32, at one address for ever: the tokens that the last step drew.
        sizes: ascending.
        slots: the layers have slots for adapters.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        device: torch.device,
        drawn: Tensor,
        *,
        num_groups: int,
        num_kv_heads: int,
        num_programs: int,
        sizes: Sequence[int] = GRAPH_SIZES,
        slots: bool = False,
    ) -> None:
        self._sizes = list(sizes)
        self._sections = _SECTIONS + num_groups
        self._no_adapters = np.full(max(sizes), -1, dtype=np.int32)
        self._upload = Upload(device, self._sections * (max(sizes) + ALIGN))
        self._kinds = kinds_of(slots)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        for size, adapted in product(
            reversed(self._sizes), self._kinds
        ):  # the largest first: the others then fit into its memory
            step, sources = self._step(size, choose_splits(size, num_kv_heads, num_programs), adapted)
            feed_ids(step.token_ids, sources, drawn)
            decoder.forward(step, Hooks(), want_logits=True)  # compiles kernels, and lets cuBLAS choose its own
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                feed_ids(step.token_ids, sources, drawn)
                logits = decoder.forward(step, Hooks(), want_logits=True)
            if logits is None:
                raise AssertionError("a decode step has logits")
            self._graphs[size, adapted] = (graph, logits)
            pool = pool or graph.pool()

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def _stride(self, size: int) -> int:
        return -(-size // ALIGN) * ALIGN

    def _step(self, size: int, splits: int, adapted: bool) -> tuple[StepTensors, Tensor]:
        """Returns: also, by row, where in `drawn` its token is; -1: in token_ids."""
        words, stride = self._upload.device_words, self._stride(size)
        words.zero_()
        ids, positions, lens, rows, sources, adapters, *slots = (
            words[i * stride : i * stride + size] for i in range(self._sections)
        )
        for padded in (sources, adapters, *slots):
            padded.fill_(-1)
        of_rows = StepRows(adapters) if adapted else PLAIN_ROWS
        return StepTensors(ids, positions, slots, lens, rows, None, None, None, splits, of_rows), sources

    def replay(self, batch: CudaBatch, table_rows: Sequence[int], sources: Sequence[int] = ()) -> Tensor:
        """Args: batch: at most max_rows decode rows and no chunk. sources: see ModelRunner.launch.
        Returns: logits of its rows, valid until the next replay."""
        count = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        none = [0] * (size - count)
        self._upload.send(
            (
                batch.token_ids + none,
                batch.positions + none,
                [p + 1 for p in batch.positions] + none,
                [*table_rows, *none],
                [*sources, *([-1] * (size - len(sources)))],
                self._no_adapters[:size] if batch.adapters is None else batch.adapters + [-1] * (size - count),
                *(slots + [-1] * (size - count) for slots in batch.slots),
            )
        )
        graph, logits = self._graphs[size, batch.adapters is not None or len(self._kinds) == 1]
        graph.replay()
        return logits[:count]
