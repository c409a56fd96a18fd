"""Admission control: which requests are refused at once, and which wait behind the others. Pure.

    arrives --least time to the first token beyond its limit--> refused: 529 with Retry-After, before any work
            --predicted in time--> firm: its turn comes in the order of fair_queue.py
            --neither------------> on standby: after all firm ones of its tenant, and only when it is in time after all or a
                                   worker would be idle; refused as soon as it cannot be in time any more

A request is refused only where the *lower bound* of its time to first token is beyond its limit: the prompts that are
certainly computed before it, and its own, at the fastest rates ever seen of the workers (prompt_speeds.py). Nothing that
is cached, in flight with the same prefix (prefixes_in_flight.py), or placed by other routers counts. A prediction only
orders requests. Without the order, an overloaded queue would keep every request just until it is too late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from diptych.common.errors import ConfigError, OverloadedError

MODES = ("off", "shadow", "on")
SLACK_S = 0.25
"""Part of the bound that does not count: news of caches and of other routers are as old."""
_WEIGHT = 0.05
_LEAST_SEEN = 30
_DEVIATIONS = 2.0
_LEAST_S = 1e-3
_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 30.0
_PROBES = 0.01
"""Refused requests that are admitted all the same, for each admitted one: they would show wrong refusals."""


@dataclass(slots=True)
class Calibration:
    """The relation of observed to predicted values of one quantity: mean and deviation of the log ratio, exponentially
    weighted."""

    num_seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def on_seen(self, predicted_s: float, seen_s: float) -> None:
        ratio = math.log(max(seen_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        self.num_seen += 1
        weight = max(_WEIGHT, 1.0 / self.num_seen)
        off = ratio - self.mean
        self.mean += weight * off
        self.variance = (1.0 - weight) * (self.variance + weight * off * off)

    def band(self, predicted_s: float) -> tuple[float, float]:
        """(low, high) in seconds; unbounded while there are too few observations."""
        if self.num_seen < _LEAST_SEEN:
            return 0.0, math.inf
        predicted_s, wide = max(predicted_s, _LEAST_S), _DEVIATIONS * math.sqrt(self.variance)
        return predicted_s * math.exp(self.mean - wide), predicted_s * math.exp(self.mean + wide)

    def safely(self, predicted_s: float) -> float:
        """The high end of the band; the prediction itself while there are too few observations."""
        return predicted_s if self.num_seen < _LEAST_SEEN else self.band(predicted_s)[1]


@dataclass(slots=True)
class FirstTokenLimit:
    """When a request needs its first token, on the router's clock.

    Args:
        at: its deadline, or the target of --max-ttft-s if that is earlier.
        aim: the same, less the expected time of its answer.
        certain: prompt tokens that have to be computed for it in any case.
        excused: it would have been refused, and may still wait until then: it shows whether that would have been wrong.
    """

    at: float
    aim: float
    certain: int = 0
    excused: bool = False


class Verdict(Enum):
    ADMITTED = "admitted"
    WOULD_REFUSE = "would_refuse"
    """Admitted all the same: shadow mode, or a sample that would show wrong refusals."""
    REFUSED = "refused"


@dataclass(slots=True)
class AdmissionDecision:
    """The decision about one request. Times in seconds from its arrival, 0.0: no prediction.

    Args:
        bound_s: lower bound of its time to first token.
        ttft_s: predicted, uncalibrated; tpot_s: per token.
        ttft_limit_s: when it needs its first token.
    """

    verdict: Verdict
    bound_s: float
    ttft_s: float
    tpot_s: float
    ttft_limit_s: float
    error: OverloadedError | None = None


@dataclass(slots=True)
class Admission:
    """Decides about requests, and learns from answers.

    Args:
        mode: "off", "shadow" (refuses none, and counts those that it would have refused) or "on".
        max_ttft_s: target for the first token, from arrival; 0: the request's deadline.
        max_tpot_s: target for the time per token after it; 0: none. A request is refused where even the low end of the
            band of predictions is beyond it.
    Raises: ConfigError.
    """

    mode: str = "on"
    max_ttft_s: float = 0.0
    max_tpot_s: float = 0.0
    ttft: Calibration = field(default_factory=Calibration)
    tpot: Calibration = field(default_factory=Calibration)
    answer_tokens: float = 0.0
    answer_tpot_s: float = 0.0
    """Means of answers, exponentially weighted."""
    probes: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("admission", self.mode, f"must be one of {', '.join(MODES)}")

    def limit(self, arrived: float, deadline: float, max_tokens: int) -> FirstTokenLimit | None:
        """Of a request; None: nothing is decided about requests."""
        if self.mode == "off":
            return None
        answer_s = min(max_tokens, self.answer_tokens) * self.answer_tpot_s
        at = min(deadline, arrived + self.max_ttft_s) if self.max_ttft_s else deadline
        return FirstTokenLimit(at, min(at, deadline - answer_s))

    def in_time(self, predicted_s: float, limit: FirstTokenLimit, now: float) -> bool:
        """Whether a first token that is predicted so long from now will probably be in time."""
        return now + self.ttft.safely(predicted_s) <= limit.aim

    def judge(
        self,
        bound_s: float,
        ttft_s: float,
        limit_s: float,
        tpot_s: float = 0.0,
        *,
        retry_s: float = 0.0,
        excused: bool = False,
        is_over: bool = False,
    ) -> AdmissionDecision:
        """Decide about one request; see AdmissionDecision for the times. `retry_s`: until what is ahead of it will be
        computed. `excused`: see FirstTokenLimit. `is_over`: its time has passed."""
        judgement = AdmissionDecision(Verdict.ADMITTED, bound_s, ttft_s, tpot_s, limit_s)
        if self.mode == "off":
            return judgement
        low_tpot = self.tpot.band(tpot_s)[0] if tpot_s and self.max_tpot_s else 0.0
        if bound_s <= limit_s and low_tpot <= (self.max_tpot_s or math.inf):
            return judgement
        if self.mode == "shadow" or (not is_over and (excused or self.probes >= 1.0)):
            if self.mode == "on" and not excused:
                self.probes = 0.0
            judgement.verdict = Verdict.WOULD_REFUSE
            return judgement
        judgement.verdict = Verdict.REFUSED
        what = f"the first token in {bound_s:.2g} s or later, {limit_s:.2g} s are allowed"
        if bound_s <= limit_s:
            what = f"a token every {low_tpot:.2g} s or slower, {self.max_tpot_s:.2g} s are allowed"
        retry_after_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, retry_s, bound_s - limit_s))
        judgement.error = OverloadedError(f"shed before any work: {what}", retry_after_s=retry_after_s)
        return judgement

    def on_first_token(self, judgement: AdmissionDecision, seen_s: float) -> bool | None:
        """`seen_s`: from arrival. Returns whether a refusal would have been wrong; None: it would not have been
        refused."""
        if judgement.ttft_s:
            self.ttft.on_seen(judgement.ttft_s, seen_s)
        if judgement.verdict is not Verdict.WOULD_REFUSE:
            self.probes = min(1.0, self.probes + _PROBES)
            return None
        return seen_s <= judgement.ttft_limit_s

    def on_answer(self, judgement: AdmissionDecision, tokens: int, seconds: float) -> None:
        """An answer of one choice ended well. `seconds`: after its first token."""
        weight = _WEIGHT if self.answer_tokens else 1.0
        self.answer_tokens += weight * (tokens - self.answer_tokens)
        if tokens > 1:
            pace_s = seconds / (tokens - 1)
            self.answer_tpot_s += (_WEIGHT if self.answer_tpot_s else 1.0) * (pace_s - self.answer_tpot_s)
            if judgement.tpot_s:
                self.tpot.on_seen(judgement.tpot_s, pace_s)
