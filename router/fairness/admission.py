"""Admission control: whether a request should start, by its predicted first token and pace, with a learned band. Pure.

    predicted --calibration--> (low, high) --low beyond the target--> rejected at once, before any prefill
                                            --in shadow mode----------> admitted, and compared with the outcome

The band is that of the log ratio of observed to predicted (exponentially weighted mean and deviation). Nothing is
rejected before there are enough observations. A few rejected requests are admitted anyway, to measure false rejections.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum

from diptych.common.errors import ConfigError, OverloadedError

MODES = ("off", "shadow", "on")
_WEIGHT = 0.05
_LEAST_SEEN = 30
_DEVIATIONS = 2.0
_PROBE_RATE = 0.05
_LEAST_S = 1e-3
_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 30.0


@dataclass(slots=True)
class Calibration:
    """The relation of observed to predicted values of one quantity."""

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


class Verdict(Enum):
    ADMITTED = "admitted"
    WOULD_REFUSE = "would_refuse"
    """Admitted all the same: shadow mode, or a sample that measures false rejections."""
    REFUSED = "refused"


@dataclass(slots=True)
class AdmissionDecision:
    """The decision about one request; see Admission.judge. Times in seconds, 0.0: no prediction."""

    verdict: Verdict
    ttft_s: float
    tpot_s: float
    ttft_limit_s: float
    error: OverloadedError | None = None


@dataclass(slots=True)
class Admission:
    """Decides about requests.

    Args:
        mode: "off", "shadow" (rejects none, and counts those it would have rejected) or "on".
        max_ttft_s: target for the first token, from arrival; 0: the request's deadline.
        max_tpot_s: target for the time per token after it; 0: none.
    Raises: ConfigError.
    """

    mode: str = "shadow"
    max_ttft_s: float = 0.0
    max_tpot_s: float = 0.0
    ttft: Calibration = field(default_factory=Calibration)
    tpot: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("admission", self.mode, f"must be one of {', '.join(MODES)}")

    def judge(self, ttft_s: float, tpot_s: float, allowed_s: float, rng: random.Random) -> AdmissionDecision:
        """Decide about one request.

        Args:
            ttft_s, tpot_s: as predicted by placement, uncalibrated; ttft_s from the request's arrival.
            allowed_s: from its arrival to its deadline.
        """
        limit_s = min(self.max_ttft_s, allowed_s) if self.max_ttft_s else allowed_s
        judgement = AdmissionDecision(Verdict.ADMITTED, ttft_s, tpot_s, limit_s)
        if self.mode == "off":
            return judgement
        low_ttft, _ = self.ttft.band(ttft_s)
        low_tpot = self.tpot.band(tpot_s)[0] if tpot_s and self.max_tpot_s else 0.0
        if low_ttft <= limit_s and low_tpot <= (self.max_tpot_s or math.inf):
            return judgement
        if self.mode == "shadow" or rng.random() < _PROBE_RATE:
            judgement.verdict = Verdict.WOULD_REFUSE
            return judgement
        judgement.verdict = Verdict.REFUSED
        what = f"the first token in {low_ttft:.2g} s or later, {limit_s:.2g} s are allowed"
        if low_ttft <= limit_s:
            what = f"a token every {low_tpot:.2g} s or slower, {self.max_tpot_s:.2g} s are allowed"
        retry_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, low_ttft - limit_s))
        judgement.error = OverloadedError(f"shed before any work: {what}", retry_after_s=retry_s)
        return judgement

    def on_first_token(self, judgement: AdmissionDecision, seen_s: float) -> bool | None:
        """`seen_s`: from arrival. Returns whether a rejection would have been false; None: it would not have been
        rejected."""
        self.ttft.on_seen(judgement.ttft_s, seen_s)
        if judgement.verdict is not Verdict.WOULD_REFUSE:
            return None
        return seen_s <= judgement.ttft_limit_s

    def on_pace(self, judgement: AdmissionDecision, seen_s: float) -> None:
        """`seen_s`: per token after the first."""
        if judgement.tpot_s:
            self.tpot.on_seen(judgement.tpot_s, seen_s)
