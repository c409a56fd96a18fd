"""Measured bytes per second of reads from each prefill worker, and the deadlines that follow from it."""

from __future__ import annotations


class LinkRates:
    """Exponentially weighted mean of each peer's read rate.

    Args:
        alpha: weight of the newest reading.
        floor_bytes_per_s: what a link is assumed to do at least; keeps a deadline finite and lenient.
    """

    def __init__(self, *, alpha: float = 0.2, floor_bytes_per_s: float = 1_000_000.0) -> None:
        self._alpha = alpha
        self._floor = floor_bytes_per_s
        self._rates: dict[str, float] = {}

    def observe(self, worker_id: str, size_bytes: int, seconds: float) -> None:
        if seconds <= 0 or size_bytes <= 0:
            return
        rate = size_bytes / seconds
        old = self._rates.get(worker_id)
        self._rates[worker_id] = rate if old is None else old + self._alpha * (rate - old)

    def snapshot(self) -> dict[str, float]:
        return dict(self._rates)

    def read_deadline_s(self, worker_id: str, size_bytes: int, *, base_s: float) -> float:
        """base_s + four times what the bytes take at the measured (or the least assumed) rate."""
        rate = max(self._rates.get(worker_id, 0.0), self._floor)
        return base_s + 4 * size_bytes / rate
