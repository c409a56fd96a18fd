"""One rank's part of a step: its layers of each micro-batch, on the way from the stage before to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.engine.exec.decoder import Decoder
from diptych.engine.exec.parallel.micro_batches import cut_step
from diptych.engine.exec.sampling import PromptRows, want_prompt_rows
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import ScheduledSeq


@dataclass(slots=True)
class SampledStep:
    """A whole step, on the rank that samples: what its micro-batches have put out, in the step's own indices.

    Args:
        order: sequence index of each group of rows; token_ids, positions: of each row.
        sample_seqs, prompt_rows, logits: see sampling.draw_step; None: no logits are wanted.
    """

    order: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sample_seqs: list[int] = field(default_factory=list)
    prompt_rows: PromptRows = field(default_factory=list)
    logits: Tensor | None = None


class Stage:
    """Args: groups: of the model's KV groups those of this rank, in its own order."""

    def __init__(self, decoder: Decoder, weights: ModelWeights, groups: Sequence[int]) -> None:
        if weights.communicator is None:
            raise InternalError("a stage has other ranks")
        self._decoder, self._groups = decoder, tuple(groups)
        self._communicator = weights.communicator
        self._place = weights.communicator.place
        self._width, self._dtype = weights.description.hidden_size, weights.embedding.dtype

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
        Raises: StepAborted; InternalError when a sequence breaks a promise; RunnerLost.
        """
        on_layers = None if self.pipelined else on_layers
        place, out = self._place, SampledStep()
        own = [self._own(seq) for seq in seqs]
        sampled: list[Tensor] = []
        prompts: list[Tensor] = []
        for part in cut_step([len(seq.token_ids) for seq in seqs], place.pipeline):
            members = own[part.start : part.stop]
            batch = self._decoder.lay_out(members)
            prompt_rows = want_prompt_rows(members, batch)
            x = None
            if not place.first_stage:
                rows = sum(len(seq.token_ids) for seq in members)
                x = self._communicator.receive(rows, self._width, self._dtype)
            after = self._decoder.forward(batch, should_abort, on_layers, x)
            if not place.last_stage:
                if after is None:
                    raise InternalError("a stage before the last one ended without rows")
                self._communicator.send(after)
            if not place.samples:
                continue
            out.order += [part.start + i for i in batch.order]
            out.token_ids += _listed(batch.token_ids)
            out.positions += _listed(batch.positions)
            if after is not None:
                out.sample_seqs += [part.start + i for i in batch.sample_seqs]
                out.prompt_rows += [(part.start + i, count) for i, count in prompt_rows]
                sampled.append(after[: len(batch.sample_seqs)])
                prompts.append(after[len(batch.sample_seqs) :])
        if not place.samples:
            return None
        if sampled:
            out.logits = sampled[0] if len(sampled) == 1 and not len(prompts[0]) else torch.cat(sampled + prompts)
        return out

    def _own(self, seq: ScheduledSeq) -> ScheduledSeq:
        """With the block tables of this rank's groups."""
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
