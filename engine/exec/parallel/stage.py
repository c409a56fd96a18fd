"""One rank's part of a step: its layers of each micro-batch, on the way from the stage before to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.engine.exec.backends.base import Layout
from diptych.engine.exec.decoder import Decoder, kept_order
from diptych.engine.exec.parallel.micro_batches import Piece, cut_step, micro_batches_of
from diptych.engine.exec.sampling import PromptRows, want_prompt_rows
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import RunnerLost


@dataclass(slots=True)
class SampledStep:
    """A whole step, on the rank that samples: what its micro-batches have put out, in the step's own indices.

    Args:
        order: sequence index of each group of rows; token_ids, positions: of each row.
        sample_seqs, prompt_rows, logits: see sampling.draw_step; None: no logits are wanted.
    """

    order: list[int]
    token_ids: list[int]
    positions: list[int]
    sample_seqs: list[int]
    prompt_rows: PromptRows
    logits: Tensor | None


class _Outputs:
    """Of the micro-batches so far, by sequence of the step."""

    def __init__(self) -> None:
        self._fed: dict[int, tuple[list[int], list[int]]] = {}
        self._sampled: list[tuple[list[int], Tensor]] = []
        self._prompts: list[tuple[int, Tensor]] = []

    def add(
        self,
        indices: Sequence[int],
        members: Sequence[ScheduledSeq],
        batch: Layout,
        prompt_rows: PromptRows,
        logits: Tensor | None,
    ) -> None:
        """Args: indices: of the members in the step, in the order of their rows."""
        token_ids, positions, first = _listed(batch.token_ids), _listed(batch.positions), 0
        for index, seq in zip(indices, members, strict=True):
            tokens, places = self._fed.setdefault(index, ([], []))
            end = first + len(seq.token_ids)
            tokens += token_ids[first:end]
            places += positions[first:end]
            first = end
        if logits is None:
            return
        first = len(batch.sample_seqs)
        if first:
            self._sampled.append(([indices[i] for i in batch.sample_seqs], logits[:first]))
        for i, count in prompt_rows:
            self._prompts.append((indices[i], logits[first : first + count]))
            first += count

    def step(self) -> SampledStep:
        """All of them together. Pieces of a prompt follow each other."""
        self._prompts.sort(key=lambda one: one[0])
        counts: dict[int, int] = {}
        for index, rows in self._prompts:
            counts[index] = counts.get(index, 0) + len(rows)
        logits = [rows for _, rows in (*self._sampled, *self._prompts)]
        order = sorted(self._fed)
        return SampledStep(
            order=order,
            token_ids=[token for index in order for token in self._fed[index][0]],
            positions=[at for index in order for at in self._fed[index][1]],
            sample_seqs=[index for indices, _ in self._sampled for index in indices],
            prompt_rows=list(counts.items()),
            logits=None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits),
        )


class Stage:
    """Args: groups: of the model's KV groups those of this rank, in its own order."""

    def __init__(self, decoder: Decoder, weights: ModelWeights, groups: Sequence[int]) -> None:
        if weights.communicator is None:
            raise InternalError("a stage has other ranks")
        self._decoder, self._groups = decoder, tuple(groups)
        self._communicator = weights.communicator
        self._place = weights.communicator.place
        self._width, self._device = weights.description.hidden_size, weights.embedding.device.type
        self._dtype = torch.float32 if self._device == "cpu" else weights.embedding.dtype
        """Of rows between stages: the compiled kernels keep them in float32, and a stage's end must not round them."""

    @property
    def pipelined(self) -> bool:
        """A step goes through in parts: nobody can be told between two layers how many are done."""
        return self._place.pipeline > 1

    def run(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool] | None = None,
        on_layers: Callable[[int], None] | None = None,
    ) -> SampledStep | None:
        """Compute a step. All ranks do at the same time, with the same sequences; all of the last stage compute all logits.

        Args:
            should_abort: asked between two layers; turns true at the same place on every rank, and with several stages never.
            on_layers: see ModelRunner.on_layers; only called where there is one stage.
        Returns: on the rank that samples what it needs for that; None on others.
        Raises: StepAborted; InternalError when a sequence breaks a promise; RunnerLost. With several stages only RunnerLost: rows
            that a stage has sent, and the next one did not receive, would be taken for those of a later step.
        """
        if not self.pipelined:
            return self._run(seqs, should_abort, on_layers)
        try:
            return self._run(seqs, should_abort, None)
        except RunnerLost:
            raise
        except Exception as error:
            raise RunnerLost(f"rank {self._place.rank} failed in a step of several stages: {error}") from error

    def _run(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool] | None,
        on_layers: Callable[[int], None] | None,
    ) -> SampledStep | None:
        place, out = self._place, _Outputs()
        rows = [len(seq.token_ids) for seq in seqs]
        whole = [seq.num_drafts > 0 for seq in seqs]
        for part in cut_step(rows, micro_batches_of(sum(rows), place.pipeline, self._device), whole):
            members = [self._own(seqs[piece.index], piece) for piece in part]
            # Rows go to the next stage in an order that its back ends keep, too, whichever they are.
            order = kept_order(members)
            members, indices = [members[i] for i in order], [part[i].index for i in order]
            batch = self._decoder.lay_out(members)
            if batch.order != list(range(len(members))):
                raise AssertionError("a back end changed the order of the rows")
            prompt_rows = want_prompt_rows(members, batch)
            x = None
            if not place.first_stage:
                count = sum(len(seq.token_ids) for seq in members)
                x = self._communicator.receive(count, self._width, self._dtype)
            after = self._decoder.forward(batch, should_abort, on_layers, x)
            if not place.last_stage:
                if after is None:
                    raise InternalError("a stage before the last one ended without rows")
                self._communicator.send(after.to(self._dtype))
            elif place.samples:
                out.add(indices, members, batch, prompt_rows, after)
        return out.step() if place.samples else None

    def _own(self, seq: ScheduledSeq, piece: Piece) -> ScheduledSeq:
        """A piece of a sequence's tokens, with the block tables of this rank's groups. Only the last piece samples."""
        count = len(seq.token_ids)
        if piece.end - piece.first < count:
            seq = replace(
                seq,
                token_ids=seq.token_ids[piece.first : piece.end],
                start=seq.start + piece.first,
                sample=seq.sample and piece.end == count,
                prompt_targets=seq.prompt_targets[piece.first : piece.end],
            )
        if len(self._groups) == len(seq.block_tables):
            return seq
        first_blocks = seq.first_blocks
        return replace(
            seq,
            block_tables=tuple(seq.block_tables[group] for group in self._groups),
            first_blocks=tuple(first_blocks[group] for group in self._groups),
        )


def _listed(values: Sequence[int] | Tensor) -> list[int]:
    return list(values) if isinstance(values, list) else values.tolist()  # type: ignore[union-attr]
