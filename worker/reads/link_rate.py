"""Measured bytes per second of reads from each prefill worker, for read deadlines and for prefill's overlap decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Burst:
    """Overlapping reads from one peer, from the start of the first to the end of the last."""

    began: float = 0.0
    in_flight: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class _Mean:
    bytes_per_s: float
    size_bytes: int


class LinkRates:
    """Means weighted by bytes over the last `window_bytes`. A read's own rate predicts its duration; concurrent reads
    share the link, so the link's rate is measured over whole bursts. A small read takes its fixed cost and says little
    of the rate, so it counts little; what began before the first read from a peer ended does not count: it connects.

    Args:
        window_bytes: weight of all earlier measurements together, at most.
        floor_bytes_per_s: minimum assumed rate; keeps a deadline finite and lenient.
    """

    def __init__(self, *, window_bytes: int = 16 << 20, floor_bytes_per_s: float = 1_000_000.0) -> None:
        self._window = window_bytes
        self._floor = floor_bytes_per_s
        self._rates: dict[str, _Mean] = {}
        self._first_ended: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._bursts: dict[str, _Burst] = {}
        self._link_rates: dict[str, _Mean] = {}
        self._connected: set[str] = set()

    def observe(self, worker_id: str, size_bytes: int, began: float, now: float) -> None:
        """Record one read."""
        self._last[worker_id] = now
        if began >= self._first_ended.setdefault(worker_id, now):
            self._mix(self._rates, worker_id, size_bytes, now - began)

    def began(self, worker_id: str, now: float) -> None:
        burst = self._bursts.setdefault(worker_id, _Burst())
        if not burst.in_flight:
            burst.began, burst.size_bytes = now, 0
        burst.in_flight += 1

    def ended(self, worker_id: str, size_bytes: int, now: float) -> None:
        """A read started with `began` ended. `size_bytes`: bytes received; 0: it failed."""
        burst = self._bursts[worker_id]
        burst.in_flight -= 1
        burst.size_bytes += size_bytes
        if burst.in_flight:
            return
        if worker_id in self._connected:
            self._mix(self._link_rates, worker_id, burst.size_bytes, now - burst.began)
        elif burst.size_bytes:
            self._connected.add(worker_id)
        del self._bursts[worker_id]

    def link(self, worker_id: str) -> float:
        """Bytes per second of the link from this peer; 0.0: not measured yet."""
        known = self._link_rates.get(worker_id)
        return known.bytes_per_s if known is not None else 0.0

    def snapshot(self, since: float = float("-inf")) -> dict[str, float]:
        """By peer, where measured. `since`: only of peers that were read from after this time."""
        return {name: known.bytes_per_s for name, known in self._rates.items() if self._last[name] >= since}

    def read_deadline_s(self, worker_id: str, size_bytes: int, *, base_s: float) -> float:
        """Deadline of a read, including its wait for a slab: base_s + four times the transfer time at the measured (or
        minimum) rate. The transfer uses this deadline unchanged."""
        known = self._rates.get(worker_id)
        rate = max(known.bytes_per_s if known is not None else 0.0, self._floor)
        return base_s + 4 * size_bytes / rate

    def _mix(self, rates: dict[str, _Mean], worker_id: str, size_bytes: int, seconds: float) -> None:
        if seconds <= 0 or size_bytes <= 0:
            return
        known = rates.setdefault(worker_id, _Mean(0.0, 0))
        known.bytes_per_s += size_bytes / (known.size_bytes + size_bytes) * (size_bytes / seconds - known.bytes_per_s)
        known.size_bytes = min(known.size_bytes + size_bytes, self._window)
