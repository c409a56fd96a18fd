"""The router's live view of the cluster: leases are polled, event streams tailed, workers probed, all in the background.
A request asks only this view. While the store is away the last view is kept, and `degraded` says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from diptych.common.block_identity import IdentityHeader, block_keys
from diptych.common.clock import Clock
from diptych.common.errors import DiptychError, NoWorkerError, WorkerLostError
from diptych.common.store import Store, StoreError
from diptych.common.worker_record import WorkerRecord
from diptych.router.compatibility import RouterCheck, pair_differences
from diptych.router.decode_stream import Attempt
from diptych.router.index import BlockIndex, IndexMode
from diptych.router.members import Member, Members
from diptych.router.policy import (
    ClusterSnapshot,
    Placement,
    PlacementRequest,
    Rejected,
    WorkerView,
    choose_placement,
    usable_hit_tokens,
)
from diptych.router.reservations import Reservation, Reservations
from diptych.router.worker_link import WorkerLink
from diptych.rpc.v1 import decode_pb2

log = structlog.get_logger(__name__)

Life = tuple[str, str]
"""(worker id, incarnation)"""

_TAIL_BLOCK_S = 0.25
_BEHIND_S = 1.5
_SNAPSHOT_PAUSE_S = 0.5
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Prompt:
    """A prompt and, once for each way of naming blocks, the identities of its blocks."""

    token_ids: tuple[int, ...]
    salt: bytes = b""
    _keys: dict[IdentityHeader, list[bytes]] = field(default_factory=dict)

    def keys(self, header: IdentityHeader) -> list[bytes]:
        if header not in self._keys:
            self._keys[header] = block_keys(header.with_salt(self.salt), self.token_ids)
        return self._keys[header]


class Cluster:
    """Args:
    check: what workers must share with this router.
    poll_s: pause between two looks at the leases, and between two probes of a worker.
    dead_s: silence after which a worker is not placed on.
    """

    def __init__(
        self,
        store: Store,
        check: RouterCheck,
        *,
        clock: Clock,
        rng: random.Random,
        poll_s: float = 0.25,
        dead_s: float = 2.0,
        open_link: Callable[[WorkerRecord], WorkerLink] | None = None,
    ) -> None:
        self._store = store
        self._check = check
        self._clock = clock
        self._rng = rng
        self._poll_s = poll_s
        self._changed = asyncio.Event()
        self._members: Members[WorkerLink] = Members(open_link or self._open_link, check.why_not, dead_s)
        self._dead_s = dead_s
        self._index = BlockIndex()
        self._cursors: dict[str, str] = {}
        self._pairs: dict[tuple[Life, Life], list[str]] = {}
        self._snapshots: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.reservations = Reservations()
        self.degraded = ""
        """Why the view may be old, or ""."""
        self._pair_seen = False

    def _open_link(self, record: WorkerRecord) -> WorkerLink:
        return WorkerLink(
            record, clock=self._clock, probe_s=self._poll_s, dead_s=self._dead_s, on_change=self._changed.set
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._poll_loop(), name="cluster-poll"),
            asyncio.create_task(self._tail_loop(), name="cluster-tail"),
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self._snapshots.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        links = [member.link.close("the router is stopping") for member in self._members.all()]
        await asyncio.gather(*links, *self._closing, return_exceptions=True)

    async def _poll_loop(self) -> None:
        while True:
            try:
                records = await self._store.list_workers()
                self._set_degraded("")
                self._fold_records(records)
            except StoreError as err:
                self._set_degraded(f"the store is away, the view of the cluster may be old ({err})")
            for member in self._members.given_up():
                if member.link.decode is not None and member.link.decode.num_attempts:
                    member.link.decode.fail_attempts(member.link.why_not() or "its lease ended")
            self._fetch_snapshots()
            await asyncio.sleep(self._poll_s)

    def _set_degraded(self, why: str) -> None:
        if bool(why) != bool(self.degraded):
            log.warning("store is away", why=why) if why else log.info("store is back")
        self.degraded = why

    def _fold_records(self, records: Sequence[WorkerRecord]) -> None:
        now = self._clock.now()
        new, lost = self._members.on_records(records, now)
        for member in lost:
            log.warning("worker lost", worker=member.record.worker_id, incarnation=member.record.incarnation)
            if self._members.get(member.record.worker_id) is None:
                self._index.forget(member.record.worker_id)
                self._cursors.pop(member.record.worker_id, None)
            task = asyncio.create_task(member.link.close("its life ended"))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for member in new:
            record = member.record
            log.info("worker found", worker=record.worker_id, role=record.role, address=record.address)
            if why := self._check.why_not(record):
                log.error("worker is never placed on", worker=record.worker_id, why=why)
            self._cursors[record.worker_id] = "0"
            member.link.start()
        for record in records:
            self._index.register(record.worker_id, record.incarnation, record.event_epoch, record.event_sequence)
            self._watch_tail(record, now)
        if new or lost:
            self._changed.set()

    def _watch_tail(self, record: WorkerRecord, now: float) -> None:
        """A lease that stays ahead of the index means that the stream's last events were lost."""
        member = self._members.get(record.worker_id)
        if member is None:
            return
        if not self._index.is_behind(record.worker_id, record.event_epoch, record.event_sequence):
            member.behind_since = None
        elif member.behind_since is None:
            member.behind_since = now
        elif now - member.behind_since > _BEHIND_S:
            member.behind_since = None
            self._index.lose_track(record.worker_id)

    async def _tail_loop(self) -> None:
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
                for cursor, event in events:
                    self._index.apply(worker_id, event)
                    self._cursors[worker_id] = cursor

    def _fetch_snapshots(self) -> None:
        for worker_id in self._index.needs_snapshot():
            member = self._members.get(worker_id)
            if member is None or worker_id in self._snapshots or member.link.silent_s > self._dead_s:
                continue
            task = asyncio.create_task(self._fetch_snapshot(member), name=f"snapshot-{worker_id}")
            self._snapshots[worker_id] = task

    async def _fetch_snapshot(self, member: Member[WorkerLink]) -> None:
        worker_id = member.record.worker_id
        try:
            epoch, sequence, keys = await member.link.dump_blocks()
            self._index.load_snapshot(worker_id, member.record.incarnation, epoch=epoch, sequence=sequence, keys=keys)
        except DiptychError as err:
            log.warning("no snapshot of a worker's cache", worker=worker_id, error=err.message)
        finally:
            # The pause bounds how often a worker whose stream stays broken is asked.
            asyncio.get_running_loop().call_later(_SNAPSHOT_PAUSE_S, self._snapshots.pop, worker_id, None)

    # ---- questions -----------------------------------------------------------------------------------------------

    def snapshot(self, prompt: Prompt | None = None, exclude: frozenset[Life] = frozenset()) -> ClusterSnapshot:
        """Usable workers with this prompt's hits. `exclude`: lives that must not be chosen as decode."""
        now = self._clock.now()
        views: dict[str, list[WorkerView]] = {"prefill": [], "decode": []}
        unusable = {}
        for member in self._members.all():
            record = member.record
            why = self._members.why_unplaceable(member, now)
            if not why and record.role == "decode" and (record.worker_id, record.incarnation) in exclude:
                why = "failed for this request"
            if why:
                unusable[record.worker_id] = why
            else:
                views[record.role].append(self._view(member, prompt))
        incompatible = {
            (p.worker_id, d.worker_id): differences
            for p in views["prefill"]
            for d in views["decode"]
            if (differences := self._pair(p.record, d.record))
        }
        return ClusterSnapshot(tuple(views["prefill"]), tuple(views["decode"]), incompatible, unusable)

    def _view(self, member: Member[WorkerLink], prompt: Prompt | None) -> WorkerView:
        record, hit = member.record, 0
        header = self._check.header(record)
        if prompt is not None and header is not None:
            blocks = self._index.hit_blocks(record.worker_id, prompt.keys(header))
            hit = usable_hit_tokens(blocks, record.block_size, len(prompt.token_ids))
        return WorkerView(
            record,
            hit_tokens=hit,
            pending_tokens=self.reservations.tokens(record.worker_id),
            pending_requests=self.reservations.requests(record.worker_id),
            reported_at=member.read_at,
        )

    def _pair(self, prefill: WorkerRecord, decode: WorkerRecord) -> list[str]:
        key = ((prefill.worker_id, prefill.incarnation), (decode.worker_id, decode.incarnation))
        if key not in self._pairs:
            if len(self._pairs) > 10_000:
                self._pairs.clear()
            self._pairs[key] = pair_differences(prefill.compat, decode.compat)
        return self._pairs[key]

    def ready(self) -> tuple[bool, list[str]]:
        """Whether a request could be placed, and what stands against it or is degraded. The first time, a prefill and a
        decode worker that fit are needed; later decode alone is enough (it computes prompts itself)."""
        view = self.snapshot()
        reasons = [f"{worker_id} {why}" for worker_id, why in sorted(view.unusable.items())]
        reasons += [f"{p} and {d} do not fit: {'; '.join(why)}" for (p, d), why in view.incompatible.items()]
        if self.degraded:
            reasons.append(self.degraded)
        pair = len(view.prefill) * len(view.decode) > len(view.incompatible)
        self._pair_seen = self._pair_seen or pair
        for role, found in (("decode", view.decode), ("prefill", view.prefill)):
            if not found:
                reasons.insert(0, f"no usable {role} worker")
        return bool(view.decode) and self._pair_seen, reasons

    def max_model_len(self) -> int | None:
        """The smallest context of the usable workers; None: nobody is there."""
        view = self.snapshot()
        return min((w.record.max_model_len for w in (*view.prefill, *view.decode)), default=None)

    def index_mode(self, placement: Placement) -> IndexMode:
        """The least trusted of what the placement rests on."""
        involved = [placement.decode, *placement.prefill[:1]]
        modes = {self._index.mode(view.worker_id) for view in involved}
        if self.degraded and IndexMode.EXACT in modes:
            modes.add(IndexMode.STALE)
        return next(mode for mode in (IndexMode.GUESS, IndexMode.STALE, IndexMode.EXACT) if mode in modes)

    def place(self, request: PlacementRequest, prompt: Prompt, exclude: frozenset[Life] = frozenset()) -> Placement:
        """Raises: NoWorkerError with the reasons."""
        answer = choose_placement(request, self.snapshot(prompt, exclude), self._clock.now(), self._rng)
        if isinstance(answer, Rejected):
            text = "; ".join(answer.reasons) or "no worker has registered"
            raise NoWorkerError(f"nobody can serve this request: {text}", retry_after_s=_RETRY_AFTER_S)
        return answer

    def open(self, placement: Placement, submit: decode_pb2.Submit) -> Attempt:
        """Send the attempt to decode and count it as pending until `reservations.release`. Raises: WorkerLostError."""
        record = placement.decode.record
        member = self._members.get(record.worker_id)
        if member is None or member.link.incarnation != record.incarnation or member.link.decode is None:
            raise WorkerLostError(f"decode worker {record.worker_id} is gone")
        attempt = member.link.decode.open(submit)
        computes = placement.chosen.prefill or placement.decode
        num_tokens = len(submit.prompt_token_ids) - computes.hit_tokens
        self.reservations.reserve(attempt.id, Reservation(computes.worker_id, record.worker_id, num_tokens))
        return attempt

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a worker comes, goes, or changes its usability, or the time is up."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
