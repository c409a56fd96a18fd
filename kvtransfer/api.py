"""The interface of the transfer thread: one part publishes slabs, one reads them. Call all methods on the event-loop thread.

The transfer thread owns both ledgers, the arena of slabs and the transport, and drives the transport's progress. Calls go
into its inbox; results return by `loop.call_soon_threadsafe`.

    P: step thread packs -> RangePacked -> publish() -> SlabHandle -> gRPC -> D
    D: read(handle) -> ReceivedSlab (verified) -> engine unpacks -> finish() -> acknowledgement to P
    P: on_settled(attempt, slab)  -> the slab is granted again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

from diptych.common.errors import DiptychError
from diptych.engine.messages import Payload, RangePacked, SlabGrant
from diptych.kvtransfer.slabs.handle import SlabHandle


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where a worker's transport listens; see proto KvAddress."""

    transport: str
    host: str
    port: int
    blob: bytes = field(default=b"", repr=False)  # holds the token of its control messages


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One life of a peer. Another incarnation is another peer."""

    worker_id: str
    incarnation: str
    address: KvAddress
    layout_hash: int = 0
    """Of its KV, where that differs from ours and is converted; 0: it is as ours."""


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """free + packed + in_flight + settled + quarantined == total. A slab that is granted to the step thread is free."""

    total: int
    free: int
    packed: int
    in_flight: int
    settled: int
    quarantined: int

    def __add__(self, other: SlabCounts) -> SlabCounts:
        return SlabCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(SlabCounts)))


@dataclass(frozen=True, slots=True)
class TransferAudit:
    """Both parts of the arena."""

    publish: SlabCounts
    read: SlabCounts
    bytes_sent: int
    bytes_received: int
    violations: tuple[str, ...] = ()
    expired_requests: int = 0
    """Requests some of whose published slabs were taken back when their lease ended."""

    @property
    def slabs(self) -> SlabCounts:
        return self.publish + self.read


@dataclass(frozen=True, slots=True)
class ReceivedSlab:
    """A verified slab. `payload` is valid until finish(); one in GPU memory is verified when it is unpacked. `path`: the
    transport's path, for example "nixl:shm"."""

    handle: SlabHandle
    local_slab: int
    payload: Payload
    path: str = ""


TakeOffer = Callable[[ReceivedSlab | DiptychError], None]


class SlabPublisher(Protocol):
    """Publishing."""

    def start(
        self,
        on_grants: Callable[[tuple[SlabGrant, ...]], None],
        on_settled: Callable[[str, int], None],
        on_silent: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`on_grants` is called (from the transfer thread) whenever free slabs are lent to the step thread; `on_settled`
        (attempt, slab) on the event loop when decode acknowledged a slab or its lease ran out; `on_silent`
        (peer) there when `peer` sent no message about any of its slabs for a whole lease."""
        ...

    def publish(self, peer: str, packed: RangePacked) -> SlabHandle:
        """FREE(granted) -> PACKED: header and trailer are written, the lease begins, the handle may be sent to decode.
        `peer`: the life of the decode worker that it is for."""
        ...

    def return_grant(self, slab: int) -> None:
        """A granted slab that was packed for an attempt that is gone."""
        ...

    def release(self, attempt: str) -> None:
        """The attempt ended: PACKED slabs are free at once, IN_FLIGHT ones as soon as their send completes (else
        quarantined). Idempotent."""
        ...


class SlabReader(Protocol):
    """Reading."""

    async def read(self, peer: PeerRef, handle: SlabHandle, *, deadline_s: float) -> ReceivedSlab:
        """Fetch and verify one slab: header and trailer (attempt, generation), size, checksum. Waits for a free local slab.

        Args:
            deadline_s: seconds from now for all of it. When it passes, the local slab is quarantined until there is proof
                of death (the receive completes, or the endpoint closed), and the call raises at once.
        Raises: TransferError (timeout, refused handle with the typed reason, damaged payload, peer lost).
        """
        ...

    def expect(self, peer: PeerRef, attempt: str, take: TakeOffer, *, read_s: float) -> bool:
        """Until `unexpect`, slabs of the attempt may come as they are published: each, or why it cannot be had, is given to
        `take` on the event loop, or answers the `read` of its handle that was called meanwhile. Those that do not come are
        left to `read`.

        Args:
            read_s: the deadline of each, as of a read.
        Returns: whether any may come; else there is nothing to unexpect.
        """
        ...

    def unexpect(self, attempt: str) -> None:
        """Idempotent. Nothing is given to `take` any more; what comes is given back."""
        ...

    def finish(self, slab: ReceivedSlab) -> None:
        """Unpacked or no longer wanted: frees the local slab and acknowledges to prefill."""
        ...

    def renew(self, peer: PeerRef, handle: SlabHandle) -> None:
        """Restart the lease of an announced slab that waits because the link or the arena is busy."""
        ...

    async def forget(self, peer: PeerRef) -> None:
        """Close the endpoint to a peer that is gone."""
        ...


class Transfer(SlabPublisher, SlabReader, Protocol):
    address: KvAddress
    path: str
    """What the start-up self-test found, for example "ucx:tcp"."""

    @property
    def bytes_per_s(self) -> float:
        """Of whole reads; from the self-test at first, then measured online on decode's side."""
        ...

    @property
    def message_s(self) -> float:
        """What one more message costs both workers together, from the self-test; 0.0: not measured."""
        ...

    async def audit(self, full: bool = False) -> TransferAudit: ...

    async def close(self) -> None: ...
