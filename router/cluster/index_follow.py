"""Keeps the block index current: reads the workers' event streams, detects losses, fetches snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError
from diptych.common.store.interface import Store, StoreError
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.cluster.event_watch import EventWatch
from diptych.router.cluster.members import Member, Members
from diptych.router.cluster.worker_link import WorkerLink
from diptych.router.placement.index import BlockIndex, IndexMode

log = structlog.get_logger(__name__)

_TAIL_BLOCK_S = 0.25
_BEHIND_S = 1.5
_SNAPSHOT_PAUSE_S = 0.5


class IndexFollower:
    """Follows all workers. `poll_s`: pause while there is no worker. `dead_s`: workers that have not answered for
    longer are not queried."""

    def __init__(
        self,
        store: Store,
        index: BlockIndex,
        members: Members[WorkerLink],
        event_watch: EventWatch,
        *,
        clock: Clock,
        poll_s: float,
        dead_s: float,
    ) -> None:
        self._store = store
        self._index = index
        self._members = members
        self._event_watch = event_watch
        self._clock = clock
        self._poll_s = poll_s
        self._dead_s = dead_s
        self._cursors: dict[str, str] = {}
        self._snapshots: dict[str, asyncio.Task[None]] = {}
        self._back_at: float | None = None
        """When the store came back; None: the index has been right since."""

    def begin(self, worker_id: str) -> None:
        """A new incarnation: its stream is read from the start."""
        self._cursors[worker_id] = "0"

    def forget(self, worker_id: str) -> None:
        self._index.forget(worker_id)
        self._cursors.pop(worker_id, None)

    async def close(self) -> None:
        tasks = list(self._snapshots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch_tail(self, record: WorkerRecord, now: float) -> None:
        """A lease that stays ahead of the index means that the stream's last events were lost."""
        member = self._members.get(record.worker_id)
        if member is None:
            return
        position = (record.event_epoch, *record.event_sequences)
        if not self._index.is_behind(record.worker_id, *position):
            member.behind_since = None
        elif member.behind_since is None:
            member.behind_since = now
        elif now - member.behind_since > _BEHIND_S:
            member.behind_since = None
            self._index.mark_stale(record.worker_id)
            self._event_watch.resynced(record.worker_id)

    def after_outage(self) -> None:
        """The store is back: events may be lost. A snapshot from each worker says sooner than its lease what it has."""
        self._back_at = self._clock.now()
        for member in self._members.all():
            self._index.mark_stale(member.record.worker_id)
            self._event_watch.resynced(member.record.worker_id)

    def _note_if_right(self) -> None:
        """After an outage: say when every worker has a lease again and the index has all that the leases mention."""
        if self._back_at is not None and all(
            member.missing_since is None
            and self._index.mode(member.record.worker_id) is IndexMode.EXACT
            and not self._index.is_behind(
                member.record.worker_id, member.record.event_epoch, *member.record.event_sequences
            )
            for member in self._members.all()
        ):
            log.info("index is right again", after_s=round(self._clock.now() - self._back_at, 3))
            self._back_at = None

    def find_untracked(self, known: Mapping[str, str]) -> dict[str, str]:
        """Workers whose cache events do not arrive, and the reason. `known`: those reported before."""
        now = self._clock.now()
        untracked_workers: dict[str, str] = {}
        for member in self._members.all():
            record = member.record
            why = self._event_watch.why(
                record.worker_id,
                num_events=self._index.num_events(record.worker_id),
                lease_sequence=record.event_sequences[0],
                mode=self._index.mode(record.worker_id),
                now=now,
            )
            if why:
                untracked_workers[record.worker_id] = why
                if record.worker_id not in known:
                    log.warning("a worker's cache events do not arrive", worker=record.worker_id, why=why)
        return untracked_workers

    async def run(self) -> None:
        while True:
            cursors = dict(self._cursors)
            if not cursors:
                await asyncio.sleep(self._poll_s)
                continue
            try:
                found = await self._store.read_events(cursors, block_s=_TAIL_BLOCK_S)
            except StoreError:
                await asyncio.sleep(_TAIL_BLOCK_S)
                continue
            for worker_id, events in found.items():
                if worker_id in self._cursors and events:
                    self._index.apply_all(worker_id, [event for _, event in events if event is not None])
                    self._cursors[worker_id] = events[-1][0]
            self._note_if_right()

    def fetch_snapshots(self) -> None:
        """Ask the workers of which the index is not exact; called after every poll."""
        self._note_if_right()
        for worker_id in self._index.needs_snapshot():
            member = self._members.get(worker_id)
            if member is None or worker_id in self._snapshots or member.link.silent_s > self._dead_s:
                continue
            task = asyncio.create_task(self._fetch_snapshot(member), name=f"snapshot-{worker_id}")
            self._snapshots[worker_id] = task

    async def _fetch_snapshot(self, member: Member[WorkerLink]) -> None:
        worker_id = member.record.worker_id
        try:
            dump = await member.link.dump_blocks()
            self._index.load_snapshot(
                worker_id,
                member.record.incarnation,
                epoch=dump.epoch,
                tiers=dump.tiers,
            )
            self._note_if_right()
        except DiptychError as err:
            log.warning("no snapshot of a worker's cache", worker=worker_id, error=err.message)
        finally:
            # The pause limits how often a worker with a broken stream is queried.
            asyncio.get_running_loop().call_later(_SNAPSHOT_PAUSE_S, self._snapshots.pop, worker_id, None)
