"""Placements of the routers that have not ended, so that a burst does not stampede one worker. Pure.

This router's placements are kept by attempt; those of other routers are sums, as last reported (see pending.py).

A reservation may be *doubtful*: its ticket has not been redeemed yet. It counts when workers are compared, which
spreads a burst, but neither in what makes others wait nor in what is reported to other routers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.router.adapters.in_use import AdaptersInUse
from diptych.router.fairness.backlog import Backlog

Ints = npt.NDArray[np.int64]
_MAX_IDLE_COLUMNS = 1024


@dataclass(slots=True)
class Reservation:
    """Prompt tokens on the worker that computes them (until the first token), one sequence on decode (until the end).
    `kv_tokens`: of the prompt, those whose KV decode did not hold. `adapter`: id of its adapter, in use for as long; "": none."""

    prefill_id: str
    decode_id: str
    num_tokens: int
    tenant: str = ""
    kv_tokens: int = 0
    adapter: str = ""


class Reservations:
    """Reservations by attempt. Releasing twice, or an unknown attempt, has no effect. `now`: see Backlog."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self.backlog = Backlog(now)
        self._open: dict[str, Reservation] = {}
        self._computed: set[str] = set()
        self._doubtful: set[str] = set()
        self._columns: dict[str, int] = {}
        self._mine = np.zeros((4, 64), np.int64)  # tokens, requests, doubtful tokens, KV tokens by column
        self._others = np.zeros((2, 64), np.int64)
        self._sum_up()
        self.on_less: Callable[[], None] = lambda: None
        """Called when a prompt no longer waits, or a request ended."""
        self.adapters = AdaptersInUse(now)

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, attempt: str, reservation: Reservation, *, doubtful: bool = False) -> None:
        self._open[attempt] = reservation
        self._add(reservation.prefill_id, reservation.num_tokens, 1)
        if reservation.decode_id != reservation.prefill_id:
            self._add(reservation.decode_id, 0, 1)
        self._add_kv(reservation.decode_id, reservation.kv_tokens)
        if reservation.adapter:
            for worker_id in {reservation.prefill_id, reservation.decode_id}:
                self.adapters.add(worker_id, reservation.adapter)
        self.backlog.add(attempt, reservation.prefill_id, reservation.num_tokens, reservation.tenant, doubtful=doubtful)
        if doubtful:
            self._doubtful.add(attempt)
            self._doubt(reservation.prefill_id, reservation.num_tokens)

    def settle(self, attempt: str) -> None:
        """Make the reservation no longer doubtful."""
        if attempt in self._doubtful:
            self._doubtful.discard(attempt)
            reservation = self._open[attempt]
            self._doubt(reservation.prefill_id, -reservation.num_tokens)
            self.backlog.add(attempt, reservation.prefill_id, reservation.num_tokens, reservation.tenant)

    def _doubt(self, worker_id: str, tokens: int) -> None:
        self._numbers[0][2 * self.width + self._column(worker_id)] += tokens

    def prompt_computed(self, attempt: str) -> None:
        """The first token arrived: the prompt no longer waits."""
        self._leave(attempt, computed=True)

    def _leave(self, attempt: str, *, computed: bool) -> None:
        reservation = self._open.get(attempt)
        if reservation is None or attempt in self._computed:
            return
        self._computed.add(attempt)
        self.settle(attempt)
        self.backlog.remove(attempt, reservation.prefill_id, reservation.tenant, computed=computed)
        remote = reservation.decode_id != reservation.prefill_id
        self._add(reservation.prefill_id, -reservation.num_tokens, -1 if remote else 0)
        if reservation.adapter and remote:
            self.adapters.remove(reservation.prefill_id, reservation.adapter)
        self.on_less()

    def release(self, attempt: str) -> Reservation | None:
        """Returns the reservation, if there was one."""
        self._leave(attempt, computed=False)
        self._computed.discard(attempt)
        reservation = self._open.pop(attempt, None)
        if reservation is not None:
            self._add(reservation.decode_id, 0, -1)
            self._add_kv(reservation.decode_id, -reservation.kv_tokens)
            if reservation.adapter:
                self.adapters.remove(reservation.decode_id, reservation.adapter)
        return reservation

    def _sum_up(self) -> None:
        """Call it after a table was replaced."""
        self._mine = np.ascontiguousarray(self._mine)
        self._all = np.ascontiguousarray(self._mine[:2] + self._others)
        self.width = self._all.shape[1]
        self.address: int = self._all.ctypes.data
        """Address of all routers' sums, [2, width]: tokens, requests by column."""
        # Setting a number through a memoryview takes a fifth of the time of an array.
        self._numbers: list[memoryview] = [table.reshape(-1).data for table in (self._mine, self._all)]

    def _add(self, worker_id: str, tokens: int, requests: int) -> None:
        column = self._column(worker_id)
        for numbers in self._numbers:
            if tokens:
                numbers[column] += tokens
            if requests:
                numbers[self.width + column] += requests

    def _add_kv(self, worker_id: str, tokens: int) -> None:
        if tokens:
            self._numbers[0][3 * self.width + self._column(worker_id)] += tokens

    def _column(self, worker_id: str) -> int:
        column = self._columns.get(worker_id)
        if column is None:
            column = self._columns[worker_id] = len(self._columns)
            if column >= self._mine.shape[1]:
                self._mine, self._others = (
                    np.pad(table, ((0, 0), (0, column))) for table in (self._mine, self._others)
                )
                self._sum_up()
        return column

    def tokens(self, worker_id: str) -> int:
        """Tokens placed by this router."""
        return int(self._mine[0, self._column(worker_id)])

    @property
    def others_tokens(self) -> int:
        """Tokens placed by the other routers, on all workers."""
        return int(self._others[0].sum())

    def requests(self, worker_id: str) -> int:
        return int(self._mine[1, self._column(worker_id)])

    def mine(self) -> dict[str, tuple[int, int]]:
        """(tokens, requests) of every worker with pending requests of this router; without doubtful tokens."""
        return {
            name: (int(self._mine[0, column] - self._mine[2, column]), int(self._mine[1, column]))
            for name, column in self._columns.items()
            if self._mine[:, column].any()
        }

    def set_others(self, pending: Mapping[str, tuple[int, int]]) -> None:
        """Replace the sums of the other routers."""
        self.backlog.set_others(pending)
        columns = {self._column(name): value for name, value in pending.items()}
        self._others[:] = 0
        for column, value in columns.items():
            self._others[:, column] = value
        self._sum_up()

    # ---- for a placement: all workers at once --------------------------------------------------------------------

    def columns(self, worker_ids: Sequence[str]) -> Ints:
        """Positions of these workers in `at`; valid until the next call."""
        if len(self._columns) > 4 * len(worker_ids) + _MAX_IDLE_COLUMNS:
            self._compact(set(worker_ids))
        return np.array([self._column(name) for name in worker_ids], np.int64)

    def at(self, columns: Ints) -> tuple[Ints, Ints]:
        """(pending tokens, pending requests) of all routers."""
        tokens, requests = self._all.take(columns, axis=1)
        return tokens, requests

    def kv_at(self, columns: Ints) -> Ints:
        """Tokens of KV that this router's requests need or hold there."""
        tokens: Ints = self._mine[3].take(columns)
        return tokens

    def _compact(self, keep: set[str]) -> None:
        """Drop workers that left long ago."""
        kept = [(n, c) for n, c in self._columns.items() if n in keep or self._mine[:, c].any()]
        old = [column for _, column in kept]
        width = max(64, len(old))
        self._mine, self._others = (
            np.pad(a[:, old], ((0, 0), (0, width - len(old)))) for a in (self._mine, self._others)
        )
        self._sum_up()
        self._columns = {name: i for i, (name, _) in enumerate(kept)}
