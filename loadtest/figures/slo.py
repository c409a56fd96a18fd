"""A service-level objective, which a request must meet to count as goodput: `ttft:200,tpot:50,e2e:5000` (milliseconds)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.loadtest.figures.record import Outcome, RequestRecord

METRICS = ("ttft", "tpot", "e2e", "itl")
"""itl: the request's longest interval per token."""


@dataclass(frozen=True, slots=True)
class Slo:
    limits_s: tuple[tuple[str, float], ...] = ()

    @property
    def text(self) -> str:
        return ",".join(f"{name}:{limit * 1000:g}" for name, limit in self.limits_s)

    def kept_by(self, record: RequestRecord) -> bool:
        """The answer must be complete, and every value that exists within its limit."""
        return record.ok and all(
            value is None or value <= limit for name, limit in self.limits_s for value in (_value(record, name),)
        )


def _value(record: RequestRecord, name: str) -> float | None:
    match name:
        case "ttft":
            return record.ttft_s
        case "tpot":
            return record.tpot_s
        case "e2e":
            return record.e2e_s
        case _:
            return max((gap for gap, _ in record.gaps()), default=None)


def parse_slo(text: str) -> Slo:
    """Raises: ConfigError."""
    limits: list[tuple[str, float]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, number = part.partition(":")
        name = {"e2el": "e2e"}.get(name, name)
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in METRICS or not limit > 0:
            raise ConfigError("slo", text, f"must be metric:milliseconds, metrics {', '.join(METRICS)}")
        limits.append((name, limit / 1000.0))
    return Slo(tuple(limits))


def attainment(records: Iterable[RequestRecord], slo: Slo) -> float:
    """Share of the requests that met the SLO, among those the client did not cancel; 1 without requests."""
    counted = [record for record in records if record.outcome is not Outcome.CANCELLED]
    return sum(slo.kept_by(record) for record in counted) / len(counted) if counted else 1.0
