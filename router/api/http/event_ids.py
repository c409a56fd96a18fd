"""The `id:` lines of a stream, and a stream that goes on after one of them.

Each message of the stream gets an id (requests/resume.py): what a caller has that got everything up to and including it.
Several messages that one event makes can be torn apart, too: the id of all but the last names the event and their number.
"""

from __future__ import annotations

from typing import Protocol

from diptych.router.api.openai.choice import Choice
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    PromptLogprobsEvent,
    TokenEvent,
)
from diptych.router.requests.resume import BEGIN, CHOICE_END, END, PROMPT, TOKENS, Seen, SeenChoice, checksum
from diptych.router.requests.seam import ALL, Seam

_BREAK = b"\n\n"


class StreamForm(Protocol):
    """See ResponseFormatter. `sequence`: number of its next message, where they are numbered."""

    sequence: int
    choices: list[Choice]

    def begin(self) -> bytes: ...

    def chunks(self, event: GenerateEvent) -> bytes: ...


class _Got:
    """What the caller got of a choice; see SeenChoice. `text`: as in an id."""

    __slots__ = ("checksum", "num_chars", "num_tokens", "text")

    def __init__(self) -> None:
        self.num_tokens = self.num_chars = self.checksum = 0
        self.text = SeenChoice().text()


class EventIds:
    """The stream of one answer.

    Args:
        ref: of its ids; "": it has none.
        seen: what the caller has; None: nothing.
    """

    def __init__(self, form: StreamForm, ref: str, num_choices: int, seen: Seen | None = None) -> None:
        self._form = form
        self._ref = ref
        self._got = [_Got() for _ in range(num_choices)]
        self._prompt = False
        self._now = ""
        """What the caller has after the last event, as in an id. (Seen.text; made here in a third of the time.)"""
        self._seen = seen
        self._seam = None if seen is None else Seam(seen)
        self._renumbered = seen is None

    def begin(self) -> bytes:
        """The start of the stream; may be empty."""
        out, seen = self._form.begin(), self._seen
        before = self._passed()
        if seen is None:
            return self._marked(out, BEGIN, None, before, 0)
        if seen.step is None or seen.step.kind != BEGIN:
            return b""
        return self._marked(out, BEGIN, None, before, seen.step.parts)

    def chunks(self, event: GenerateEvent) -> bytes:
        """The chunks of the event that the caller does not have; may be empty. Raises: InternalError when a resumed answer is
        another one."""
        if self._seam is None:
            return self._chunks(event, 0) if self._ref else self._form.chunks(event)
        return b"".join(self._chunks(part, drop) for part, drop in self._seam.parts(event))

    def _chunks(self, event: GenerateEvent, drop: int) -> bytes:
        if not self._renumbered and drop != ALL:
            assert self._seen is not None
            self._renumbered, self._form.sequence = True, self._seen.sequence
            self._passed()
        out = self._form.chunks(event)
        kind, got = self._take(event, out)
        before = self._passed()
        return b"" if drop == ALL else self._marked(out, kind, got, before, drop)

    def _passed(self) -> str:
        """The caller got what is taken. Returns: what it had before, as in an id."""
        before, got = self._now, self._got
        choices = got[0].text if len(got) == 1 else "-".join([one.text for one in got])
        self._now = f"{len(got)}-{int(self._prompt)}-{self._form.sequence}-{choices}"
        return before or self._now

    def _take(self, event: GenerateEvent, out: bytes) -> tuple[int, int | None]:
        """Returns: the event's kind, and its choice."""
        if isinstance(event, TokenEvent):
            number, ids = event.choice, event.token_ids
            got, choice = self._got[number], self._form.choices[number]
            got.num_tokens += len(ids)
            got.num_chars += len(event.text)
            got.checksum = checksum(ids, got.checksum)
            if self._seen is not None and got.num_tokens == self._seen.choices[number].num_tokens:
                # They are counted by events, and these come together in another way.
                choice.reasoning_tokens = self._seen.choices[number].num_reasoning
            got.text = f"{got.num_tokens}-{got.num_chars}-{got.checksum}-{choice.reasoning_tokens}-0"
            return TOKENS, number
        if isinstance(event, ChoiceFinishedEvent):
            got = self._got[event.choice]
            got.text = f"{got.text[:-1]}1"
            return CHOICE_END, event.choice
        if isinstance(event, PromptLogprobsEvent):
            self._prompt = self._prompt or bool(out)
            return PROMPT, None
        assert isinstance(event, FinishedEvent)
        return END, None

    def _marked(self, out: bytes, kind: int, number: int | None, before: str, drop: int) -> bytes:
        """Without the first `drop` messages, the others with their ids. `number`: of the choice of the event."""
        if not out:
            return out
        head = f"id: {self._ref}."
        if not drop and self._ref and kind != END and out.find(_BREAK) == len(out) - 2:
            return f"{head}{self._now}\n".encode() + out
        messages = out.split(_BREAK)[:-1]
        if not self._ref:
            return b"".join(message + _BREAK for message in messages[drop:])
        place = (
            (0, 0) if kind != TOKENS or number is None else (self._got[number].num_tokens, self._got[number].num_chars)
        )
        marked = []
        for part, message in enumerate(messages[drop:], drop + 1):
            seen = self._now
            if part < len(messages) or kind == END:
                seen = f"{before}-{kind}-{number or 0}-{place[0]}-{place[1]}-{part}"
            marked.append(f"{head}{seen}\n".encode() + message + _BREAK)
        return b"".join(marked)
