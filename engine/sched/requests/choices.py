"""The choices of one attempt (n, best_of): sequences that share the prompt's blocks and are sampled separately.

One request computes the prompt and draws every choice's first token; then the others are forked from it. With best_of >
n nothing is sent before all have ended, and then the likeliest by mean logprob per token are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.common.errors import InternalError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.messages import ChoiceFinished, EngineEvent, Finished, FirstToken, TokenLogprobs, TokensOut
from diptych.engine.sched.requests.output import Finish
from diptych.engine.sched.requests.request import Request

Draws = list[tuple[int, TokenLogprobs | None]]
"""One token for each choice, in the order of their numbers."""


@dataclass(slots=True)
class _Withheld:
    """Output of a choice that was not sent yet."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def score(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


class Choices:
    """Args: first: number of the attempt's first choice."""

    def __init__(self, attempt: str, sampling: SamplingParams, first: int) -> None:
        self.attempt = attempt
        self.withholds = sampling.num_choices > sampling.n
        """Nothing is sent before all choices have ended."""
        self.numbers = range(first, first + sampling.num_choices)
        self._members: dict[int, Request] = {}
        self._num_given = sampling.n
        self._wants_logprobs = sampling.logprobs is not None
        self._first_tokens: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._withheld: dict[int, _Withheld] = {}
        self._ended: dict[int, tuple[Finish, int]] = {}

    @property
    def members(self) -> Mapping[int, Request]:
        """Choices that have not ended, by number."""
        return self._members

    def join(self, request: Request) -> None:
        self._members[request.choice] = request

    def leave(self, request: Request) -> None:
        del self._members[request.choice]

    def add_first_token(self, command: FirstToken) -> None:
        """REMOTE: what prefill drew for one choice. The first one for a choice counts.

        Raises: InternalError for a choice that does not exist, and for best_of without logprobs.
        """
        if command.choice not in self.numbers:
            raise InternalError(f"prefill sent a token of choice {command.choice}, which does not exist")
        if self.withholds and command.logprobs is None:
            raise InternalError("prefill sent a token without logprobs; best_of needs them")
        self._first_tokens.setdefault(command.choice, (command.token_id, command.logprobs))

    @property
    def first_tokens(self) -> Draws | None:
        """REMOTE: those of all choices; None while some are missing."""
        if len(self._first_tokens) < len(self.numbers):
            return None
        return [self._first_tokens[number] for number in self.numbers]

    def withhold(self, choice: int, token_ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprobs, ...]) -> None:
        assert len(logprobs) == len(token_ids), "with best_of the runner returns logprobs"
        withheld = self._withheld.setdefault(choice, _Withheld())
        withheld.token_ids.extend(token_ids)
        withheld.texts.append(text)
        withheld.logprobs.extend(logprobs)

    def finished(self, choice: int, finish: Finish, num_outputs: int, num_cached_tokens: int) -> list[EngineEvent]:
        """Events of a choice's end; with the last choice also those of the attempt's end."""
        self._ended[choice] = (finish, num_outputs)
        events: list[EngineEvent] = []
        if not self.withholds:
            events.append(_choice_finished(self.attempt, choice, finish, num_outputs))
        if len(self._ended) < len(self.numbers):
            return events
        if self.withholds:
            finish = self._send_best(events)
        total = sum(count for _, count in self._ended.values())
        reason: FinishReason = finish.reason
        events.append(
            Finished(self.attempt, reason, total, num_cached_tokens, finish.stop_string, finish.stop_token_id)
        )
        return events

    def _send_best(self, events: list[EngineEvent]) -> Finish:
        withheld = self._withheld
        best = sorted(withheld, key=lambda choice: (-withheld[choice].score, choice))[: self._num_given]
        for number, choice in enumerate(best, self.numbers.start):
            output = withheld[choice]
            logprobs = tuple(output.logprobs) if self._wants_logprobs else ()
            events.append(TokensOut(self.attempt, 0, tuple(output.token_ids), "".join(output.texts), number, logprobs))
            events.append(_choice_finished(self.attempt, number, *self._ended[choice]))
        return self._ended[best[0]][0]


class ChoiceGroups:
    """The attempts with several choices. A group ends with its last member."""

    def __init__(self) -> None:
        self._groups: dict[str, Choices] = {}
        self.withholding = 0
        """Groups with best_of > n: a step looks at this before it looks for a token's group."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._groups

    def open(self, request: Request) -> None:
        """`request` computes the prompt, and is the first choice."""
        group = Choices(request.attempt_id, request.sampling, request.choice)
        self._groups[request.attempt_id] = group
        self.withholding += group.withholds
        group.join(request)
        request.seq.num_draws = request.sampling.num_choices

    def of(self, request: Request) -> Choices | None:
        return self._groups.get(request.attempt_id)

    def members(self, attempt_id: str) -> list[Request]:
        """Those that have not ended; none for an attempt that is no group."""
        group = self._groups.get(attempt_id)
        return [] if group is None else list(group.members.values())

    def leave(self, request: Request) -> None:
        """The request has ended. One that is in no group is ignored."""
        group = self._groups.get(request.attempt_id)
        if group is None:
            return
        group.leave(request)
        if not group.members:
            del self._groups[request.attempt_id]
            self.withholding -= group.withholds


def _choice_finished(attempt: str, choice: int, finish: Finish, num_outputs: int) -> ChoiceFinished:
    return ChoiceFinished(attempt, choice, finish.reason, num_outputs, finish.stop_string, finish.stop_token_id)
