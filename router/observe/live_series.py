"""The router's last minutes, second by second, for the status page and `diptych top`. Pure: `now` is an argument.

Each second keeps counts and at most _KEPT values of each latency, enough for a p95 on a screen. Prometheus has
everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_KEPT = 512
STAGES = ("tokenize", "queue", "prefill", "transfer", "decode", "second_token", "longest_gap")


@dataclass(slots=True)
class _Second:
    at: int
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    failed: int = 0


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest rank; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class LiveSeries:
    """The last `span_s` seconds. `span_s`: seconds that are kept. `requests`: number of last requests whose stages are
    kept."""

    def __init__(self, span_s: int = 180, requests: int = 1000) -> None:
        self._span_s = span_s
        self._seconds: deque[_Second] = deque()
        self._stages: dict[str, deque[float]] = {name: deque(maxlen=requests) for name in STAGES}

    def _second(self, now: float) -> _Second:
        at = int(now)
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(_Second(at))
            while self._seconds[0].at < at - self._span_s:
                self._seconds.popleft()
        return self._seconds[-1]

    def first_token(self, seconds: float, now: float) -> None:
        second = self._second(now)
        if len(second.ttft) < _KEPT:
            second.ttft.append(seconds)

    def tokens(self, count: int, now: float, between_s: float | None = None) -> None:
        """`between_s`: interval before each token; None: they came with the first."""
        second = self._second(now)
        second.tokens += count
        if between_s is not None and len(second.itl) < _KEPT:
            second.itl.extend([between_s] * min(count, _KEPT - len(second.itl)))

    def finished(self, now: float) -> None:
        self._second(now).finished += 1

    def computed(self, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """A prompt, with its first token."""
        second = self._second(now)
        second.prompt_tokens += prompt_tokens
        second.cached_tokens += cached_tokens

    def failed(self, now: float) -> None:
        self._second(now).failed += 1

    def stage(self, name: str, seconds: float) -> None:
        self._stages[name].append(seconds)

    def points(self, now: float) -> list[dict[str, Any]]:
        """One point for each second with events, oldest first; `age_s` is 0 for the present second."""
        return [
            {
                "age_s": int(now) - s.at,
                "ttft_p50": quantile(s.ttft, 0.5),
                "ttft_p95": quantile(s.ttft, 0.95),
                "itl_p50": quantile(s.itl, 0.5),
                "itl_p95": quantile(s.itl, 0.95),
                "tokens": s.tokens,
                "prompt_tokens": s.prompt_tokens,
                "cached_tokens": s.cached_tokens,
                "finished": s.finished,
                "failed": s.failed,
            }
            for s in self._seconds
            if int(now) - s.at <= self._span_s
        ]

    def stages(self) -> dict[str, dict[str, float | int | None]]:
        """Quantiles of each stage of the last requests, in seconds."""
        return {
            name: {"count": len(kept), "p50": quantile(kept, 0.5), "p95": quantile(kept, 0.95)}
            for name, kept in self._stages.items()
        }
