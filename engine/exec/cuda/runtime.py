"""A step on the device, launched kernel by kernel: its block tables, its numbers, its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from diptych.engine.exec.backends.base import Hooks, Segment
from diptych.engine.exec.cuda.batch import CudaBatch, StepTensors, lay_out
from diptych.engine.exec.cuda.block_tables import BlockTables
from diptych.engine.exec.cuda.decoder import CudaDecoder
from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import ScheduledSeq
from diptych.kernels.triton_decode import PROGRAMS, PROGRAMS_OF_PAIRS, choose_splits
from diptych.kernels.triton_prefill import prefill_tiles


@dataclass(slots=True)
class SharedBatch(CudaBatch):
    """Of a step that other back ends compute as well. tensors: None until it begins."""

    seqs: Sequence[ScheduledSeq]
    tensors: StepTensors | None


class CudaRuntime:
    """Implements backends.base.Runtime, for back ends that take turns; cuda.backend has it for itself, with graphs."""

    def __init__(
        self, weights: ModelWeights, pool: KvPool, max_model_len: int, *, batch_invariant: bool = False
    ) -> None:
        device = weights.embedding.device
        self._kv, self._block_size, self._max_model_len = pool.kv, pool.block_size, max_model_len
        self._num_kv_heads = weights.description.num_kv_heads
        self._tables = BlockTables(-(-max_model_len // pool.block_size), pool.num_blocks, device)
        self.decoder = CudaDecoder(
            weights, pool, self._tables.tensors, max_model_len=max_model_len, batch_invariant=batch_invariant
        )
        self.upload = Upload(device)
        self.num_programs = 8
        if device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
            coded = any(group.codec is not None for group in pool.groups)
            pairs = coded and weights.embedding.dtype != torch.float32 and not batch_invariant
            self.num_programs = (PROGRAMS_OF_PAIRS if pairs else PROGRAMS) * count

    def build(self, seqs: Sequence[ScheduledSeq]) -> CudaBatch:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        return lay_out(seqs, self._kv, self._max_model_len)

    def table_rows(self, seqs: Sequence[ScheduledSeq], batch: CudaBatch) -> list[int]:
        """Rows of the device's block tables, in the order of the batch; new blocks are sent. Raises: InternalError."""
        ordered = [seqs[i] for i in batch.order]
        blocks = [-(-(seq.start + len(seq.token_ids)) // self._block_size) for seq in ordered]
        return batch.row_tables(self._tables.rows(ordered, blocks))

    def send(self, batch: CudaBatch, rows: Sequence[int], sources: Sequence[int] = ()) -> tuple[StepTensors, Tensor]:
        """Returns: the step on the device, and there also `sources`."""
        count = batch.num_decode
        chunks = batch.chunk_words(rows[count:], count)
        tiles = prefill_tiles(batch.counts, batch.starts, self.decoder.group, self.decoder.tile_rows)
        ids, positions, lens, decode_rows, chunk_words, tile_words, sample_rows, fed, adapters, *slots = (
            self.upload.send(
                (
                    batch.token_ids,
                    batch.positions,
                    [p + 1 for p in batch.positions[:count]],
                    rows[:count],
                    chunks,
                    tiles,
                    batch.sample_rows,
                    sources,
                    batch.adapters or (),
                    *batch.slots,
                )
            )
        )
        step = StepTensors(
            token_ids=ids,
            positions=positions,
            slots=slots,
            decode_lens=lens,
            decode_rows=decode_rows,
            chunks=chunk_words.view(-1, 4) if chunks else None,
            tiles=tile_words.view(-1, 2) if chunks else None,
            sample_rows=None if batch.all_rows_sampled else sample_rows,
            splits=choose_splits(max(1, count), self._num_kv_heads, self.num_programs),
            rows=PLAIN_ROWS if batch.adapters is None else StepRows(adapters),
        )
        return step, fed

    # ---- in turns with other back ends ----

    def lay_out(self, seqs: Sequence[ScheduledSeq]) -> SharedBatch:
        """See Runtime.lay_out."""
        batch = self.build(seqs)
        return SharedBatch(
            seqs=seqs, tensors=None, **{field.name: getattr(batch, field.name) for field in fields(batch)}
        )

    def begin(self, batch: SharedBatch) -> None:
        """See Runtime.begin."""
        batch.tensors, _ = self.send(batch, self.table_rows(batch.seqs, batch))

    def run(self, x: Tensor | None, batch: SharedBatch, segment: Segment, hooks: Hooks) -> Tensor | None:
        """See Runtime.run."""
        assert batch.tensors is not None
        want_logits = bool(batch.sample_rows)
        return self.decoder.forward(batch.tensors, hooks, want_logits=want_logits, segment=segment, x=x)
