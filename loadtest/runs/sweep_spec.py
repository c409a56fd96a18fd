"""Settings of a sweep; in a separate module, so that `--help` loads nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """How a sweep searches the highest rate.

    Args:
        start: requests a second of the first point.
        step: factor between rates.
        refine: bisections after the SLO was violated.
        max_points: most points.
        attain: the SLO holds if at least this share of the requests meets it.
        point_s: seconds of arrivals at each rate.
        rates: measure these rates, without a search.
    """

    start: float = 0.5
    step: float = 1.5
    refine: int = 2
    max_points: int = 12
    attain: float = 0.9
    point_s: float = 20.0
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.start < math.inf and self.step > 1 and self.refine >= 0 and self.max_points >= 1):
            raise ConfigError("start", self.start, "start above 0, step above 1, refine and max_points not negative")
        if not 0 < self.attain <= 1:
            raise ConfigError("attain", self.attain, "must be above 0 and at most 1")
        if not self.point_s > 0 or any(not 0 < rate < math.inf for rate in self.rates):
            raise ConfigError("point_s", self.point_s, "point_s and all rates must be above 0")
