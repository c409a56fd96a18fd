"""What every read of announced ranges from a peer shares: the handles are checked against what was asked for, their leases are
renewed while they wait, and each slab is read with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError, InternalError, RequestDeadlineError, TransferError, WorkerLostError
from diptych.common.kv_format import KvFormat
from diptych.engine.messages import DeviceRange
from diptych.kvtransfer.api import ReceivedSlab, SlabReader
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.rpc.errors import describe, from_failure, typed_error
from diptych.rpc.v1 import prefill_pb2
from diptych.worker import wire
from diptych.worker.liveness_timer import LivenessTimer
from diptych.worker.peers import Peer, PeerDirectory
from diptych.worker.reads.coverage import KvCoverage
from diptych.worker.reads.link_rate import LinkRates
from diptych.worker.reads.slab_unpacker import SlabUnpacker
from diptych.worker.refs import WorkerRef

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """Shared by all reads of a worker."""

    peers: PeerDirectory
    reader: SlabReader
    unpacker: SlabUnpacker
    links: LinkRates
    clock: Clock
    kv: KvFormat
    """The local KV format: groups, and what must arrive of each."""
    kv_parts: tuple[KvFormat, ...] = ()
    """The ranks' formats, where there are several: what must arrive of each."""
    same_bits: bool = False
    """KV does not depend on the batch that it was computed in."""
    reads_in_flight: int = 4
    read_base_s: float = 10.0
    silence_s: float = 3.0
    """After this many seconds without a message from a publishing worker it counts as lost."""
    renew_every_s: float = 5.0
    """Interval at which the leases of announced slabs are renewed: a fraction of the slab lease."""

    @property
    def parts(self) -> tuple[KvFormat, ...]:
        """What this worker's ranks must have, and the formats in which KV of a peer like it arrives, by rank."""
        return self.kv_parts or (self.kv,)


class RangeReads:
    """The announced ranges of one call.

    Args:
        attempt: which handles must name.
        source: the formats in which KV arrives, by rank.
        expected: what must be announced; nothing else may be.
        some_layers: handles of some layers are accepted.
        most_s: no read takes longer.
    """

    def __init__(
        self,
        context: ReadContext,
        ref: WorkerRef,
        attempt: str,
        source: Sequence[KvFormat],
        expected: KvCoverage,
        *,
        some_layers: bool = False,
        most_s: float,
    ) -> None:
        self._context, self._ref, self._attempt = context, ref, attempt
        self._source, self._some_layers, self._most_s = source, some_layers, most_s
        self.announced = expected
        self._held: dict[tuple[int, int, int], SlabHandle] = {}
        """Announced, not yet unpacked: by rank, since each may have slabs of its own, by slab and generation."""
        self._offered: set[SlabHandle] = set()
        """Whose slabs came before they were announced."""
        self._early: dict[SlabHandle, ReceivedSlab] = {}
        """Slabs that came between their announcement and the call of `read`."""

    def take(self, computed: prefill_pb2.Computed) -> list[SlabHandle]:
        """The handles of an announced range, checked against the request; without those that came unasked. Raises:
        TransferError."""
        handles = [wire.handle_from_proto(message) for message in computed.handles]
        position = computed.first_token
        for handle in handles:
            if handle not in self._offered:
                self._check(handle)
            if handle.first_token != position:
                raise TransferError(f"a handle begins at token {handle.first_token}, expected {position}")
            position += handle.num_tokens
        if position != computed.first_token + computed.num_tokens:
            raise TransferError("the handles do not cover the announced range")
        return [handle for handle in handles if handle not in self._offered]

    def take_offered(self, slab: ReceivedSlab) -> bool:
        """A slab came unasked. Returns: whether it is to be unpacked now; else it was announced already, and `read` returns
        it. Raises: TransferError: it is not of this request, and goes back."""
        handle = slab.handle
        if self._held.get((handle.part, handle.slab, handle.generation)) == handle and handle not in self._offered:
            self._early[handle] = slab
            return False
        try:
            self._check(handle)
        except TransferError:
            self._context.reader.finish(slab)
            raise
        self._offered.add(handle)
        return True

    def close(self) -> None:
        """What came unasked and was not read goes back."""
        while self._early:
            self._context.reader.finish(self._early.popitem()[1])

    def _check(self, handle: SlabHandle) -> None:
        if (handle.worker_id, handle.incarnation) != (self._ref.worker_id, self._ref.incarnation):
            raise TransferError(
                f"a handle names {handle.worker_id}/{handle.incarnation}, another worker than the requested one"
            )
        if handle.attempt != self._attempt:
            raise TransferError(f"a handle names attempt {handle.attempt}, not {self._attempt}")
        if handle.part >= len(self._source):
            raise TransferError(f"a handle names rank {handle.part} of {len(self._source)}")
        source = self._source[handle.part]
        if handle.group >= len(source.groups):
            raise TransferError(f"a handle names KV group {handle.group} of {len(source.groups)}")
        kv_group = source.groups[handle.group]
        all_layers = kv_group.num_layers
        if handle.num_layers != all_layers and not self._some_layers:
            raise TransferError(f"a handle covers layers {handle.first_layer}+{handle.num_layers}, not all of them")
        layer_bytes = kv_group.layer_bytes_per_token(source.shard)
        if handle.size_bytes != handle.num_tokens * layer_bytes * handle.num_layers:
            raise TransferError(
                f"a handle of {handle.num_tokens} tokens and {handle.num_layers} of {all_layers} layers claims "
                f"{handle.size_bytes} bytes"
            )
        self.announced.add(
            handle.group, handle.first_token, handle.num_tokens, handle.first_layer, handle.num_layers, handle.part
        )
        self._held[handle.part, handle.slab, handle.generation] = handle

    async def renew(self, peer: Peer) -> None:
        """A slab must not be reclaimed while it waits because the link is slow or the ring is full. Renew while this
        runs; each read has a separate deadline."""
        while True:
            await asyncio.sleep(self._context.renew_every_s)
            for handle in self._held.values():
                self._context.reader.renew(peer.feed(handle.part), handle)

    async def read(self, peer: Peer, handle: SlabHandle) -> ReceivedSlab:
        """Raises: TransferError, see SlabReader.read."""
        if (early := self._early.pop(handle, None)) is not None:
            return early
        context = self._context
        limit_s = context.links.read_deadline_s(self._ref.worker_id, handle.size_bytes, base_s=context.read_base_s)
        began, arrived = context.clock.now(), 0
        context.links.began(self._ref.worker_id, began)
        try:
            slab = await context.reader.read(peer.feed(handle.part), handle, deadline_s=min(limit_s, self._most_s))
            # Bytes that a GPU will copy have not been transferred yet.
            arrived = 0 if isinstance(slab.payload, DeviceRange) else handle.size_bytes
        finally:
            context.links.ended(self._ref.worker_id, arrived, context.clock.now())
        if not isinstance(slab.payload, DeviceRange):
            context.links.observe(self._ref.worker_id, handle.size_bytes, began, context.clock.now())
        return slab

    def unpacked(self, slab: ReceivedSlab, began: float) -> None:
        """Measure what was transferred only then: bytes of a peer's GPU."""
        if isinstance(slab.payload, DeviceRange):
            self._context.links.observe(self._ref.worker_id, slab.handle.size_bytes, began, self._context.clock.now())

    def done_with(self, handle: SlabHandle) -> None:
        """It is unpacked, or not wanted any more."""
        self._held.pop((handle.part, handle.slab, handle.generation), None)


async def follow(call: Any, ref: WorkerRef, silence: LivenessTimer) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
    """The events of a call to a publishing worker; close it, and the call is cancelled. Raises: the error that the worker sent;
    RequestDeadlineError; WorkerLostError."""
    try:
        async for event in call:
            silence.on_message()
            if event.WhichOneof("event") == "failure":
                raise from_failure(event.failure)
            yield event
    except grpc.RpcError as error:
        raise typed_error(error) or _lost(ref, error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not this task but the call was cancelled: another read found the worker lost and closed its channel.
        raise WorkerLostError(f"{ref.worker_id} was given up by another request") from None
    finally:
        call.cancel()


def _lost(ref: WorkerRef, error: grpc.RpcError) -> DiptychError:
    """grpc generated this status: the deadline passed, or the peer is gone."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestDeadlineError(f"{ref.worker_id} did not answer in time")
    return WorkerLostError(f"{ref.worker_id} was lost: {describe(error)}")


def first_error(errors: BaseException) -> DiptychError:
    """The error that ended a group of tasks: its first leaf."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    if isinstance(errors, DiptychError):
        return errors
    log.error("unexpected error in a read of KV", exc_info=errors)
    return InternalError(f"unexpected error in a read of KV: {errors!r}")
