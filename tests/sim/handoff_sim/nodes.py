"""Workers on virtual time: the real scheduler, ledgers and services; a fake model, wire and channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from handoff_sim.channel import SimCall, SimChannel
from handoff_sim.engine import BLOCK, LAYERS, MAX_LEN, VOCAB, Context, SimEngine
from handoff_sim.files import Mirror
from handoff_sim.laws import Law
from handoff_sim.links import Node
from handoff_sim.offers import OfferingSimTransport
from handoff_sim.wire import SimTransport

from diptych.common.tiers import DEVICE, TIER_NAMES
from diptych.decode.attempt_manager import AttemptManager
from diptych.decode.refetch_policy import PrefillRates
from diptych.decode.remote_prefill import RemotePrefillContext
from diptych.engine.messages import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    EngineEvent,
    GrantSlabs,
    RangePacked,
    SlabGrant,
    TierEvicted,
    TierStored,
)
from diptych.engine.overlap import Overlap
from diptych.kvtransfer.api import SlabCounts
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.core import TICK_S, TransferCore
from diptych.kvtransfer.ledgers.ledger import SlabState
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.layout import SlabQuotas
from diptych.prefill.sessions import PrefillSessions
from diptych.rpc import convert
from diptych.rpc.fields import same_fields
from diptych.rpc.v1 import worker_pb2
from diptych.worker import wire
from diptych.worker.incoming import Limits
from diptych.worker.peers import PeerDirectory
from diptych.worker.reads.block_pulls import BlockPulls
from diptych.worker.reads.link_rate import LinkRates
from diptych.worker.reads.range_reads import ReadContext
from diptych.worker.reads.slab_unpacker import SlabUnpacker
from diptych.worker.refs import WorkerRef

Find = Callable[[str], "WorkerNode | None"]
"""The living worker at an address."""


class SimTransfer:
    """A TransferCore polled on virtual time that checks every transition of a slab."""

    def __init__(self, context: Context, node: Node, layout: int) -> None:
        self._ctx, self._node = context, node
        self._scheduled = False
        self._tick: Any = None
        sizes = context.sizes
        self.transport = (OfferingSimTransport if sizes.offers else SimTransport)(context.wires, node, self._kick)
        self.core = TransferCore(
            self.transport,
            TransferConfig(
                transport="inproc", slab_bytes=4096, num_slabs=sizes.num_slabs, lease_s=sizes.lease_s,
                peer_quota=min(sizes.quota, sizes.num_slabs), quarantine_cap=sizes.cap,
            ),
            worker_id=node.worker_id, incarnation=node.incarnation, quotas=SlabQuotas(sizes.num_slabs, sizes.num_slabs),
            layout_hash=layout, num_layers=LAYERS,
            bytes_per_s=1e9, loop=context.loop, clock=context.loop.time, wake=self._kick,
        )  # fmt: skip
        self.publisher: Any = self.core._publisher._ledger
        self.reader: Any = self.core._reader._ledger
        for ledger, first in ((self.publisher, 0), (self.reader, sizes.num_slabs)):
            ledger.table.move = partial(self._watched_move, ledger, ledger.table.move, first)
        self.on_free: Callable[[int, str], None] = lambda slab, why: None
        node.on_resume.append(self._kick)
        self._kick()

    def _watched_move(self, ledger: Any, move: Any, first: int, index: int, to: SlabState, why: str) -> Any:
        """`first`: the ledger's slab 0 in the arena."""
        if to is SlabState.FREE:
            if first + index in self.transport.touching():
                self._ctx.report(
                    Law.ONE_USER, f"{self._node.worker_id}: slab {index} freed ({why}) while the network may touch it"
                )
            if first + index in self.transport.lent():
                self._ctx.report(
                    Law.ONE_USER, f"{self._node.worker_id}: slab {index} freed ({why}) while it is unpacked"
                )
            if ledger is self.publisher:
                self.on_free(index, why)
        sent = to is SlabState.IN_FLIGHT and ledger is self.publisher
        if sent and ledger._outstanding[index].expires <= self._ctx.loop.time():
            self._ctx.report(Law.HANDLES, f"{self._node.worker_id}: slab {index} is sent after its lease")
        return move(index, to, why)

    def _kick(self) -> None:
        if not self._scheduled and not self._node.dead and not self._node.stopped:
            self._scheduled = True
            self._ctx.loop.call_later(self._ctx.rng.random() * 0.001, self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._node.dead or self._node.stopped:
            return
        self.core.turn()
        self._check()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if self.core._inbox or self.transport.busy():
            self._kick()
        elif self.core._waiting or any(count.free < count.total for count in self._counts()):
            # Otherwise all slabs are free and no read waits: a poll would do nothing.
            wait = min(self.core.next_due() - self._ctx.loop.time(), TICK_S)
            self._tick = self._ctx.loop.call_later(max(0.0, wait), self._kick)

    def _check(self) -> None:
        for broken in (*self.core._publisher.check(), *self.core._reader.check(), *self.core._violations):
            self._ctx.report(Law.ACCOUNTS, f"{self._node.worker_id}: {broken}")
        self.core._violations.clear()
        busy: dict[str, int] = {}
        for read in self.reader._reads.values():
            busy[read.peer] = busy.get(read.peer, 0) + (read.slab is not None)
        if any(count > self._ctx.sizes.quota for count in busy.values()):
            self._ctx.report(Law.QUOTAS, f"{self._node.worker_id}: a peer holds more slabs than its quota: {busy}")

    def _counts(self) -> tuple[SlabCounts, SlabCounts]:
        return self.core._publisher.counts(), self.core._reader.counts()

    def left_over(self) -> list[str]:
        out = []
        for counts in self._counts():
            if counts.free != counts.total:
                out.append(f"{self._node.worker_id}: slabs are left: {counts}")
        if self.transport.num_open:
            out.append(f"{self._node.worker_id}: {self.transport.num_open} operations are left")
        if self.core._waiting or self.core._lent:
            out.append(f"{self._node.worker_id}: reads are left")
        return out

    def stop(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self.core.shut()


class WorkerNode:
    """What a worker of either role has: it publishes, reads, and pulls."""

    role = worker_pb2.WORKER_ROLE_PREFILL
    services = ("diptych.rpc.v1.Prefill", "diptych.rpc.v1.Source")

    def __init__(self, context: Context, worker_id: str, incarnation: str, address: str, find: Find) -> None:
        self.context = context
        self.node = Node(worker_id, incarnation)
        self.ref = WorkerRef(worker_id, incarnation, address)
        self.calls: dict[SimCall, None] = {}
        self.channels: list[SimChannel] = []
        decodes = self.role == worker_pb2.WORKER_ROLE_DECODE
        facts = context.sizes.facts(decodes)
        self.compat = facts.compat
        self.transfer = SimTransfer(context, self.node, facts.layout)
        self.lent: set[int] = set()
        self.mirror = Mirror()
        self.readers: Callable[[], list[WorkerNode]] = list
        self.engine = SimEngine(context, self.node, lambda events: self.on_events(events), decodes=decodes)
        self.limits = Limits(worker_id, incarnation, VOCAB, MAX_LEN, BLOCK, len(self.compat.parts))
        self.handoffs = PrefillSessions(
            self.engine,  # type: ignore[arg-type]
            self,
            self.limits,
            max_sessions=8,
            alive_every_s=context.sizes.silence_s / 3,
        )
        self.granted: dict[int, int] = {}
        self.publishes = self.drains = False

        def open_channel(address: str) -> Any:
            channel = SimChannel(context.links, self.node, find(address))
            self.channels.append(channel)
            return channel

        async def forget(peer: Any) -> None:
            await self.transfer.core.forget(peer)

        self.peers = PeerDirectory(self.compat, forget=forget, handshake_timeout_s=0.5, open_channel=open_channel)
        self.desk = SlabUnpacker(self.engine, self.transfer.core)  # type: ignore[arg-type]
        self.transfer.transport.lent = lambda: (
            self.lent | {lent.slab.local_slab for lent, _ in self.desk._open.values() if lent is not None}
        )
        self.reading = ReadContext(
            peers=self.peers, reader=self.transfer.core, unpacker=self.desk, links=LinkRates(),
            clock=context.loop, kv=self.compat.kv, kv_parts=self.compat.kv_parts, reads_in_flight=2,
            read_base_s=context.sizes.read_base_s, silence_s=context.sizes.silence_s, renew_every_s=context.sizes.lease_s / 4,
        )  # type: ignore[arg-type]  # fmt: skip
        self.pulls = BlockPulls(self.engine, self.reading, lambda: self.ref)  # type: ignore[arg-type]
        self.handoffs.pulls = self.pulls

    def publish_from_now(self) -> None:
        self.publishes = True
        self.transfer.on_free = self._on_free
        self.transfer.core.start(self._on_grants, self.handoffs.on_settled, lambda peer: self.handoffs.on_silent(peer))

    def on_events(self, events: list[EngineEvent]) -> None:
        self._note_cache(events)
        self.pulls.on_step(events)
        self.handoffs.on_step(events)

    def _note_cache(self, events: list[EngineEvent]) -> None:
        for event in events:
            wrong = ""
            match event:
                case BlocksStored(sequence, keys):
                    wrong = self.mirror.take(DEVICE, sequence, keys, ())
                case BlocksEvicted(sequence, keys):
                    wrong = self.mirror.take(DEVICE, sequence, (), keys)
                case TierStored(tier, sequence, keys):
                    wrong = self.mirror.take(tier, sequence, keys, ())
                case TierEvicted(tier, sequence, keys):
                    wrong = self.mirror.take(tier, sequence, (), keys)
                case CacheCleared():
                    self.mirror.clear()
            if wrong:
                self.context.report(Law.EVENTS, f"{self.ref.worker_id}: {wrong}")

    def check_end(self) -> list[tuple[Law, str]]:
        """Laws of a worker that has nothing to do any more."""
        self._note_cache(self.engine.core.take_events())
        files = [] if self.context.files is None else self.context.files.check_end(self)
        out = [(Law.FILES_ACCOUNT, broken) for broken in files]
        for tier, dump in zip(TIER_NAMES, self.engine.core.scheduler.kv.pool.dump().tiers, strict=True):
            if (known := self.mirror.tiers.get(tier, set())) != set(dump.keys):
                wrong = len(known ^ set(dump.keys))
                out.append((Law.EVENTS, f"{self.ref.worker_id}: {wrong} blocks of tier {tier} are known wrongly"))
        return out

    def info(self) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(
            worker_id=self.ref.worker_id, incarnation=self.ref.incarnation, role=self.role, pid=1,
            compat=convert.compat_to_proto(self.compat), services=self.services,
            kv_address=wire.kv_address_to_proto(self.transfer.core.address),
            request_fields=wire.REQUEST_FIELDS if self.context.sizes.reusable else (),
        )  # fmt: skip

    # ---- SlabPublisher: the real door, watched ----

    def start(self, on_grants: object, on_settled: object, on_silent: object) -> None:
        raise AssertionError("started above")

    def publish(self, peer: str, packed: RangePacked) -> SlabHandle:
        self._given_back(packed.slab)
        self.context.check_packed(packed)
        return self.transfer.core.publish(peer, packed)

    def return_grant(self, slab: int) -> None:
        self._given_back(slab)
        self.transfer.core.return_grant(slab)

    def release(self, attempt: str) -> None:
        self.transfer.core.release(attempt)

    def _given_back(self, slab: int) -> None:
        if self.granted.pop(slab, None) is None:
            self.context.report(Law.FREED_ONCE, f"{self.ref.worker_id}: slab {slab} came back, but was not granted")

    def _on_grants(self, grants: tuple[SlabGrant, ...]) -> None:
        for grant in grants:
            if grant.slab in self.granted:
                self.context.report(Law.ONE_USER, f"{self.ref.worker_id}: slab {grant.slab} was granted twice")
            if grant.slab in self.transfer.transport.touching():
                self.context.report(
                    Law.ONE_USER, f"{self.ref.worker_id}: slab {grant.slab} was granted while it is being sent"
                )
            self.granted[grant.slab] = grant.generation
        if blocks := self.context.sizes.slab_blocks:
            most = blocks * BLOCK * self.engine.core.scheduler.limits.kv_bytes_per_token
            grants = tuple(replace(grant, payload=grant.payload[:most]) for grant in grants)
        self.engine.send(GrantSlabs(grants, Overlap(self.context.sizes.overlap)))

    def _on_free(self, slab: int, why: str) -> None:
        """A release caused by a message of decode must come from the slab's own reader."""
        if why not in ("acknowledged", "given up by decode"):
            return
        handle = self.transfer.publisher._outstanding[slab].handle
        name = (handle.worker_id, handle.incarnation, handle.slab, handle.generation)
        for reader in self.readers():
            for future, wanted in reader.transfer.core._waiting.values():
                mine = (wanted.worker_id, wanted.incarnation, wanted.slab, wanted.generation)
                if mine == name and not future.done() and not reader.node.dead:
                    self.context.report(
                        Law.FREED_ONCE,
                        f"{self.ref.worker_id}: slab {slab} freed ({why}) while its reader waits for it",
                    )

    def die(self) -> None:
        self.node.dead = True
        self.transfer.transport.die()
        for call in list(self.calls):
            call.broken()
        for channel in self.channels:
            for call in list(channel.calls):
                call.cancel()
        self.handoffs.fail_all()

    def left_over(self) -> list[str]:
        out = [*self.engine.left_over(), *self.transfer.left_over()]
        if self.context.files is not None:
            out += self.context.files.left_over(self)
        if self.handoffs.num_sessions:
            out.append(f"{self.ref.worker_id}: legs are left: {self.handoffs.states()}")
        if len(self.pulls):
            out.append(f"{self.ref.worker_id}: {len(self.pulls)} pulls are left")
        if self.desk.num_open:
            out.append(f"{self.ref.worker_id}: {self.desk.num_open} slabs are with the step thread")
        held, total = self.engine.core.scheduler.packing.slabs_held, self.context.sizes.num_slabs
        if self.publishes and not len(self.granted) == held == total:
            out.append(
                f"{self.ref.worker_id}: of {total} slabs {len(self.granted)} are granted, {held} with the step thread"
            )
        return out


class PrefillNode(WorkerNode):
    def __init__(self, context: Context, worker_id: str, incarnation: str, find: Find) -> None:
        super().__init__(context, worker_id, incarnation, f"{worker_id}:{incarnation}", find)
        self.publish_from_now()


class DecodeNode(WorkerNode):
    role = worker_pb2.WORKER_ROLE_DECODE
    services = ("diptych.rpc.v1.Decode", "diptych.rpc.v1.Source")

    def __init__(self, context: Context, worker_id: str, incarnation: str, find: Find) -> None:
        super().__init__(context, worker_id, incarnation, worker_id, find)
        tools = RemotePrefillContext(**same_fields(ReadContext, self.reading), rates=PrefillRates(), pulls=self.pulls)  # type: ignore[arg-type]
        self.intake = AttemptManager(
            self.engine,  # type: ignore[arg-type]
            tools,
            self.limits,
            path="sim",
            max_attempts=16,
        )

    def on_events(self, events: list[EngineEvent]) -> None:
        super().on_events(events)
        self.intake.on_step(events)

    def vanish(self, *, unnoticed: bool) -> None:
        """`unnoticed`: its host is gone, and no connection reports it."""
        self.node.silenced = unnoticed
        if unnoticed:
            self.node.dead = True
            self.handoffs.fail_all()
        else:
            self.die()
        self.intake.fail_all()

    def left_over(self) -> list[str]:
        out = super().left_over()
        if self.intake.num_attempts:
            out.append(f"{self.ref.worker_id}: attempts are left: {self.intake.states()}")
        return out
