"""How fast prompts are computed: the expected time of a queue, and the least time that a prompt or a queue can take. Pure.

The least time follows from the fastest that a worker has been seen to be: the highest rate of its leases or of a prompt
of about this length, whichever is more, times HEADROOM. While no prompts of a length have been seen there is no bound
for them: a rate of short prompts says little about long ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

HEADROOM = 1.5
"""A worker computes no faster than this times the fastest that was seen of it."""
MIN_SEEN = 8
"""Prompts of a length before it has a bound."""
_MOST_ABSENT = 8
_FADES = 0.999
"""Of a seen rate, with each further prompt: an outlier is forgotten within some thousands."""


@dataclass(slots=True)
class _Worker:
    """Highest rates in tokens/s. reported: of its leases; seen: of prompts, by the bits of their length."""

    reported: float = 0.0
    seen: dict[int, float] = field(default_factory=dict)

    @property
    def most(self) -> float:
        return max(self.reported, *self.seen.values(), 0.0)


class PromptSpeeds:
    """The speeds of all workers of a model that may compute prompts."""

    def __init__(self) -> None:
        self.expected = 0.0
        """Prompt tokens per second of the workers that prompts are placed on, together; 0.0: nothing was measured."""
        self._num_expected = 0
        self._workers: dict[str, _Worker] = {}
        self._seen: Counter[int] = Counter()
        """Prompts by the bits of their length."""

    def set_rates(self, expected: Mapping[str, float], reported: Mapping[str, float]) -> None:
        """Tokens per second by worker: of those that prompts are placed on, and as reported by all usable ones. Workers
        that were usable before still count for the least times: they may come back."""
        self.expected = sum(expected.values())
        self._num_expected = len(expected)
        for name, rate in reported.items():
            worker = self._workers.setdefault(name, _Worker())
            worker.reported = max(rate, worker.reported)
        absent = [name for name in self._workers if name not in reported]
        for name in absent[: max(0, len(absent) - len(reported) - _MOST_ABSENT)]:
            del self._workers[name]

    def on_computed(self, worker_id: str, tokens: int, seconds: float) -> None:
        """A prompt's uncached tokens were computed; `seconds`: from its placement to its first token."""
        worker = self._workers.get(worker_id)
        if worker is None or tokens <= 0 or seconds <= 0:
            return
        size = tokens.bit_length()
        self._seen[size] += 1
        worker.seen[size] = max(tokens / seconds, worker.seen.get(size, 0.0) * _FADES)

    def is_known(self, tokens: int) -> bool:
        """Whether prompts of about this length have a bound."""
        return self._seen[tokens.bit_length()] >= MIN_SEEN

    def expected_s(self, tokens: int) -> float:
        """To compute a prompt, alone on a worker; 0.0: nothing was measured."""
        return tokens * self._num_expected / self.expected if self.expected else 0.0

    def least_s(self, tokens: int) -> float:
        """The least time to compute a prompt of `tokens`."""
        most = max((worker.most for worker in self._workers.values()), default=0.0)
        return tokens / (HEADROOM * most) if most and self.is_known(tokens) else 0.0

    def least_queue_s(self, tokens: float, largest: int, window_s: float) -> float:
        """The least time until the last of waiting prompts is let in: all workers compute at their fastest, and are given
        `window_s` of work and one prompt more ahead. `tokens`: of all of them; `largest`: of one."""
        most = sum(worker.most for worker in self._workers.values())
        if not most:
            return 0.0
        ahead = window_s * most + largest * len(self._workers)
        return max(0.0, tokens - ahead) / (HEADROOM * most)
