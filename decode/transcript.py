"""What an attempt has sent, kept so that another router can go on with it after its own one has died.

    Attempt --events--> Transcript --> the outbox of its stream
                            |  stream broken: no outbox, it only keeps
                            `--attach(outbox of another stream): everything from the first event on, then live

Bounded: beyond MAX_BYTES of one attempt, or MAX_TOTAL_BYTES of a worker's attempts together, the attempt is no longer kept.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable

from diptych.common.sampling import TokenLogprobs
from diptych.decode.outbox import Events
from diptych.engine.messages import TokensOut
from diptych.rpc.v1 import decode_pb2, types_pb2

MAX_BYTES = 768 * 1024
"""Less than a router buffers of one attempt (1 MiB), so that it can take all of it at once."""
MAX_TOTAL_BYTES = 64 * 1024 * 1024
_TOKEN_BYTES, _LOGPROB_BYTES, _TOP_BYTES, _EVENT_BYTES = 8, 24, 16, 64


class Budget:
    """Bytes of all transcripts of a worker."""

    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self.left = max_bytes


class _Choice:
    __slots__ = ("first_offset", "logprobs", "text", "token_ids")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.token_ids = array("I")
        self.text = io.StringIO()
        self.logprobs: list[TokenLogprobs] = []


class Transcript:
    """An attempt's Events: it passes them on, and keeps them.

    Args:
        outbox: of the attempt's stream; None: it has none.
        on_full: called once, when a bound is exceeded; `whole` is False then and nothing is kept.
    """

    def __init__(self, attempt: str, outbox: Events, budget: Budget, on_full: Callable[[], None]) -> None:
        self._attempt = attempt
        self.outbox: Events | None = outbox
        self._budget = budget
        self._on_full = on_full
        self.whole = True
        self.num_bytes = 0
        self._accepted = False
        self._cached_tokens = 0
        self._choices: dict[int, _Choice] = {}
        self._before: list[types_pb2.PromptLogprobs] = []
        self._after: list[types_pb2.ChoiceFinished] = []
        self._end: decode_pb2.End | None = None

    @property
    def ended_well(self) -> bool:
        return self._end is not None and self._end.HasField("finished")

    def attach(self, outbox: Events) -> None:
        """Send everything so far to `outbox`, and what follows. Only while it is whole."""
        assert self.whole
        attempt, self.outbox = self._attempt, outbox
        if self._accepted:
            outbox.accepted(attempt)
        for entries in self._before:
            outbox.prompt_logprobs(attempt, entries)
        cached_tokens = self._cached_tokens
        for number, choice in self._choices.items():
            ids, text = tuple(choice.token_ids), choice.text.getvalue()
            event = TokensOut(attempt, choice.first_offset, ids, text, number, tuple(choice.logprobs))
            outbox.tokens(event, cached_tokens)
            cached_tokens = 0
        for finished in self._after:
            outbox.choice_finished(attempt, finished)
        if self._end is not None:
            outbox.end(attempt, self._end)

    def drop(self) -> None:
        """Keep nothing any longer. Idempotent."""
        self.whole = False
        self._budget.left += self.num_bytes
        self.num_bytes = 0
        self._choices, self._before, self._after = {}, [], []

    # ---- Events ----

    def accepted(self, attempt: str) -> None:
        self._accepted = True
        if self.outbox is not None:
            self.outbox.accepted(attempt)

    def tokens(self, event: TokensOut, cached_tokens: int = 0) -> None:
        if self.outbox is not None:
            self.outbox.tokens(event, cached_tokens)
        if not self.whole:
            return
        self._cached_tokens = self._cached_tokens or cached_tokens
        choice = self._choices.get(event.choice)
        if choice is None:
            choice = self._choices[event.choice] = _Choice(event.offset)
        choice.token_ids.extend(event.token_ids)
        choice.text.write(event.text)
        size = _TOKEN_BYTES * len(event.token_ids) + len(event.text)
        for entry in event.logprobs:
            choice.logprobs.append(entry)
            size += _LOGPROB_BYTES + _TOP_BYTES * len(entry.top)
        self._grow(size)

    def prompt_logprobs(self, attempt: str, entries: types_pb2.PromptLogprobs) -> None:
        if self.outbox is not None:
            self.outbox.prompt_logprobs(attempt, entries)
        if self.whole:
            self._before.append(entries)
            self._grow(entries.ByteSize() + _EVENT_BYTES)

    def choice_finished(self, attempt: str, finished: types_pb2.ChoiceFinished) -> None:
        if self.outbox is not None:
            self.outbox.choice_finished(attempt, finished)
        if self.whole:
            self._after.append(finished)
            self._grow(_EVENT_BYTES)

    def end(self, attempt: str, end: decode_pb2.End) -> None:
        self._end = end
        if self.outbox is not None:
            self.outbox.end(attempt, end)

    def _grow(self, size: int) -> None:
        self.num_bytes += size
        self._budget.left -= size
        if self.num_bytes > MAX_BYTES or self._budget.left < 0:
            self.drop()
            self._on_full()
