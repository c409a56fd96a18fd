"""What this router placed and has not seen the end of, so that a burst does not stampede one worker. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """Prompt tokens on the worker that computes them (until the first token), one sequence on decode (until the end)."""

    prefill_id: str
    decode_id: str
    num_tokens: int


class Reservations:
    """By attempt. Releasing twice, or what was never reserved, does nothing."""

    def __init__(self) -> None:
        self._open: dict[str, Reservation] = {}
        self._computed: set[str] = set()
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, attempt: str, reservation: Reservation) -> None:
        self._open[attempt] = reservation
        self._tokens[reservation.prefill_id] += reservation.num_tokens
        self._requests[reservation.prefill_id] += 1
        if reservation.decode_id != reservation.prefill_id:
            self._requests[reservation.decode_id] += 1

    def prompt_computed(self, attempt: str) -> None:
        """The first token was seen: the prompt no longer waits anywhere."""
        reservation = self._open.get(attempt)
        if reservation is None or attempt in self._computed:
            return
        self._computed.add(attempt)
        self._take(self._tokens, reservation.prefill_id, reservation.num_tokens)
        if reservation.decode_id != reservation.prefill_id:
            self._take(self._requests, reservation.prefill_id, 1)

    def release(self, attempt: str) -> None:
        self.prompt_computed(attempt)
        self._computed.discard(attempt)
        reservation = self._open.pop(attempt, None)
        if reservation is not None:
            self._take(self._requests, reservation.decode_id, 1)

    def tokens(self, worker_id: str) -> int:
        return self._tokens[worker_id]

    def requests(self, worker_id: str) -> int:
        return self._requests[worker_id]

    @staticmethod
    def _take(counter: Counter[str], worker_id: str, count: int) -> None:
        counter[worker_id] -= count
        if not counter[worker_id]:
            del counter[worker_id]
