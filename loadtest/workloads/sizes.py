"""Distributions of lengths and times, written as text.

    256    uniform:64,512    lognormal:256,0.6    exp:1.5    choice:16,64,256

Each accepts `,min=..` and `,max=..` at its end; values beyond are clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from diptych.common.errors import ConfigError

KINDS = {"fixed": 1, "uniform": 2, "lognormal": 2, "exp": 1, "choice": None}
"""Name -> number of parameters; None: one or more."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """`kind` over `values`.

    fixed: the value. uniform: low, high (inclusive). lognormal: median, sigma of the logarithm. exp: mean.
    choice: equally likely values.
    """

    kind: str
    values: tuple[float, ...]
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: Random) -> float:
        return min(self.high, max(self.low, self._raw(rng)))

    def draw_tokens(self, rng: Random) -> int:
        """A whole number, at least 1."""
        if self.kind == "uniform":
            whole = rng.randint(math.ceil(self.values[0]), math.floor(self.values[1]))
            return max(1, round(min(self.high, max(self.low, whole))))
        return max(1, round(self.draw(rng)))

    def _raw(self, rng: Random) -> float:
        match self.kind:
            case "fixed":
                return self.values[0]
            case "uniform":
                return rng.uniform(*self.values)
            case "lognormal":
                return rng.lognormvariate(math.log(self.values[0]), self.values[1])
            case "exp":
                return rng.expovariate(1.0 / self.values[0])
            case _:
                return rng.choice(self.values)


def fixed(value: float) -> Distribution:
    return Distribution("fixed", (value,))


def parse(field: str, text: str) -> Distribution:
    """Raises: ConfigError naming `field`."""
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = "fixed", text
    if name not in KINDS:
        raise ConfigError(field, text, f"must be a number or one of {', '.join(KINDS)} followed by : and numbers")
    values: list[float] = []
    bounds = {"min": 0.0, "max": math.inf}
    try:
        for part in rest.split(","):
            key, equals, number = part.partition("=")
            if equals:
                if key not in bounds:
                    raise ConfigError(field, text, f"unknown bound {key!r}: only min and max")
                bounds[key] = float(number)
            else:
                values.append(float(part))
    except ValueError:
        raise ConfigError(field, text, "contains a value that is not a number") from None
    wanted = KINDS[name]
    if not values or (wanted is not None and len(values) != wanted):
        raise ConfigError(field, text, f"{name} takes {wanted or 'one or more'} numbers, got {len(values)}")
    if any(not math.isfinite(value) or value < 0 for value in values) or bounds["min"] > bounds["max"]:
        raise ConfigError(field, text, "numbers must be finite and not negative, and min at most max")
    if name in ("lognormal", "exp") and values[0] <= 0:
        raise ConfigError(field, text, "the first number must be above 0")
    if name == "uniform" and values[0] > values[1]:
        raise ConfigError(field, text, "low is above high")
    return Distribution(name, tuple(values), bounds["min"], bounds["max"])
