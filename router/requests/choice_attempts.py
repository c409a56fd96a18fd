"""The choices of a moved answer, each an attempt of its own that continues after the choice's tokens, as one attempt.

    Accepted of the first     -> Accepted
    Tokens                    -> Tokens, of the same choice
    End, finished, of a choice -> ChoiceFinished; after the last one also End, with the usage of all choices
    End, failed; a lost stream -> the same; the caller cancels the rest

A request with n > 1 shares one prompt and draws the first tokens of all choices together. After that the choices have
nothing in common, so each can be forced through its own tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from diptych.common.errors import DiptychError, InternalError
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2


class EventSource(Protocol):
    """See Attempt of router/cluster/decode_stream.py."""

    id: str

    async def next(self) -> decode_pb2.Event: ...

    @property
    def has_event(self) -> bool: ...

    def interrupt(self, error: DiptychError) -> None: ...

    def cancel(self) -> None: ...


class ChoiceAttempts:
    """They, read as one.

    Args:
        parts: by choice; at least one.
        num_ended_tokens: of the choices that had ended before.
        release: called with the id of each attempt once it is over or cancelled; `first_tokens`: once it has sent tokens.
    """

    def __init__(
        self,
        parts: Mapping[int, EventSource],
        num_ended_tokens: int,
        *,
        release: Callable[[str], object],
        first_tokens: Callable[[str], object],
    ) -> None:
        self.id = next(iter(parts.values())).id
        self._parts = dict(parts)
        self._waiting: dict[asyncio.Task[decode_pb2.Event], int] = {}
        self._num_tokens = num_ended_tokens
        self._release = release
        self._first_tokens = first_tokens
        self._accepted = False
        self._decoding: set[int] = set()
        self._ready: deque[decode_pb2.Event] = deque()

    @property
    def has_event(self) -> bool:
        return bool(self._ready)

    async def next(self) -> decode_pb2.Event:
        """The next event of any choice; for one reader. Raises: as the attempts; InternalError for a violation of the
        protocol."""
        while not self._ready:
            for choice, part in self._parts.items():
                if choice not in self._waiting.values():
                    self._waiting[asyncio.ensure_future(part.next())] = choice
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=self._waiting.__getitem__):
                choice = self._waiting.pop(task)
                self._take(choice, task.result())
        return self._ready.popleft()

    def _take(self, choice: int, event: decode_pb2.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            if not self._accepted:
                self._ready.append(event)
            self._accepted = True
        elif kind == "tokens":
            if event.tokens.choice != choice:
                raise InternalError(f"decode sent tokens of choice {event.tokens.choice} in place of {choice}")
            if choice not in self._decoding:
                self._decoding.add(choice)
                self._first_tokens(self._parts[choice].id)
                event.cached_tokens = 0  # the prompt was counted with the answer's first tokens
            self._ready.append(event)
        elif kind == "end" and not event.end.HasField("failure"):
            self._end(choice, event)
        else:
            self._ready.append(event)

    def _end(self, choice: int, event: decode_pb2.Event) -> None:
        part, finished = self._parts.pop(choice), event.end.finished
        self._release(part.id)
        tokens = finished.usage.completion_tokens
        self._num_tokens += tokens
        self._ready.append(decode_pb2.Event(attempt=part.id, choice_finished=_choice_finished(choice, finished)))
        if not self._parts:
            finished.usage.completion_tokens = self._num_tokens
            self._ready.append(event)

    def interrupt(self, error: DiptychError) -> None:
        """Let `next` raise the error."""
        for part in self._parts.values():
            part.interrupt(error)

    def cancel(self) -> None:
        """Leave. Idempotent, never blocks."""
        for task in self._waiting:
            if not task.cancel() and not task.cancelled():
                task.exception()  # read: all choices of a lost worker fail, and one reports it
        self._waiting = {}
        parts, self._parts = self._parts, {}
        for part in parts.values():
            part.cancel()
            self._release(part.id)


def _choice_finished(choice: int, finished: router_pb2.Finished) -> types_pb2.ChoiceFinished:
    ended = types_pb2.ChoiceFinished(
        choice=choice,
        finish_reason=finished.finish_reason,
        stop_string=finished.stop_string,
        completion_tokens=finished.usage.completion_tokens,
    )
    if finished.HasField("stop_token_id"):
        ended.stop_token_id = finished.stop_token_id
    return ended
