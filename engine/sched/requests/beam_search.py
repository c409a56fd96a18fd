"""Beam search: which continuations are kept, which answers are finished, when the search ends. Pure: no blocks, no
requests.

    every beam's likeliest next tokens -> all continuations by their score, the best first
        one that ends, among the first `width`      -> finished, scored by score / length ** length_penalty
        the first `width` that do not end           -> the beams of the next step

A score is the sum of log-probabilities over the outputs. A finished answer counts its ending token in its length. The
best `width` finished answers are kept. The rules and their order are those of Hugging Face's beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diptych.common.sampling import EarlyStopping
from diptych.engine.messages import Candidate, TokenLogprobs

Logprobs = tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Child:
    """Beam `parent` continues with `token_id`."""

    parent: int
    token_id: int
    score: float
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """Finished. `score`: with the length penalty."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: Logprobs


class BeamSearch:
    """Beams are named by numbers; it begins with beam `first` and no outputs.

    Args:
        max_outputs: tokens at which every answer ends.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        max_outputs: int,
        end_ids: frozenset[int],
        first: int = 0,
    ) -> None:
        self.width = width
        self.num_candidates = width + len(end_ids)
        """So many of a beam's likeliest tokens suffice: at most len(end_ids) of them end."""
        self.finished: list[Answer] = []
        """The best first; at most `width`."""
        self.done = False
        self._penalty = length_penalty
        self._early = early_stopping
        self._max_outputs = max_outputs
        self._end_ids = end_ids
        self._length = 0
        self._beams: dict[int, tuple[float, Logprobs]] = {first: (0.0, ())}

    def advance(
        self, candidates: Mapping[int, Sequence[Candidate]], outputs: Callable[[int], Sequence[int]]
    ) -> list[Child]:
        """Advance all beams by one token.

        Args:
            candidates: of every beam, the likeliest first.
            outputs: a beam's output tokens so far.
        Returns: the beams of the next step, the best first; number them with `go_on`. None of them when `done`.
        """
        self._length += 1
        open_ended = self._continuations(candidates)
        last = self._length >= self._max_outputs
        children: list[Child] = []
        for rank, child in enumerate(open_ended):
            ends = last or child.token_id in self._end_ids
            if ends and rank < self.width:
                self._finish(child, outputs(child.parent))
            elif not ends and len(children) < self.width:
                children.append(child)
        self.done = not children or self._is_over(children[0].score)
        return [] if self.done else children

    def go_on(self, beams: Mapping[int, Child]) -> None:
        """Args: beams: the children of the last step by their own numbers, the best first."""
        self._beams = {number: (child.score, child.logprobs) for number, child in beams.items()}

    def _continuations(self, candidates: Mapping[int, Sequence[Candidate]]) -> list[Child]:
        out = []
        for number, (score, logprobs) in self._beams.items():
            for candidate in candidates[number]:
                known = (*logprobs, candidate.logprobs) if candidate.logprobs is not None else logprobs
                out.append(Child(number, candidate.token_id, score + candidate.score, known))
        out.sort(key=lambda child: -child.score)  # stable: of equals the better beam's, then the likelier token
        return out

    def _finish(self, child: Child, outputs: Sequence[int]) -> None:
        score = child.score / self._length**self._penalty
        self.finished.append(Answer(score, (*outputs, child.token_id), child.logprobs))
        self.finished.sort(key=lambda answer: -answer.score)
        del self.finished[self.width :]

    def _is_over(self, best_score: float) -> bool:
        """No beam can become better than the finished answers, as `early_stopping` defines it."""
        if len(self.finished) < self.width:
            return False
        if self._early is EarlyStopping.ON:
            return True
        longest = self._early is EarlyStopping.NEVER and self._penalty > 0.0
        length = self._max_outputs if longest else self._length
        bound: float = best_score / length**self._penalty
        return bound <= self.finished[-1].score
