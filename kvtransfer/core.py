"""A worker's transfer without its thread: both ledgers, the arena of slabs and the transport.

Every worker can publish and read. The arena has a part for each, with a ledger of its own, so a read that is served waits for
no read that is made.

    event loop --inbox of calls, wake()--> turn() --call_soon_threadsafe--> event loop

thread.py calls turn() on a thread. A test may call it directly, with its own clock.

Order within a turn matters: progress, then inbox, then the events that progress brought. A handle leaves this process after
publish() put its slab into the inbox, so the slab is PACKED before the request that names it is looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from diptych.common.errors import DiptychError, InternalError, StaleReferenceError, TransferError
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.api import KvAddress, PeerRef, ReceivedSlab, TakeOffer, TransferAudit
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric.transport import OfferArrived, PeerLost, ReceiveDone, Transport, peer_key
from diptych.kvtransfer.ledgers.publisher import PublishSide
from diptych.kvtransfer.ledgers.publisher_ledger import PublisherLedger
from diptych.kvtransfer.ledgers.reader import ReadSide
from diptych.kvtransfer.ledgers.reader_ledger import ReaderLedger
from diptych.kvtransfer.slabs.handle import SlabHandle, new_key, sign
from diptych.kvtransfer.slabs.layout import Ring, RingSpec, SlabQuotas, payload_capacity, write_frame

log = logging.getLogger(__name__)
TICK_S = 0.1
_GRACE_S = 2.0
"""On top of a read's deadline, after which the thread itself is at fault."""
_ASK_S = 5.0


class TransferCore:
    """Implements `Transfer` (api.py) except close().

    Args:
        quotas: slabs to publish from, slabs to read into.
        ring: of quotas.total slabs; None: one in host memory.
        message_s: what one more message costs, by the self-test; 0.0: not measured.
        path: what the self-test found; empty: the transport's own.
        clock: monotonic seconds, for leases and deadlines.
        wake: called (on the event loop) when something was put into the inbox.
    """

    def __init__(
        self,
        transport: Transport,
        config: TransferConfig,
        *,
        worker_id: str,
        incarnation: str,
        quotas: SlabQuotas,
        layout_hash: int,
        num_layers: int,
        bytes_per_s: float,
        message_s: float = 0.0,
        path: str = "",
        loop: asyncio.AbstractEventLoop,
        ring: Ring | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._ring = ring or Ring(RingSpec(quotas.total, config.slab_bytes))
        self._verify = config.verify_checksum
        transport.register(self._ring)
        self.address: KvAddress = transport.address
        self.path = path or transport.path
        self.message_s = message_s
        self._odd_paths: set[tuple[str, str]] = set()
        """(worker, path) of peers whose path differs from the self-test's, and for which a warning was logged."""
        self._me = (worker_id, incarnation)
        self._layout_hash = layout_hash
        self._num_layers = num_layers
        self._lease_s = config.lease_s
        self._loop = loop
        self._clock = clock
        self._wake = wake
        self._next_tick = clock()
        self._key = new_key()
        self._on_grants: Callable[[tuple[SlabGrant, ...]], None] = lambda grants: None
        self._on_settled: Callable[[str, int], None] = lambda attempt, slab: None
        self._on_silent: Callable[[str], None] = lambda peer: None
        self._grants: list[SlabGrant] = []
        self._granted: dict[int, int] = {}
        """Slab -> generation. Written by the transfer thread when a slab is granted, removed by the event loop when it is
        returned; one thread owns a slab at a time."""
        self._read_ids = itertools.count(secrets.randbits(40))
        self._waiting: dict[int, tuple[asyncio.Future[ReceivedSlab], SlabHandle]] = {}
        self._expecting: dict[str, TakeOffer] = {}
        """By attempt: who takes slabs that come unasked."""
        self._lent: dict[int, tuple[ReceivedSlab, int]] = {}
        self._violations: list[str] = []
        self._inbox: deque[Callable[[float], None]] = deque()
        self._stopping = False
        self._quotas = quotas
        self._publisher = PublishSide(
            PublisherLedger(
                num_slabs=quotas.publish,
                payload_bytes=payload_capacity(config.slab_bytes),
                worker_id=worker_id,
                incarnation=incarnation,
                layout_hash=layout_hash,
                lease_s=config.lease_s,
                quarantine_cap=config.quarantine_cap_of(quotas.publish),
            ),
            transport,
            self._ring,
            self._key,
            self._grants.append,
            self._report_settled,
            self._report_silent,
        )
        self._reader = ReadSide(
            ReaderLedger(
                num_slabs=quotas.read,
                peer_quota=config.peer_quota_of(quotas.read),
                quarantine_cap=config.quarantine_cap_of(quotas.read),
                quarantine_s=config.lease_s,
            ),
            transport,
            self._ring,
            first_slab=quotas.publish,
            layout_hash=layout_hash,
            bytes_per_s=bytes_per_s,
            verify_checksum=config.verify_checksum,
            on_delivered=self._report_delivered,
            on_failed=self._report_failed,
        )

    @property
    def bytes_per_s(self) -> float:
        return self._reader.bytes_per_s

    # ---- publishing: event-loop thread ----

    def start(
        self,
        on_grants: Callable[[tuple[SlabGrant, ...]], None],
        on_settled: Callable[[str, int], None],
        on_silent: Callable[[str], None] = lambda peer: None,
    ) -> None:
        side = self._publish_side()
        self._on_grants, self._on_settled, self._on_silent = on_grants, on_settled, on_silent
        self._post(side.start)

    def publish(self, peer: str, packed: RangePacked) -> SlabHandle:
        """Raises: StaleReferenceError if the slab is not granted in this generation; TransferError if it cannot be named."""
        side = self._publish_side()
        if self._granted.get(packed.slab) != packed.generation:
            raise StaleReferenceError(f"slab {packed.slab} generation {packed.generation} is not granted")
        if not 0 < packed.size_bytes <= payload_capacity(self._ring.spec.slab_bytes):
            raise TransferError(f"range of {packed.size_bytes} bytes does not fit a slab")
        worker_id, incarnation = self._me
        try:
            handle = sign(
                self._key,
                SlabHandle(
                    worker_id=worker_id,
                    incarnation=incarnation,
                    attempt=packed.attempt,
                    slab=packed.slab,
                    generation=packed.generation,
                    first_token=packed.first_token,
                    num_tokens=packed.num_tokens,
                    first_layer=packed.first_layer,
                    num_layers=packed.num_layers or self._num_layers,
                    layout_hash=self._layout_hash,
                    size_bytes=packed.size_bytes,
                    checksum=packed.checksum,
                    expires_ns=int((self._clock() + self._lease_s) * 1e9),
                    group=packed.group,
                    part=packed.part,
                ),
            )
        except ValueError as error:
            raise TransferError(f"handle cannot be made: {error}") from error
        write_frame(self._ring.slab(packed.slab), handle)
        del self._granted[packed.slab]
        self._post(partial(side.publish, peer, handle))
        return handle

    def return_grant(self, slab: int) -> None:
        side = self._publish_side()
        generation = self._granted.pop(slab, None)
        if generation is not None:
            self._post(partial(side.return_grant, slab, generation))

    def release(self, attempt: str) -> None:
        self._post(partial(self._publish_side().release, attempt))

    # ---- reading: event-loop thread ----

    async def read(self, peer: PeerRef, handle: SlabHandle, *, deadline_s: float) -> ReceivedSlab:
        side = self._read_side()
        if self._stopping:
            raise TransferError("the transfer thread is closed")
        read_id = next(self._read_ids)
        future: asyncio.Future[ReceivedSlab] = self._loop.create_future()
        self._waiting[read_id] = (future, handle)
        deadline = self._clock() + deadline_s
        self._post(lambda now: side.want(read_id, peer, handle, deadline, now))
        try:
            async with asyncio.timeout(deadline_s + _GRACE_S):
                return await future
        except TimeoutError:
            self._abandon(read_id, future)
            raise TransferError(f"the transfer thread did not answer within {deadline_s + _GRACE_S:.1f} s") from None
        except asyncio.CancelledError:
            self._abandon(read_id, future)
            raise
        finally:
            self._waiting.pop(read_id, None)

    def expect(self, peer: PeerRef, attempt: str, take: TakeOffer, *, read_s: float) -> bool:
        side = self._read_side()
        if not side.may_be_offered:
            return False
        self._expecting[attempt] = take
        self._post(lambda now: side.expect(peer, attempt, read_s, now))
        return True

    def unexpect(self, attempt: str) -> None:
        if self._expecting.pop(attempt, None) is not None:
            self._post(partial(self._read_side().unexpect, attempt))

    def finish(self, slab: ReceivedSlab) -> None:
        lent = self._lent.get(slab.local_slab)
        if lent is None or lent[0] is not slab:
            return  # finished before
        del self._lent[slab.local_slab]
        self._post(partial(self._read_side().finish, lent[1]))

    def renew(self, peer: PeerRef, handle: SlabHandle) -> None:
        self._post(partial(self._read_side().renew, peer_key(peer.worker_id, peer.incarnation), handle))

    async def forget(self, peer: PeerRef) -> None:
        key = peer_key(peer.worker_id, peer.incarnation)
        side = self._read_side()
        await self._ask(lambda now: side.forget(key, now))

    async def audit(self, full: bool = False) -> TransferAudit:
        audit: TransferAudit = await self._ask(lambda now: self._audit(full))
        return audit

    # ---- between the threads ----

    def _publish_side(self) -> PublishSide:
        if not self._quotas.publish:
            raise InternalError("this worker has no slabs to publish from")
        return self._publisher

    def _read_side(self) -> ReadSide:
        if not self._quotas.read:
            raise InternalError("this worker has no slabs to read into")
        return self._reader

    def _post(self, call: Callable[[float], None]) -> None:
        self._inbox.append(call)
        self._wake()

    async def _ask(self, call: Callable[[float], Any]) -> Any:
        """Run `call` on the transfer thread and wait for what it returns."""
        if self._stopping:
            raise TransferError("the transfer thread is closed")
        future: asyncio.Future[Any] = self._loop.create_future()

        def run(now: float) -> None:
            try:
                self._on_loop(_set_result, future, call(now))
            except Exception as error:
                self._on_loop(_set_exception, future, InternalError(f"transfer thread: {error!r}"))

        self._post(run)
        async with asyncio.timeout(_ASK_S):
            return await future

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop is closed: an answer is dropped")

    def _abandon(self, read_id: int, future: asyncio.Future[ReceivedSlab]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self.finish(future.result())
        else:
            self._post(partial(self._reader.finish, read_id))

    def _report_settled(self, attempt: str, slab: int) -> None:
        self._on_loop(self._settled, attempt, slab)

    def _settled(self, attempt: str, slab: int) -> None:
        self._on_settled(attempt, slab)

    def _report_silent(self, peer: str) -> None:
        self._on_loop(self._silent, peer)

    def _silent(self, peer: str) -> None:
        self._on_silent(peer)

    def _report_delivered(self, read_id: int, slab: int, path: str, offered: SlabHandle | None) -> None:
        self._on_loop(self._delivered, read_id, slab, path, offered)

    def _waiting_for(
        self, read_id: int, offered: SlabHandle | None
    ) -> tuple[asyncio.Future[ReceivedSlab] | None, SlabHandle | None]:
        """Who waits for the read, or for the slab that was offered."""
        if offered is None:
            return self._waiting.get(read_id, (None, None))
        return next((one for one in self._waiting.values() if one[1] == offered), (None, None))

    def _delivered(self, read_id: int, slab: int, path: str, offered: SlabHandle | None) -> None:
        future, handle = self._waiting_for(read_id, offered)
        take = None
        if future is None and offered is not None:
            handle, take = offered, self._expecting.get(offered.attempt)
        if handle is None or (take is None if future is None else future.done()):
            self._post(partial(self._reader.finish, read_id))
            return
        if path and path != self.path and (handle.worker_id, path) not in self._odd_paths:
            self._odd_paths.add((handle.worker_id, path))
            log.warning("KV of %s comes on %s, the self-test found %s", handle.worker_id, path, self.path)
        payload = self._ring.received(slab, handle, verify=self._verify)
        received = ReceivedSlab(handle, slab, payload, path or self.path)
        self._lent[slab] = (received, read_id)
        if future is not None:
            future.set_result(received)
        elif take is not None:
            take(received)

    def _report_failed(self, read_id: int, error: DiptychError, offered: SlabHandle | None) -> None:
        self._on_loop(self._failed, read_id, error, offered)

    def _failed(self, read_id: int, error: DiptychError, offered: SlabHandle | None) -> None:
        future, _ = self._waiting_for(read_id, offered)
        if future is None and offered is not None and (take := self._expecting.get(offered.attempt)):
            take(error)
        if future is not None and not future.done():
            future.set_exception(error)

    # ---- called by the transfer thread, or by a test ----

    def turn(self) -> bool:
        """Progress, inbox, events, and the tick when it is due. Returns: whether anything happened."""
        events = self._guarded(self._transport.progress) or []
        worked = self._drain(self._clock())
        now = self._clock()
        for event in events:
            if not isinstance(event, ReceiveDone | OfferArrived):
                self._guarded(self._publisher.on_transport, event, now)
            if isinstance(event, ReceiveDone | PeerLost | OfferArrived):
                self._guarded(self._reader.on_transport, event, now)
        if now >= self.next_due():
            self._next_tick = now + TICK_S
            for side in (self._publisher, self._reader):
                self._guarded(side.tick, now)
        self._flush_grants()
        return bool(events) or worked

    def next_due(self) -> float:
        """When a turn is needed at the latest, on the clock."""
        due = self._reader.next_deadline()
        return self._next_tick if due is None else min(self._next_tick, due)

    @property
    def awaited(self) -> bool:
        """Messages of peers are expected: slabs are published, or reads are open."""
        return self._publisher.awaited or self._reader.awaited

    def shut(self) -> None:
        """Fail what waits and close the transport; no turn may follow."""
        self._stopping = True
        self._guarded(self._reader.fail_all, "the worker is closing")
        self._guarded(self._transport.close)

    def _drain(self, now: float) -> bool:
        worked = bool(self._inbox)
        for _ in range(len(self._inbox)):
            self._guarded(self._inbox.popleft(), now)
        return worked

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """A failed call must not end the thread: it is logged, and listed in the audit."""
        try:
            return call(*args)
        except Exception as error:
            log.exception("transfer thread")
            if len(self._violations) < 100:
                self._violations.append(repr(error))
            return None

    def _flush_grants(self) -> None:
        if not self._grants:
            return
        grants = tuple(self._grants)
        self._grants.clear()
        for grant in grants:
            self._granted[grant.slab] = grant.generation
        self._guarded(self._on_grants, grants)

    def _audit(self, full: bool) -> TransferAudit:
        publish, read = self._publisher, self._reader
        violations = [*self._violations, *((*publish.check(), *read.check()) if full else ())]
        return TransferAudit(
            publish.counts(), read.counts(), publish.bytes_sent, read.bytes_received, tuple(violations),
            publish.expired_requests,
        )  # fmt: skip


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
