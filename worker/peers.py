"""Peers of a worker that reads KV: one handshake per incarnation of a worker that publishes it.

connect(ref) -> GetInfo -> another incarnation?  StaleReferenceError
                        -> facts differ?         IncompatibleWorkersError (cached until the worker restarts)
                        -> Peer                  (cached until drop, or until another incarnation is seen)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from diptych.common.compat import Compat, differences
from diptych.common.errors import DiptychError, IncompatibleWorkersError, StaleReferenceError, WorkerLostError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_parts import degrees
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.fabric.registry import in_gpu_memory
from diptych.kvtransfer.slabs.layout import layout_hash
from diptych.kvtransfer.slabs.planner import all_straight, check_parts_fit, is_identity
from diptych.rpc import convert
from diptych.rpc.channels import open_channel
from diptych.rpc.errors import describe, typed_error
from diptych.rpc.stubs import PrefillStub, SourceStub, WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych.worker import wire
from diptych.worker.refs import WorkerRef
from diptych.worker.role_spec import FULL_NAMES, PREFILL

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeerKv:
    """KV of a peer that must be converted, or put together anew for other ranks.

    Args:
        parts: by rank of the peer.
        is_converted: blocks or elements differ; else only layers and heads lie in other ranks.
    """

    parts: tuple[KvFormat, ...]
    is_converted: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that passed the handshake."""

    ref: WorkerRef
    pid: int
    feeds: tuple[PeerRef, ...]
    """Where the KV of each rank is read; one: that of all ranks, by part."""
    prefill: Any
    """Its PrefillStub."""
    channel: grpc.aio.Channel
    kv: PeerKv | None = None
    """How its KV lies, where that differs; None: as here, rank by rank."""
    request_fields: frozenset[str] = frozenset()
    """Later than the first version, that it knows."""
    services: set[str] = field(default_factory=set)
    """Full names of those that it offers; asked for again where one is missing, as its role may have changed."""
    source: Any = None
    """Its SourceStub."""

    def feed(self, part: int) -> PeerRef:
        """Where the KV of this rank is read."""
        return self.feeds[part if len(self.feeds) > 1 else 0]


class PeerDirectory:
    """All peers.

    Args:
        compat: this worker's facts.
        forget: called with the KV address of a dropped peer, to close its endpoint.
        allow_conversion: accept KV of another block size, dtype or order of heads, and convert it. KV of other ranks is accepted
            without.
        transport: the name of this worker's; empty: that of a peer is not compared.
    """

    def __init__(
        self,
        compat: Compat,
        *,
        forget: Callable[[PeerRef], Awaitable[None]],
        handshake_timeout_s: float = 2.0,
        allow_conversion: bool = False,
        transport: str = "",
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._compat = compat
        self._forget = forget
        self._timeout_s = handshake_timeout_s
        self._allow_conversion = allow_conversion
        self._transport = transport
        self._open_channel = open_channel
        self._peers: dict[WorkerRef, asyncio.Task[Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, ref: WorkerRef, service: str = PREFILL) -> Peer:
        """The peer of `ref`, which offers `service`; the handshake is done once. Raises: StaleReferenceError,
        IncompatibleWorkersError, WorkerLostError (cannot be reached in time)."""
        peer = await self._connect(ref)
        if FULL_NAMES[service] not in peer.services:
            info = await self._ask(ref, peer.channel)
            self._check_life(ref, info)
            peer.services.clear()
            peer.services.update(_services(info))
            if FULL_NAMES[service] not in peer.services:
                raise StaleReferenceError(f"{ref.worker_id} offers no {FULL_NAMES[service]} now")
        return peer

    async def _connect(self, ref: WorkerRef) -> Peer:
        task = self._peers.get(ref)
        if task is None:
            task = self._peers[ref] = asyncio.create_task(self._handshake(ref), name=f"handshake {ref.worker_id}")
            task.add_done_callback(lambda done: self._settle(ref, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not task.cancelled() or (current is not None and current.cancelling()):
                raise
            # Not this task but the handshake was cancelled: another incarnation of this worker was seen meanwhile.
            raise WorkerLostError(
                f"prefill worker {ref.worker_id} was given up: another incarnation of it was seen"
            ) from None

    def drop(self, ref: WorkerRef) -> None:
        """Forget a peer that is gone or was restarted. Idempotent. Its channel and KV endpoint are closed in the
        background, since closing is slow for a stopped peer."""
        task = self._peers.pop(ref, None)
        if task is None:
            return
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:
            closing = asyncio.create_task(self._close_peer(task.result()), name=f"close {ref.worker_id}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_peer(self, peer: Peer) -> None:
        for feed in peer.feeds:
            try:
                await self._forget(feed)
            except (DiptychError, TimeoutError) as error:
                log.warning("the endpoint of a lost peer did not close", peer=peer.ref.worker_id, error=repr(error))
        await peer.channel.close()

    async def close(self) -> None:
        for ref in list(self._peers):
            self.drop(ref)
        await asyncio.gather(*self._closing)

    def _settle(self, ref: WorkerRef, task: asyncio.Task[Peer]) -> None:
        """Cache a rejection for incompatibility, but no transient failure."""
        keep = not task.cancelled() and isinstance(task.exception(), (type(None), IncompatibleWorkersError))
        if not keep and self._peers.get(ref) is task:
            del self._peers[ref]

    async def _handshake(self, ref: WorkerRef) -> Peer:
        channel = self._open_channel(ref.address)
        try:
            info = await self._ask(ref, channel)
            feeds, kv = self._check(ref, info)
        except BaseException:
            await channel.close()
            raise
        for other in [known for known in self._peers if known.worker_id == ref.worker_id and known != ref]:
            self.drop(other)
        log.info(
            "connected to a prefill worker",
            peer=ref.worker_id,
            incarnation=ref.incarnation,
            transport=info.transport_path,
        )
        return Peer(
            ref, info.pid, feeds, PrefillStub(channel), channel, kv, frozenset(info.request_fields), _services(info),
            SourceStub(channel),
        )  # fmt: skip

    async def _ask(self, ref: WorkerRef, channel: grpc.aio.Channel) -> worker_pb2.GetInfoResponse:
        try:
            info: worker_pb2.GetInfoResponse = await WorkerStub(channel).GetInfo(
                worker_pb2.GetInfoRequest(), timeout=self._timeout_s
            )
            return info
        except grpc.RpcError as error:
            raise self._unreachable(ref, error) from None

    @staticmethod
    def _unreachable(ref: WorkerRef, error: grpc.RpcError) -> DiptychError:
        return typed_error(error) or WorkerLostError(
            f"prefill worker {ref.worker_id} at {ref.address} cannot be reached: {describe(error)}"
        )

    @staticmethod
    def _check_life(ref: WorkerRef, info: worker_pb2.GetInfoResponse) -> None:
        if (info.worker_id, info.incarnation) != (ref.worker_id, ref.incarnation):
            raise StaleReferenceError(
                f"{ref.address} is {info.worker_id}/{info.incarnation}, not {ref.worker_id}/{ref.incarnation}"
            )

    def _check(self, ref: WorkerRef, info: worker_pb2.GetInfoResponse) -> tuple[tuple[PeerRef, ...], PeerKv | None]:
        self._check_life(ref, info)
        theirs = convert.compat_from_proto(info.compat)
        different = differences(self._compat, theirs, converting=self._allow_conversion)
        if different:
            raise IncompatibleWorkersError(f"{ref.worker_id} does not match this worker: {'; '.join(different)}")
        address = wire.kv_address_from_proto(info.kv_address)
        if self._transport and address.transport != self._transport:
            raise IncompatibleWorkersError(
                f"KV of {ref.worker_id} is read over {address.transport}, and this worker uses {self._transport}: give both "
                "the same --transport"
            )
        source, target = theirs.parts, self._compat.parts
        plan, why = check_parts_fit(source, target), differences(self._compat, theirs)
        if not why and is_identity(plan, source, target):
            return (PeerRef(info.worker_id, info.incarnation, address),), None
        if address.transport in in_gpu_memory() and not all_straight(plan, source, target):
            raise IncompatibleWorkersError(
                f"KV of {ref.worker_id} lies in GPU memory ({address.transport}), where it is not converted, nor put together "
                f"for other ranks ({degrees(source)} there, {degrees(target)} here): give both a --transport of host memory"
            )
        if why:
            log.warning("KV of a worker is converted", peer=ref.worker_id, why=why)
        else:
            log.info(
                "KV of a worker comes from other ranks",
                peer=ref.worker_id,
                theirs=degrees(source),
                mine=degrees(target),
            )
        ref_of_kv = PeerRef(info.worker_id, info.incarnation, address, layout_hash(theirs))
        return (ref_of_kv,), PeerKv(source, is_converted=bool(why))


def _services(info: worker_pb2.GetInfoResponse) -> set[str]:
    """Of a prefill worker of an early version, which names none, the one that it has."""
    early = {FULL_NAMES[PREFILL]} if info.role == worker_pb2.WORKER_ROLE_PREFILL else set()
    return set(info.services) or early
