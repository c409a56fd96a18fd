"""The choices of one attempt (n, best_of): siblings that share the prompt's blocks and draw apart.

One request computes the prompt and draws every choice's first token; then `fork` makes the siblings. With best_of > n
nothing goes out before all have ended: the likeliest by mean logprob a token are the ones given out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.messages import ChoiceFinished, EngineEvent, Finished, TokenLogprobs, TokensOut
from diptych.engine.sched.output import Finish
from diptych.engine.sched.request import Request


@dataclass(slots=True)
class _Held:
    """What a choice has produced and nobody has seen yet."""

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
        self.members: dict[int, Request] = {}
        """Those that have not ended."""
        self.withholds = sampling.num_choices > sampling.n
        self.first_tokens: dict[int, tuple[int, TokenLogprobs | None]] = {}
        """REMOTE: what prefill drew for each choice, until the KV is here."""
        self.numbers = range(first, first + sampling.num_choices)
        self._num_given = sampling.n
        self._wants_logprobs = sampling.logprobs is not None
        self._held: dict[int, _Held] = {}
        self._ended: dict[int, tuple[Finish, int]] = {}

    def hold(self, choice: int, token: int, text: str, logprobs: TokenLogprobs | None) -> None:
        assert logprobs is not None, "best_of asks the runner for logprobs"
        held = self._held.setdefault(choice, _Held())
        held.token_ids.append(token)
        held.texts.append(text)
        held.logprobs.append(logprobs)

    def ended(self, choice: int, finish: Finish, num_outputs: int, num_cached_tokens: int) -> list[EngineEvent]:
        """Events of a choice's end; with the last one also those of the attempt's."""
        self._ended[choice] = (finish, num_outputs)
        events: list[EngineEvent] = []
        if not self.withholds:
            events.append(_choice_finished(self.attempt, choice, finish, num_outputs))
        if len(self._ended) < len(self.numbers):
            return events
        if self.withholds:
            finish = self._give_out(events)
        total = sum(count for _, count in self._ended.values())
        reason: FinishReason = finish.reason
        events.append(
            Finished(self.attempt, reason, total, num_cached_tokens, finish.stop_string, finish.stop_token_id)
        )
        return events

    def _give_out(self, events: list[EngineEvent]) -> Finish:
        best = sorted(self._held, key=lambda choice: (-self._held[choice].score, choice))[: self._num_given]
        for number, choice in enumerate(best, self.numbers.start):
            held = self._held[choice]
            logprobs = tuple(held.logprobs) if self._wants_logprobs else ()
            events.append(TokensOut(self.attempt, 0, tuple(held.token_ids), "".join(held.texts), number, logprobs))
            events.append(_choice_finished(self.attempt, number, *self._ended[choice]))
        return self._ended[best[0]][0]


def _choice_finished(attempt: str, choice: int, finish: Finish, num_outputs: int) -> ChoiceFinished:
    return ChoiceFinished(attempt, choice, finish.reason, num_outputs, finish.stop_string, finish.stop_token_id)
