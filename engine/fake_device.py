"""A fake runner with a device: launched steps are computed as late as a device may compute them, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import BlockCopy, LoadedAdapter, ScheduledSeq, StepResult


class FakeDeviceRunner(FakeRunner):
    """A ModelRunner that runs ahead. Draws that depend on history use the tokens that `draw` found there: a plan that
    runs ahead of its tokens fails. A step is computed when its result is read, or when something else is due that a
    device does
    in the same order: another step's result, execute, copies, pack. `unpack` writes at once, as a copy beside the steps
    does: a block that a step on the device reads or writes must not have another owner by then."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16, **options: object) -> None:
        super().__init__(num_blocks, block_size, **options)  # type: ignore[arg-type]
        self.steps_ahead = True
        self.launches = self.most_in_flight = 0
        self._queue: deque[_FakeStep] = deque()
        self._last: _FakeStep | None = None

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> _FakeStep:
        frozen = [
            replace(s, token_ids=list(s.token_ids), block_tables=tuple(map(list, s.block_tables)), memo=None)
            for s in seqs
        ]
        step = _FakeStep(self, frozen, list(sources), self._last)
        self._queue.append(step)
        self._last = step
        self.launches += 1
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return step

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        self.catch_up()
        return super().execute(seqs, should_abort)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.catch_up()
        super().copy_blocks(copies)

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        self.catch_up()
        super().install_adapter(slot, adapter, parts)

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: memoryview, layers: range | None = None, group: int = 0
    ) -> int:
        self.catch_up()
        return super().pack(block_ids, num_tokens, out, layers, group)

    def catch_up(self, until: _FakeStep | None = None) -> None:
        """Compute what was launched, up to and with `until`."""
        while self._queue:
            step = self._queue.popleft()
            step.compute()
            if step is until:
                return

    def compute(self, seqs: Sequence[ScheduledSeq]) -> StepResult:
        return super().execute(seqs)


class _FakeStep:
    def __init__(
        self, runner: FakeDeviceRunner, seqs: list[ScheduledSeq], sources: list[int], before: _FakeStep | None
    ) -> None:
        self._runner, self._seqs, self._sources, self._before = runner, seqs, sources, before
        self._result: StepResult | Exception | None = None
        self._drawn = False
        self._draw_error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._draw_error is not None

    def fail_with(self, error: Exception) -> None:
        """Simulate that its draws could not be sent."""
        self._draw_error = error

    def draw(self, ended: Container[int] = ()) -> None:
        self._drawn = True
        for i, seq in enumerate(self._seqs):
            if seq.history is None:
                continue
            if i in ended:
                seq.history = seq.grammar = None
                continue
            seq.history = list(seq.history)
            known = seq.start + len(seq.token_ids)
            assert not seq.sample or len(seq.history) == known, (
                "drawn before its last token was known, or after the next one"
            )

    def done(self) -> bool:
        return self._result is not None

    def compute(self) -> None:
        assert self._drawn, "computed before its draws were sent"
        drawn: list[tuple[int, ...]] = []
        if any(source >= 0 for source in self._sources):
            assert self._before is not None, "nothing was launched before"
            before = self._before._result
            drawn = before.token_ids if isinstance(before, StepResult) else [()] * len(self._before._seqs)
        self._before = None  # a chain of all steps would stay alive otherwise
        for seq, source in zip(self._seqs, self._sources, strict=False):
            if source >= 0:
                seq.token_ids = [
                    drawn[source][0] if drawn[source] else 0
                ]  # no token: its request ends, and does not count
        try:
            self._result = self._runner.compute(self._seqs)
        except Exception as error:
            self._result = error

    def result(self) -> StepResult:
        if self._result is None:
            self._runner.catch_up(self)
        if self._draw_error is not None:
            raise self._draw_error
        assert self._result is not None
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
