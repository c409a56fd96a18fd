"""The connection to one incarnation of a worker: its channel, a health probe, the snapshot of its cache, and for a
decode worker the stream of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.block_identity import KEY_BYTES
from diptych.common.errors import DiptychError, InternalError, NoWorkerError
from diptych.common.secret import call_token
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import TIER_NAMES, TierDump
from diptych.common.tls import ClusterTls
from diptych.router.adapters.operations import LoadedAdapter
from diptych.router.cluster.decode_stream import DecodeStream
from diptych.router.cluster.patience import Patience
from diptych.router.cluster.token_pace import TokenPace
from diptych.rpc.channels import closed_is_an_error, open_channel
from diptych.rpc.errors import from_rpc_error, typed_error
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

_DUMP_TIMEOUT_S = 10.0
_RELEASE_TIMEOUT_S = 2.0
_LOAD_TIMEOUT_S = 40.0
"""A little longer than a worker's own limit."""
_RETRY_AFTER_S = 1.0
FIND_S = 0.5
"""For a look into a table: a worker that is stopped must not hold a request for long."""
_MAX_DUMP_KEYS = 4_000_000


@dataclass(frozen=True, slots=True)
class CacheDump:
    """Block keys by tier, and the last event of each that they include."""

    epoch: int
    tiers: tuple[TierDump, ...]


class WorkerLink:
    """The connection.

    Args:
        record: the lease under which the worker was found; address and incarnation never change within a link.
        receiving_s: seconds in which this process could receive, see loop_uptime.py.
        probe_s: pause between probes; each may take as long as `dead_s`. A stream that breaks is followed by one at once.
        on_ticket_status: called with a decode worker's TicketStatus messages.
        pace: of tokens, see DecodeStream.
        call_key: see common.secret.call_key; empty: calls carry no token.
        on_change: called when the worker becomes usable or stops being so.
    """

    def __init__(
        self,
        record: WorkerRecord,
        *,
        receiving_s: Callable[[], float],
        probe_s: float,
        dead_s: float,
        on_change: Callable[[], None],
        tls: ClusterTls | None = None,
        call_key: bytes = b"",
        on_ticket_status: Callable[[decode_pb2.TicketStatus], None] | None = None,
        pace: TokenPace | None = None,
    ) -> None:
        self.worker_id = record.worker_id
        self.incarnation = record.incarnation
        self._receiving_s = receiving_s
        self._probe_s = probe_s
        self._dead_s = dead_s
        self._on_change = on_change
        token = call_token(call_key, record.address) if call_key else ""
        self._channel = open_channel(record.address, tls, token)
        self.decode = (
            DecodeStream(
                self._channel,
                record.worker_id,
                pace=pace,
                on_change=self._on_stream_change,
                on_ticket_status=on_ticket_status,
            )
            if record.role == "decode"
            else None
        )
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._serving = False
        self._probed = False
        self._probe_now = asyncio.Event()
        self._broken = False
        """The last probe found no connection, or lost it."""
        self.refused = False
        """So did the one before, which may have found a connection that was only reset: nothing serves at the address."""
        self.patience = Patience(dead_s)
        self._asked: float | None = None
        """When the first probe was sent that has no answer yet; None: all have."""
        self._last_answer = receiving_s()
        self._batches_seen = 0

    def start(self) -> None:
        if self.decode is not None:
            self.decode.start()
        self._tasks.append(asyncio.create_task(self._probe_loop(), name=f"probe-{self.worker_id}"))

    async def close(self, why: str) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.decode is not None:
            await self.decode.close(why)
        await self._channel.close()

    @property
    def silent_s(self) -> float:
        """Receiving seconds since the last sign of life: an answer to a probe, or a message of its stream."""
        now = self._receiving_s()
        if self.decode is not None and self.decode.num_batches != self._batches_seen:
            self._batches_seen, self._last_answer = self.decode.num_batches, now
        return now - self._last_answer

    def why_not(self) -> str:
        """Why the worker is not usable now, or ""."""
        if self.silent_s > self._dead_s:
            return f"does not answer (for {self.silent_s:.1f} s)"
        if not self._probed:
            return "is being connected"
        if not self._serving:
            return "reports that it is not serving"
        if self.decode is not None and not self.decode.up:
            return "its request stream is down"
        return ""

    def _on_stream_change(self) -> None:
        """A stream that broke may mean that the process has ended: know it now."""
        self._probe_now.set()
        self._on_change()

    async def _probe_loop(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        while True:
            before, was_broken = (self.why_not(), self.refused), self._broken
            self._probe_now.clear()
            if self._asked is None:
                self._asked = self._receiving_s()
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._dead_s)
                self._answered(serving=answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError as err:
                if err.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._answered(serving=True)
                elif err.code() is grpc.StatusCode.UNAVAILABLE:
                    self._serving, self._broken, self.refused, self._asked = False, True, was_broken, None
            except grpc.aio.UsageError:
                return
            if (self.why_not(), self.refused) != before:
                self._on_change()
            if self._broken and not was_broken:
                continue  # whether anything listens there
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probe_s):
                    await self._probe_now.wait()

    def _answered(self, *, serving: bool) -> None:
        now = self._receiving_s()
        self.patience.on_answer(now - (now if self._asked is None else self._asked))
        self._last_answer, self._asked, self._probed, self._serving = now, None, True, serving
        self._broken = self.refused = False

    async def release_session(self, session: bytes) -> int | None:
        """End a session's claims. Returns: tokens whose KV is no longer cached; None: the worker did not answer."""
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            with closed_is_an_error():
                answer = await stub.ReleaseSession(
                    worker_pb2.ReleaseSessionRequest(session=session), timeout=_RELEASE_TIMEOUT_S
                )
        except grpc.aio.AioRpcError as err:
            if err.code() is grpc.StatusCode.UNIMPLEMENTED:  # an earlier version, which knows no claims
                return 0
            log.warning("a session could not be closed", worker=self.worker_id, error=err.code().name)
            return None
        except grpc.aio.UsageError:
            return None  # the channel was closed
        return int(answer.freed_tokens)

    async def find(self, key: bytes) -> str:
        """The ref of the answer that this decode worker keeps under the hash of an idempotency key; "": none, or it does not
        answer within FIND_S."""
        stub = decode_pb2_grpc.DecodeStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            with closed_is_an_error():
                answer = await stub.Find(decode_pb2.FindRequest(idempotency=key), timeout=FIND_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return ""
        return str(answer.resume_ref)

    async def load_adapter(self, folder: str) -> LoadedAdapter | DiptychError:
        """What the worker finds in the folder, or why it cannot load it. NoWorkerError: it cannot be asked, does not answer
        in time, or was lost meanwhile."""
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            with closed_is_an_error():
                answer = await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(folder=folder), timeout=_LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as err:
            if typed_error(err) is None and err.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return NoWorkerError(f"has not answered within {_LOAD_TIMEOUT_S:.0f} s", retry_after_s=_RETRY_AFTER_S)
            return from_rpc_error(err)
        except grpc.aio.UsageError:
            return NoWorkerError("was lost during the load", retry_after_s=_RETRY_AFTER_S)
        return LoadedAdapter(answer.id, answer.rank, answer.num_bytes, answer.base_model)

    async def unload_adapter(self, adapter_id: str) -> None:
        """A worker that does not answer keeps it until it needs the room."""
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            with closed_is_an_error():
                await stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(id=adapter_id), timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as err:
            log.warning("an adapter could not be unloaded", worker=self.worker_id, error=err.code().name)
        except grpc.aio.UsageError:
            return  # the channel was closed

    async def dump_blocks(self) -> CacheDump:
        """The content of the worker's prefix cache. Raises: DiptychError."""
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        held: dict[str, list[bytes]] = {name: [] for name in TIER_NAMES}
        unknown: set[str] = set()
        """Tiers of another version."""
        position = None
        try:
            with closed_is_an_error():
                async for part in stub.DumpBlocks(worker_pb2.DumpBlocksRequest(), timeout=_DUMP_TIMEOUT_S):
                    for tier in part.tiers:
                        keys, blob = held.get(tier.tier), tier.block_keys
                        if keys is None:
                            unknown.add(tier.tier)
                            continue
                        if len(blob) % KEY_BYTES or len(keys) + len(blob) // KEY_BYTES > _MAX_DUMP_KEYS:
                            raise InternalError(f"{self.worker_id}: a dump of {len(blob)} bytes is invalid")
                        keys += [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]
                    at = (part.epoch, {tier.tier: tier.sequence for tier in part.tiers})
                    if position is not None and position != at:
                        raise InternalError(f"{self.worker_id}: the parts of a dump have different positions")
                    position = at
        except grpc.aio.AioRpcError as err:
            raise from_rpc_error(err) from None
        except grpc.aio.UsageError:
            raise InternalError(f"{self.worker_id}: the channel was closed") from None
        if position is None:
            raise InternalError(f"{self.worker_id}: an empty dump")
        if unknown:
            log.warning("a dump has tiers that are unknown here", worker=self.worker_id, tiers=sorted(unknown))
        epoch, sequences = position
        return CacheDump(epoch, tuple(TierDump(sequences.get(name, 0), keys) for name, keys in held.items()))
