"""The `id:` lines of a stream, and a stream that goes on after one of them.

Each message of the stream gets an id (requests/resume.py): what a caller has that got everything up to and including it.
Several messages that one event makes can be torn apart, too: the id of all but the last names the event and their number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from diptych.router.api.openai_choice import Choice
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    PromptLogprobsEvent,
    TokenEvent,
)
from diptych.router.requests.resume import BEGIN, CHOICE_END, END, PROMPT, TOKENS, Seen, SeenChoice, Step, checksum
from diptych.router.requests.seam import ALL, Seam

_BREAK = b"\n\n"


class StreamForm(Protocol):
    """See ResponseFormatter. `sequence`: number of its next message, where they are numbered."""

    sequence: int
    choices: list[Choice]

    def begin(self) -> bytes: ...

    def chunks(self, event: GenerateEvent) -> bytes: ...


class EventIds:
    """The stream of one answer.

    Args:
        ref: of its ids; "": it has none.
        seen: what the caller has; None: nothing.
    """

    def __init__(self, form: StreamForm, ref: str, num_choices: int, seen: Seen | None = None) -> None:
        self._form = form
        self._ref = ref
        self._choices = [SeenChoice()] * num_choices
        self._prompt = False
        self._seen = seen
        self._seam = None if seen is None else Seam(seen)
        self._renumbered = seen is None

    def begin(self) -> bytes:
        """The start of the stream; may be empty."""
        seen = self._seen
        if seen is None:
            return self._marked(self._form.begin(), Step(BEGIN, 0, 0, 0, 1), self._now(), 0)
        if seen.step is None or seen.step.kind != BEGIN:
            self._form.begin()
            return b""
        return self._marked(self._form.begin(), Step(BEGIN, 0, 0, 0, 1), self._now(), seen.step.parts)

    def chunks(self, event: GenerateEvent) -> bytes:
        """The chunks of the event that the caller does not have; may be empty. Raises: InternalError when a resumed answer is
        another one."""
        if self._seam is None:
            return self._chunks(event, 0)
        return b"".join(self._chunks(part, drop) for part, drop in self._seam.parts(event))

    def _chunks(self, event: GenerateEvent, drop: int) -> bytes:
        if not self._renumbered and drop != ALL:
            assert self._seen is not None
            self._renumbered, self._form.sequence = True, self._seen.sequence
        if not self._ref and not self._seam:
            return self._form.chunks(event)
        before = self._now()
        out = self._form.chunks(event)
        step = self._pass(event, out)
        return b"" if drop == ALL else self._marked(out, step, before, drop)

    def _now(self) -> Seen:
        return Seen(tuple(self._choices), self._prompt, self._form.sequence)

    def _pass(self, event: GenerateEvent, out: bytes) -> Step:
        """The caller has got this event. Returns: its first message as a step."""
        if isinstance(event, TokenEvent):
            number, before = event.choice, self._choices[event.choice]
            tokens, chars = before.num_tokens + len(event.token_ids), before.num_chars + len(event.text)
            summed, choice = checksum(event.token_ids, before.checksum), self._form.choices[number]
            if self._seen is not None and tokens == self._seen.choices[number].num_tokens:
                # They are counted by events, and these come together in another way.
                choice.reasoning_tokens = self._seen.choices[number].num_reasoning
            self._choices[number] = SeenChoice(tokens, chars, summed, choice.reasoning_tokens)
            return Step(TOKENS, number, tokens, chars, 1)
        if isinstance(event, ChoiceFinishedEvent):
            number, before = event.choice, self._choices[event.choice]
            self._choices[number] = replace(before, ended=True)
            return Step(CHOICE_END, number, 0, 0, 1)
        if isinstance(event, PromptLogprobsEvent):
            self._prompt = self._prompt or bool(out)
            return Step(PROMPT, 0, 0, 0, 1)
        assert isinstance(event, FinishedEvent)
        return Step(END, 0, 0, 0, 1)

    def _marked(self, out: bytes, step: Step, before: Seen, drop: int) -> bytes:
        """Without the first `drop` messages, the others with their ids."""
        if not out:
            return out
        messages = out.split(_BREAK)[:-1]
        if not self._ref:
            return b"".join(message + _BREAK for message in messages[drop:])
        marked = []
        for number, message in enumerate(messages[drop:], drop + 1):
            if number < len(messages) or step.kind == END:
                parts = Step(step.kind, step.choice, step.num_tokens, step.num_chars, number)
                seen = Seen(before.choices, before.prompt, before.sequence, parts)
            else:
                seen = self._now()
            marked.append(f"id: {self._ref}.{seen.text()}\n".encode() + message + _BREAK)
        return b"".join(marked)
