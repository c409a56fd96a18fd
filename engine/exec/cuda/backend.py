"""One step over Triton kernels: lay out, send, compute (a graph where there is one), draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.backends.base import Hooks
from diptych.engine.exec.cuda.batch import CudaBatch
from diptych.engine.exec.cuda.block_tables import NUM_ROWS
from diptych.engine.exec.cuda.blocks import BlockMover
from diptych.engine.exec.cuda.chunk_graphs import CHUNK_GRAPHS, ChunkGraphs, Shape
from diptych.engine.exec.cuda.communicator import CudaCommunicator
from diptych.engine.exec.cuda.draw import DeviceDraw, DeviceStep, is_plain, is_single
from diptych.engine.exec.cuda.graphs import GRAPH_SIZES, DecodeGraphs
from diptych.engine.exec.cuda.runtime import CudaRuntime
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.sampling import draw_step
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import DeviceRange, ScheduledSeq, StepResult
from diptych.engine.runner import StepAborted
from diptych.kernels.triton_sample import feed_ids


class CudaBackend:
    """Weights, block tables, graphs. Ready when constructed: kernels compiled, graphs captured, the pool zero again.

    Args:
        graph_sizes: padded batch sizes of the decode graphs, ascending; empty: decode steps are launched kernel by kernel.
        chunk_graphs: the same of steps with chunks: see ChunkGraphs.
        batch_invariant: a row's bits, and its draw, do not depend on the rest of the step.
    """

    def __init__(
        self,
        weights: ModelWeights,
        pool: KvPool,
        *,
        max_model_len: int,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        chunk_graphs: Sequence[Shape] = CHUNK_GRAPHS,
        batch_invariant: bool = False,
    ) -> None:
        device = weights.embedding.device
        self._invariant = batch_invariant
        self._pool, self._runtime = pool, CudaRuntime(weights, pool, max_model_len, batch_invariant=batch_invariant)
        communicator = weights.communicator
        self._check = communicator.check if isinstance(communicator, CudaCommunicator) else _nothing
        """Raises RunnerLost; once the host has waited for a step."""
        self._upload, self._draw = self._runtime.upload, DeviceDraw(device, NUM_ROWS, self._check)
        self._movers = [BlockMover(group.bytes) for group in pool.groups]
        for group, mover in zip(pool.groups, self._movers, strict=True):
            group.mover = mover
        self._drawn_rows: dict[int, int] = {}
        """Of the step that was launched last: sequence -> its place in `drawn`."""
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        if device.type == "cuda":
            self._warm_up(weights.description.vocab_size, max_model_len)
            sizes: dict[str, Any] = {
                "num_groups": len(pool.groups),
                "num_kv_heads": weights.description.num_kv_heads,
                "num_programs": self._runtime.num_programs,
                "slots": weights.lora is not None,
            }
            if graph_sizes:
                self._graphs = DecodeGraphs(self._runtime.decoder, device, self._draw.drawn, sizes=graph_sizes, **sizes)
            if chunk_graphs:
                self._chunk_graphs = ChunkGraphs(
                    self._runtime.decoder, device, self._draw.drawn, shapes=chunk_graphs, **sizes
                )
            for group in pool.groups:
                group.tensor.zero_()
            torch.cuda.synchronize(device)

    def _warm_up(self, vocab_size: int, max_model_len: int) -> None:
        """Compile every kernel that a step may launch, on block 0."""
        with torch.inference_mode():
            self._runtime.decoder.compile_linears()
        last = vocab_size - 1
        for params in (
            SamplingParams(max_tokens=1, temperature=0.0),
            SamplingParams(max_tokens=1, temperature=1.0),
            SamplingParams(max_tokens=1, temperature=1.0, frequency_penalty=0.5, logit_bias=((0, 1.0),)),
            SamplingParams(max_tokens=1, temperature=0.0, bad_words=((0,),)),
        ):
            count = min(2, max_model_len, self._pool.block_size)
            tables = tuple([0] for _ in self._pool.groups)
            seq = ScheduledSeq("warm-up", [last] * count, 0, tables, True, params, 0, top_logprobs=1)
            seq.first_blocks = (0,) * len(tables)
            if params.constrained:
                seq.history, seq.num_prompt = [last] * (count + 1), count
            batch = self.build([seq])
            logits = self.execute([seq], batch, None)
            if logits is not None:
                self.draw([seq], batch.sample_seqs, [], logits, (), StepResult(token_ids=[()]))
        ids, sources, _ = self._upload.send(([0] * 8, [-1] * 8, [0] * 8))
        feed_ids(ids, sources, self._draw.drawn)
        token = memoryview(bytearray(self._pool.bytes_per_token))
        room = torch.zeros(self._pool.bytes_per_token, dtype=torch.uint8, device=self._pool.device)
        there = DeviceRange(room.data_ptr(), room.numel())
        for mover in self._movers:
            mover.pack([0], 1, token)
            mover.unpack([0], 1, token)
            mover.pack_device([0], 1, there)
            mover.pull([0], 1, there).wait()

    def wrote(self) -> None:
        """See BlockMover."""
        for mover in self._movers:
            mover.wrote()

    def _launch_pulls(self) -> None:
        for mover in self._movers:
            mover.launch_pulls()

    def build(self, seqs: Sequence[ScheduledSeq]) -> CudaBatch:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        return self._runtime.build(seqs)

    def execute(
        self, seqs: Sequence[ScheduledSeq], batch: CudaBatch, should_abort: Callable[[], bool] | None
    ) -> Tensor | None:
        """Compute the step's tokens and store their KV. Returns: logits of batch.sample_rows, or None when there are none.

        Raises: StepAborted; InternalError for more sequences than the block tables hold, or blocks outside the pool.
        """
        if should_abort is not None and should_abort():
            raise StepAborted
        try:
            return self._compute(seqs, batch, should_abort, ())
        except BaseException:
            self.wrote()  # kernels that were launched already write to blocks that may soon be another's
            raise

    def launch(
        self, seqs: Sequence[ScheduledSeq], batch: CudaBatch, sources: Sequence[int], eos_token_ids: Sequence[int]
    ) -> DeviceStep:
        """See ModelRunner.launch. Raises: InternalError, also for sequences that are not is_single."""
        if not all(is_single(seq) for seq in seqs):
            raise InternalError("only sequences of one draw can be launched ahead")
        if len(batch.sample_seqs) > NUM_ROWS:
            raise InternalError(f"{len(batch.sample_seqs)} draws in one step; at most {NUM_ROWS}")
        fed = self._fed_rows(seqs, batch, sources)
        try:
            logits = self._compute(seqs, batch, None, fed)
            if logits is None:
                logits = torch.empty((0, 1), device=self._draw.drawn.device)  # chunks that end no prompt
            step = DeviceStep(self._draw, seqs, batch.sample_seqs, logits, eos_token_ids)
            self._drawn_rows = {seq: row for row, seq in enumerate(batch.sample_seqs)}
            if all(is_plain(seqs[i]) for i in batch.sample_seqs):
                step.draw()
            return step
        except BaseException:
            self.wrote()
            raise

    def _fed_rows(self, seqs: Sequence[ScheduledSeq], batch: CudaBatch, sources: Sequence[int]) -> list[int]:
        """Of each leading row of one token, where in `drawn` its token is; -1: it is known. Empty: all are. Args: sources: see
        ModelRunner.launch."""
        if sources and len(sources) != len(seqs):
            raise InternalError(f"{len(sources)} sources for {len(seqs)} sequences")
        if not sources or max(sources) < 0:
            return []
        fed = []
        for i in batch.order:
            source = sources[i]
            if source >= 0 and (source not in self._drawn_rows or len(seqs[i].token_ids) != 1):
                raise InternalError(f"{seqs[i].attempt}: sequence {source} of the step before draws no token for it")
            fed.append(self._drawn_rows[source] if source >= 0 else -1)
        return fed[: batch.num_decode]

    def _compute(
        self,
        seqs: Sequence[ScheduledSeq],
        batch: CudaBatch,
        should_abort: Callable[[], bool] | None,
        fed_rows: Sequence[int],
    ) -> Tensor | None:
        rows = self._runtime.table_rows(seqs, batch)
        graphs = self._graphs
        if graphs is not None and not batch.counts and len(rows) <= graphs.max_rows:
            logits = graphs.replay(batch, rows, fed_rows)
            self._launch_pulls()
            if batch.all_rows_sampled:
                return logits
            if not batch.sample_rows:
                return None
            return logits.index_select(0, self._upload.send((batch.sample_rows,))[0])
        chunk_graphs = self._chunk_graphs
        if chunk_graphs is not None and (shape := chunk_graphs.shape_of(batch)) is not None:
            logits = chunk_graphs.replay(batch, rows, shape, fed_rows)
            self._launch_pulls()
            return logits
        step, fed = self._runtime.send(batch, rows, fed_rows)
        if fed_rows:
            feed_ids(step.token_ids[: len(fed_rows)], fed, self._draw.drawn)
        out = self._runtime.decoder.forward(step, Hooks(should_abort), want_logits=bool(batch.sample_rows))
        self._launch_pulls()
        return out

    def draw(
        self,
        seqs: Sequence[ScheduledSeq],
        sampled: Sequence[int],
        prompt_rows: list[tuple[int, int]],
        logits: Tensor,
        eos_token_ids: Sequence[int],
        result: StepResult,
    ) -> None:
        """Fill `result`, as draw_step does; single draws with one sync. Raises: RunnerLost."""
        if self._invariant:
            self._draw_apart(seqs, sampled, prompt_rows, logits, eos_token_ids, result)
            self._check()
        elif prompt_rows or not sampled or not all(is_single(seqs[i]) for i in sampled):
            draw_step(seqs, sampled, prompt_rows, logits, eos_token_ids, result)
            self._check()
        else:
            self._draw.draw(seqs, sampled, logits, eos_token_ids).fill(result)

    def _draw_apart(
        self,
        seqs: Sequence[ScheduledSeq],
        sampled: Sequence[int],
        prompt_rows: list[tuple[int, int]],
        logits: Tensor,
        eos_token_ids: Sequence[int],
        result: StepResult,
    ) -> None:
        """See draw. What other sequences ask for does not choose how one is drawn: single draws are the kernels', others by
        engine.exec.sampling sequence by sequence, since torch sums rows in another order where there are more of them."""
        if prompt_rows:
            draw_step(seqs, (), prompt_rows, logits[len(sampled) :], eos_token_ids, result)
        rows_of: dict[int, list[int]] = {}
        for row, i in enumerate(sampled):
            rows_of.setdefault(i, []).append(row)
        singles = [i for i in rows_of if is_single(seqs[i])]
        if singles:
            rows = [rows_of[i][0] for i in singles]
            some = logits[: len(rows)] if rows == list(range(len(rows))) else logits[rows]
            self._draw.draw(seqs, singles, some, eos_token_ids).fill(result)
        for i in set(rows_of) - set(singles):
            draw_step(seqs, [i] * len(rows_of[i]), [], logits[rows_of[i]], eos_token_ids, result)


def _nothing() -> None: ...
