"""Intended send times, in seconds from the start of the run. Pure.

Open loop: the times come from the arrival process alone, whatever the server does; a late send counts from its intended
time (no coordinated omission). Closed loop: `concurrency` users, each sends when its last answer has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Gamma-distributed intervals.

    Args:
        rate: arrivals (of sessions) per second; inf: all at once.
        burstiness: shape of the gamma distribution. 1 is Poisson, below 1 bursts, above 1 is more even, inf equal
            intervals.
        ramp_to: the rate changes linearly from `rate` to this over the whole run; None: constant.
        max_concurrency: 0: none. A request that waits for a slot still counts from its intended time.
    """

    rate: float
    burstiness: float = 1.0
    ramp_to: float | None = None
    max_concurrency: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError("request_rate", self.rate, "must be above 0 (inf: all at once)")
        if not self.burstiness > 0:
            raise ConfigError("burstiness", self.burstiness, "must be above 0")
        if self.ramp_to is not None and not (0 < self.ramp_to < math.inf and self.rate < math.inf):
            raise ConfigError("ramp_to", self.ramp_to, "needs two finite rates above 0")
        if self.max_concurrency < 0:
            raise ConfigError("max_concurrency", self.max_concurrency, "must not be negative")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users without think time."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("max_concurrency", self.concurrency, "must be 1 or more in a closed loop")


def arrivals(loop: OpenLoop, count: int, rng: Random) -> list[float]:
    """`count` ascending times, the first at 0.

    A ramp changes the time scale: with N(t) = a t + b t^2 expected arrivals until t, arrival i at u_i of the process of
    rate 1 is at N^-1(u_i).
    """
    if loop.rate == math.inf:
        return [0.0] * count
    units = [0.0]
    for _ in range(count - 1):
        even = loop.burstiness == math.inf
        units.append(units[-1] + (1.0 if even else rng.gammavariate(loop.burstiness, 1.0 / loop.burstiness)))
    if loop.ramp_to is None:
        return [unit / loop.rate for unit in units[:count]]
    duration = 2.0 * count / (loop.rate + loop.ramp_to)
    slope = (loop.ramp_to - loop.rate) / duration
    return [_ramped(unit, loop.rate, slope, loop.ramp_to) for unit in units[:count]]


def _ramped(unit: float, rate: float, slope: float, last_rate: float) -> float:
    """t with rate * t + slope * t^2 / 2 == unit; after the end of a falling ramp the last rate continues."""
    if abs(slope) < 1e-12:
        return unit / rate
    end = (last_rate - rate) / slope
    until_end = rate * end + slope * end * end / 2.0
    if unit > until_end:
        return end + (unit - until_end) / last_rate
    return (math.sqrt(rate * rate + 2.0 * slope * unit) - rate) / slope
