"""Where the stream that a caller has ends and the one that it gets begins. Pure.

A resumed answer comes again from its first token, so that everything that depends on its tokens (splitters of reasoning and
tool calls, offsets, counts) comes to be what it was. The seam says of each event how much of what it makes the caller has.

    tokens:   0 ......... seen ....... step ...........
              ALL          |  parts of  |  nothing
                           |  one event |
An event that lies across one of these places is cut there. The text goes by characters: how many of them were certain after
how many tokens does not depend on how the tokens came together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from diptych.common.errors import InternalError
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    PromptLogprobsEvent,
    TokenEvent,
)
from diptych.router.requests.resume import CHOICE_END, END, PROMPT, TOKENS, Seen, SeenChoice, checksum

ALL = -1
"""Everything that the event makes."""


@dataclass(slots=True)
class _Place:
    """Up to `num_tokens` and `num_chars` the caller has `drop` messages; `at_once`: of one event."""

    num_tokens: int
    num_chars: int
    drop: int
    at_once: bool = False


@dataclass(slots=True)
class _Choice:
    """How far a choice has come, and the places still ahead."""

    seen: SeenChoice
    places: list[_Place]
    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    held: list[TokenEvent] = field(default_factory=list)


class Seam:
    """The seam of one answer. `seen`: what the caller has."""

    def __init__(self, seen: Seen) -> None:
        self._seen, self._step = seen, seen.step
        self._choices = [_Choice(one, [_Place(one.num_tokens, one.num_chars, ALL)]) for one in seen.choices]
        if (step := self._step) is not None and step.kind == TOKENS:
            ahead = _Place(step.num_tokens, step.num_chars, step.parts, at_once=True)
            self._choices[step.choice].places.append(ahead)

    def parts(self, event: GenerateEvent) -> Iterator[tuple[GenerateEvent, int]]:
        """The events to feed in its place, and how many messages of each the caller has, from the first one on. Raises:
        InternalError when the answer is not the one that the caller has."""
        if isinstance(event, TokenEvent):
            yield from self._tokens(self._of(event.choice), event)
        elif isinstance(event, ChoiceFinishedEvent):
            choice = self._of(event.choice)
            self._check_past(choice)
            yield event, ALL if choice.seen.ended else self._parts_of(CHOICE_END, event.choice)
        elif isinstance(event, PromptLogprobsEvent):
            yield event, ALL if self._seen.prompt else self._parts_of(PROMPT, 0)
        elif isinstance(event, FinishedEvent):
            for choice in self._choices:
                self._check_past(choice)
            yield event, self._parts_of(END, 0)
        else:
            yield event, ALL

    def _parts_of(self, kind: int, choice: int) -> int:
        step = self._step
        return step.parts if step is not None and (step.kind, step.choice) == (kind, choice) else 0

    def _of(self, number: int) -> _Choice:
        if number >= len(self._choices):
            raise InternalError(f"choice {number} arrived, but {len(self._choices)} were requested")
        return self._choices[number]

    @staticmethod
    def _check_past(choice: _Choice) -> None:
        """A choice has ended."""
        if any((place.num_tokens, place.num_chars) != (choice.num_tokens, choice.num_chars) for place in choice.places):
            raise _other_answer()

    def _tokens(self, choice: _Choice, event: TokenEvent) -> Iterator[tuple[TokenEvent, int]]:
        if event.offset > choice.num_tokens == 0 and event.offset == choice.seen.num_tokens:
            # The answer goes on after these tokens, and does not come again.
            choice.num_tokens, choice.num_chars = choice.seen.num_tokens, choice.seen.num_chars
            choice.checksum = choice.seen.checksum
        if choice.held:
            event = _joined([*choice.held, event])
            choice.held = []
        while choice.places:
            place = choice.places[0]
            tokens, chars = place.num_tokens - choice.num_tokens, place.num_chars - choice.num_chars
            if tokens > len(event.token_ids) or chars > len(event.text):
                if len(event.token_ids) > tokens or len(event.text) > chars:
                    raise _other_answer()
                if place.at_once:
                    choice.held = [event]
                else:
                    yield self._passed(choice, event), ALL
                return
            if tokens < 0 or chars < 0:
                raise _other_answer()
            head, event = _cut(event, tokens, chars)
            choice.places.pop(0)
            self._passed(choice, head)
            if place.drop == ALL and choice.checksum != choice.seen.checksum:
                raise _other_answer()
            if head.token_ids or head.text:
                yield head, place.drop
            if not (event.token_ids or event.text):
                return
        yield self._passed(choice, event), 0

    @staticmethod
    def _passed(choice: _Choice, event: TokenEvent) -> TokenEvent:
        choice.num_tokens += len(event.token_ids)
        choice.num_chars += len(event.text)
        choice.checksum = checksum(event.token_ids, choice.checksum)
        return event


def _cut(event: TokenEvent, tokens: int, chars: int) -> tuple[TokenEvent, TokenEvent]:
    head = replace(event, token_ids=event.token_ids[:tokens], text=event.text[:chars], logprobs=event.logprobs[:tokens])
    tail = replace(
        event,
        offset=event.offset + tokens,
        token_ids=event.token_ids[tokens:],
        text=event.text[chars:],
        logprobs=event.logprobs[tokens:],
        cached_tokens=0,
    )
    return head, tail


def _joined(events: list[TokenEvent]) -> TokenEvent:
    first = events[0]
    return replace(
        first,
        token_ids=tuple(token for event in events for token in event.token_ids),
        text="".join(event.text for event in events),
        logprobs=tuple(entry for event in events for entry in event.logprobs),
    )


def _other_answer() -> InternalError:
    return InternalError("the answer that goes on is not the one that was begun")
