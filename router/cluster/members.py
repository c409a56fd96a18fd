"""Members of the cluster, by leases and probes. Decides only: links are opened and closed by the caller.

no lease --lease seen--> MEMBER --another incarnation, or role--> the old one is LOST, the new one a MEMBER
                           | lease missing, and silent for dead_s --> LOST
                           | lease missing, but it answers: stays; not used after dead_s (a FLUSHALL is repaired before)
                           | silent for dead_s without a lease; for its patience (patience.py) with one, where another
                             worker of its role is usable; for 3 dead_s in any case: its attempts are given up
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from diptych.common.store.worker_record import WorkerRecord
from diptych.router.cluster.patience import Patience


class Link(Protocol):
    patience: Patience

    @property
    def silent_s(self) -> float: ...

    def why_not(self) -> str: ...


LinkT = TypeVar("LinkT", bound=Link)


@dataclass(slots=True)
class Member(Generic[LinkT]):
    """One incarnation of a worker. `read_at`: when its record last changed."""

    record: WorkerRecord
    link: LinkT
    read_at: float
    missing_since: float | None = None
    behind_since: float | None = None


@dataclass(slots=True)
class Members(Generic[LinkT]):
    """The members.

    Args:
        open_link: makes the link of a new incarnation.
        why_not: why the router cannot use a record, or "".
        dead_s: silence after which a worker is not used.
    """

    open_link: Callable[[WorkerRecord], LinkT]
    why_not: Callable[[WorkerRecord], str]
    dead_s: float
    _members: dict[str, Member[LinkT]] = field(default_factory=dict)

    def get(self, worker_id: str) -> Member[LinkT] | None:
        return self._members.get(worker_id)

    def all(self) -> list[Member[LinkT]]:
        return list(self._members.values())

    def on_records(
        self, records: Sequence[WorkerRecord], now: float
    ) -> tuple[list[Member[LinkT]], list[Member[LinkT]]]:
        """Apply a complete list of leases. Returns (new members, lost members)."""
        new: list[Member[LinkT]] = []
        lost: list[Member[LinkT]] = []
        for record in records:
            member = self._members.get(record.worker_id)
            if member is not None and _same_incarnation(member.record, record):
                member.missing_since = None
                if member.record != record:
                    member.record, member.read_at = record, now
                continue
            if member is not None:
                lost.append(member)
            member = self._members[record.worker_id] = Member(record, self.open_link(record), now)
            new.append(member)
        present = {record.worker_id for record in records}
        for worker_id in self._members.keys() - present:
            member = self._members[worker_id]
            if member.missing_since is None:
                member.missing_since = now
            if now - member.missing_since >= self.dead_s and member.link.silent_s > self.dead_s:
                lost.append(self._members.pop(worker_id))
        return new, lost

    def left_gracefully(self, member: Member[LinkT], now: float) -> bool:
        """Whether a lost member was draining, has another role now, or gave up its lease while it still answered. A killed
        worker stops answering first, and its lease expires later."""
        now_there = self._members.get(member.record.worker_id)
        if now_there is not None and now_there.record.incarnation == member.record.incarnation:
            return True
        last_answer = now - member.link.silent_s
        gave_up = member.missing_since is not None and member.missing_since - last_answer < self.dead_s
        return member.record.state == "draining" or gave_up

    def given_up(self, now: float) -> list[Member[LinkT]]:
        """Members whose attempts should not be awaited any longer."""
        silent = [member for member in self._members.values() if member.link.silent_s > self.dead_s]
        if not silent:
            return []
        usable = {member.record.role for member in self._members.values() if not self.why_unplaceable(member, now)}
        return [member for member in silent if member.link.silent_s > self._patience_s(member, usable)]

    def _patience_s(self, member: Member[LinkT], usable: Collection[str]) -> float:
        """`usable`: roles of which a worker can be used: a silent one cannot."""
        if member.missing_since is not None:
            return self.dead_s
        patience = member.link.patience
        return patience.limit_s if member.record.role in usable else patience.most_s

    def still_serves_kv(self, member: Member[LinkT], now: float) -> bool:
        """Whether a worker that drains has time left, and answers. Once its lease is gone it exits."""
        record = member.record
        ends_at = member.read_at + record.leaves_in_s
        is_there = member.missing_since is None and member.link.silent_s <= self.dead_s
        return record.state == "draining" and now < ends_at and is_there and not self.why_not(record)

    def why_unplaceable(self, member: Member[LinkT], now: float) -> str:
        """Why the worker is not used now, or ""."""
        if member.record.state != "ready":
            return f"is {member.record.state}"
        if member.missing_since is not None and now - member.missing_since > self.dead_s:
            return "has no lease"
        return self.why_not(member.record) or member.link.why_not()


def _same_incarnation(a: WorkerRecord, b: WorkerRecord) -> bool:
    return (a.incarnation, a.address, a.role) == (b.incarnation, b.address, b.role)
