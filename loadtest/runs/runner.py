"""Sends a workload to one target and records the outcome.

    open loop    every session starts at its intended time, whatever the server does
    closed loop  `concurrency` users start the next session when theirs has ended

Turns of one session are sequential: the next one is intended `delay_s` after its predecessor's end, and carries the
real history.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from diptych.loadtest.figures.record import CountedBy, Outcome, RequestRecord, share_out
from diptych.loadtest.figures.stats import dist
from diptych.loadtest.runs.lag import LagProbe, LagReport
from diptych.loadtest.targets.target import Accepted, Ask, Chunk, Ended, Target, TargetError
from diptych.loadtest.virtual_loop import precise_clock
from diptych.loadtest.workloads.items import Message, ToolCall, WorkItem, sessions_of
from diptych.loadtest.workloads.schedule import ClosedLoop, OpenLoop, arrivals

START_DELAY_S = 0.1
"""Seconds between the start and time 0, so that the first sends are not late."""


@dataclass(slots=True)
class Progress:
    """Counters for the live view."""

    total: int = 0
    sent: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    records: list[RequestRecord]
    lag: LagReport
    limited: bool


class Runner:
    """One run against one target. `progress` may be read at any time from the same thread."""

    def __init__(self, target: Target, loop_spec: OpenLoop | ClosedLoop, *, seed: int = 0) -> None:
        self.progress = Progress()
        self._target = target
        self._spec = loop_spec
        self._seed = seed
        self._records: list[RequestRecord] = []
        self._zero = 0.0
        self._now: Callable[[], float] = time.monotonic
        self._slots: asyncio.Semaphore | None = None

    async def run(self, items: Sequence[WorkItem], *, warmup: Sequence[WorkItem] = ()) -> RunResult:
        """Send `warmup` one by one, then the items. Errors of single requests are records, not exceptions. Times of
        warm-up records count from the start of the warm-up."""
        self._now = precise_clock()
        self._records = []
        self._zero = self._now()
        for item in warmup:
            record = await self._send(item, self._now() - self._zero, [], warmup=True)
            self._records.append(record)
        limit = self._spec.max_concurrency if isinstance(self._spec, OpenLoop) else 0
        self._slots = asyncio.Semaphore(limit) if limit else None
        self.progress = Progress(total=len(items), began=self._now())
        probe = LagProbe()
        with _garbage_held():
            self._zero = self._now() + START_DELAY_S
            probe.start()
            try:
                await self._drive(sessions_of(items))
            finally:
                await probe.stop()
        measured = [record for record in self._records if not record.warmup]
        limited = bool(limit) or isinstance(self._spec, ClosedLoop)
        return RunResult(self._records, probe.report(dist(r.send_lag_s for r in measured)), limited)

    async def _drive(self, sessions: dict[str, list[WorkItem]]) -> None:
        async with asyncio.TaskGroup() as group:
            if isinstance(self._spec, ClosedLoop):
                queue = iter(sessions.values())
                for number in range(min(self._spec.concurrency, len(sessions))):
                    group.create_task(self._user(queue), name=f"user {number}")
                return
            for at, turns in self._starts(sessions, self._spec):
                await self._until(at)
                group.create_task(self._session(turns, at), name=f"session {turns[0].session or turns[0].index}")

    def _starts(self, sessions: dict[str, list[WorkItem]], spec: OpenLoop) -> Iterator[tuple[float, list[WorkItem]]]:
        """(intended start, turns), ascending. A trace's times take precedence over the arrival process."""
        drawn = arrivals(spec, len(sessions), Random(f"{self._seed}/arrivals"))
        starts = [
            (at if turns[0].arrival_s is None else turns[0].arrival_s, turns)
            for at, turns in zip(drawn, sessions.values(), strict=True)
        ]
        return iter(sorted(starts, key=lambda start: start[0]))

    async def _user(self, queue: Iterator[list[WorkItem]]) -> None:
        for turns in queue:
            await self._session(turns, max(0.0, self._now() - self._zero))

    async def _session(self, turns: list[WorkItem], intended_s: float) -> None:
        history: list[Ask | str | tuple[int, ...]] = []
        for item in turns:
            await self._until(intended_s)
            if self._slots is not None:
                async with self._slots:
                    record = await self._send(item, intended_s, history, warmup=False)
            else:
                record = await self._send(item, intended_s, history, warmup=False)
            self._records.append(record)
            if len(turns) > 1 and not record.ok:
                self._skip(turns, item, record)
                return
            following = next((other for other in turns if other.turn > item.turn), None)
            intended_s = record.end_s + (following.delay_s if following is not None else 0.0)

    def _skip(self, turns: list[WorkItem], failed: WorkItem, record: RequestRecord) -> None:
        """A failed conversation has no next turn: the rest counts as errors, unless the user cancelled."""
        for item in turns:
            if item.turn <= failed.turn:
                continue
            skipped = self._record(item, record.end_s, warmup=False)
            skipped.sent_s = skipped.end_s = record.end_s
            skipped.outcome = Outcome.CANCELLED if record.outcome is Outcome.CANCELLED else Outcome.ERROR
            skipped.error = f"turn {failed.turn} of its session ended as {record.outcome.value}"
            self._records.append(skipped)
            self.progress.done += 1
            self.progress.failed += skipped.outcome is Outcome.ERROR

    async def _until(self, at: float) -> None:
        wait = self._zero + at - self._now()
        if wait > 0:
            await asyncio.sleep(wait)

    def _record(self, item: WorkItem, intended_s: float, *, warmup: bool) -> RequestRecord:
        return RequestRecord(
            index=item.index,
            target=self._target.label,
            intended_s=intended_s,
            kind=item.kind,
            session=item.session,
            tenant=item.tenant,
            warmup=warmup,
            input_tokens=item.input_tokens,
            wanted_output_tokens=item.output_tokens,
        )

    async def _send(
        self, item: WorkItem, intended_s: float, history: list[Ask | str | tuple[int, ...]], *, warmup: bool
    ) -> RequestRecord:
        now = self._now
        record = self._record(item, intended_s, warmup=warmup)
        ask = with_history(item, history)
        answer = _Answer(record, now, self._zero, self.progress)
        self.progress.sent += 1
        self.progress.running += 1
        record.sent_s = now() - self._zero
        try:
            async with contextlib.aclosing(self._target.send(ask)) as events:
                async for event in events:
                    if answer.on_event(event, item.cancel_after_tokens):
                        record.outcome = Outcome.CANCELLED
                        break
        except TargetError as error:
            record.outcome, record.error, record.status = error.outcome, error.message, error.status
        record.end_s = now() - self._zero
        answer.close(item)
        if item.session:
            history += [ask, answer.said(ask)]
        self.progress.running -= 1
        self.progress.done += 1
        self.progress.failed += record.outcome not in (Outcome.OK, Outcome.CANCELLED)
        return record


class _Answer:
    """Fills a record from the events of its stream."""

    def __init__(self, record: RequestRecord, now: Callable[[], float], zero: float, progress: Progress) -> None:
        self._record = record
        self._now = now
        self._zero = zero
        self._progress = progress
        self._counts: list[int | None] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._ended: Ended | None = None

    def on_event(self, event: Chunk | Accepted | Ended, leave_after: int | None) -> bool:
        """Returns True when the client cancels."""
        at = self._now() - self._zero
        record = self._record
        if isinstance(event, Chunk):
            if not record.chunk_times:
                self._progress.ttfts.append(at - record.intended_s)
            record.chunk_times.append(at)
            self._counts.append(event.num_tokens)
            self._texts.append(event.text)
            self._token_ids.extend(event.token_ids)
            self._progress.tokens += event.num_tokens or 1
            return leave_after is not None and sum(count or 1 for count in self._counts) >= leave_after
        if isinstance(event, Accepted):
            if record.accepted_s is None:
                record.accepted_s = at
            return False
        self._ended = event
        record.outcome = Outcome.OK
        record.finish_reason = event.finish_reason
        record.server = event.server
        return False

    def close(self, item: WorkItem) -> None:
        record, ended = self._record, self._ended
        total = ended.output_tokens if ended is not None else None
        if all(count is not None for count in self._counts) and self._counts:
            record.counted_by = CountedBy.TOKEN_IDS
            record.chunk_tokens = [count or 0 for count in self._counts]
        elif total is not None:
            record.counted_by = CountedBy.USAGE
            record.chunk_tokens = share_out(total, [len(text) for text in self._texts])
        else:
            record.chunk_tokens = [1] * len(self._counts)
        if ended is None and record.outcome is Outcome.ERROR and not record.error:
            record.outcome, record.error = Outcome.CUT, "the stream ended without an end event"
        if ended is not None:
            record.input_tokens = ended.input_tokens if ended.input_tokens is not None else item.input_tokens
            record.cached_tokens = ended.cached_tokens
            if record.counted_by is CountedBy.TOKEN_IDS and total is not None and total != record.output_tokens:
                record.outcome = Outcome.CUT
                record.error = f"usage reports {total} output tokens, {record.output_tokens} arrived"

    def said(self, ask: Ask) -> str | tuple[int, ...]:
        """The answer in the form of the prompt: ids or text."""
        return tuple(self._token_ids) if ask.token_ids else "".join(self._texts)


def with_history(item: WorkItem, history: Sequence[Ask | str | tuple[int, ...]]) -> Ask:
    """The request as sent; a later turn is appended to the session's last request and its answer."""
    token_ids, text, messages = item.token_ids, item.text, item.messages
    if item.follows and len(history) >= 2:
        before, said = history[-2], history[-1]
        assert isinstance(before, Ask)
        if token_ids and isinstance(said, tuple):
            token_ids = before.token_ids + said + token_ids
        elif messages and isinstance(said, str):
            calls: tuple[ToolCall, ...] = ()
            if messages[0].role == "assistant":  # a tool call: its answer is only known now
                calls, messages = messages[0].tool_calls, messages[1:]
            messages = (*before.messages, Message("assistant", said, calls), *messages)
        elif isinstance(said, str):
            text = f"{before.text}{said}\n{text}"
    return Ask(item.output_tokens, token_ids, text, messages, item.tenant, f"bench-{item.index}")


@contextlib.contextmanager
def _garbage_held() -> Iterator[None]:
    """No garbage collection during the measurement; existing objects are exempted from it. What the caller had exempted before
    stays so: afterwards each full collection would walk all that the process has loaded."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
