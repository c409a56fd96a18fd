"""A step through the whole model, by one back end or by several that take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diptych.engine.exec.backends.base import Hooks, Layout, Segment
from diptych.engine.exec.backends.base import Runtime as BackendRuntime
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.loading import PlacedModel
from diptych.engine.messages import ScheduledSeq


@dataclass(slots=True)
class _MixedLayout:
    """Implements Layout. parts: of each runtime, all with the same rows."""

    order: list[int]
    token_ids: Any
    positions: Any
    sample_rows: list[int]
    sample_seqs: list[int]
    parts: list[Any]


def kept_order(seqs: Sequence[ScheduledSeq]) -> list[int]:
    """The order of sequences that every back end keeps: single tokens first, the longest context first, then rows with drafts,
    then chunks."""

    def place(i: int) -> tuple[int, int]:
        count, drafts = len(seqs[i].token_ids), seqs[i].num_drafts
        return (0, -seqs[i].start) if count == 1 else (1 if count == 1 + drafts else 2, 0)

    return sorted(range(len(seqs)), key=place)


class Decoder:
    """Weights and KV pool as the back ends of the plan see them."""

    def __init__(self, model: PlacedModel, pool: KvPool, *, max_model_len: int) -> None:
        made: dict[str, int] = {}
        self._runtimes: list[BackendRuntime] = []
        self._segments: list[tuple[int, Segment]] = []
        for backend, segment in model.plan.segments():
            if backend.name not in made:
                made[backend.name] = len(self._runtimes)
                self._runtimes.append(backend.runtime(model.weights, pool, max_model_len))
            self._segments.append((made[backend.name], segment))

    def lay_out(self, seqs: Sequence[ScheduledSeq]) -> Layout:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        if len(self._runtimes) == 1:
            layout: Layout = self._runtimes[0].lay_out(seqs)
            return layout

        order = kept_order(seqs)
        parts = [runtime.lay_out([seqs[i] for i in order]) for runtime in self._runtimes]
        first = parts[0]
        for part in parts:
            if part.order != list(range(len(order))):
                raise AssertionError("a back end changed the order of the rows")
            part.sample_rows = first.sample_rows  # one list: more rows may be appended
        sample_seqs = [order[i] for i in first.sample_seqs]
        return _MixedLayout(order, first.token_ids, first.positions, first.sample_rows, sample_seqs, parts)

    def forward(
        self,
        layout: Layout,
        should_abort: Callable[[], bool] | None,
        on_layers: Callable[[int], None] | None = None,
        x: Tensor | None = None,
    ) -> Tensor | None:
        """Compute the step's tokens and store their KV.

        Args:
            on_layers: told between two layers how many are done.
            x: what the pipeline stage before has computed, [num_rows, hidden_size]; None: this is the first one.
        Returns: logits of layout.sample_rows, [num_samples, vocab_size] in the model's dtype; None when there are none. Of a
            stage before the last one [num_rows, hidden_size], for the next stage.
        Raises: StepAborted when should_abort() turned true between two layers.
        """
        hooks = Hooks(should_abort, on_layers)
        parts = layout.parts if isinstance(layout, _MixedLayout) else [layout]
        for runtime, part in zip(self._runtimes, parts, strict=True):
            runtime.begin(part)
        for i, segment in self._segments:
            x = self._runtimes[i].run(x, parts[i], segment, hooks)
            if x is None:
                return None
        return x
