"""Pulls of a prompt's leading blocks from another worker's prefix cache (docs/decisions/kv-pulls.md).

    PullBlocks -> PullStarted(keys) -> connect -> Source.Fetch(keys)
        started: so many of them the holder has  -> Computed(handles) -> read -> verified -> UnpackRange -> acknowledged
    finished, failed or too late -> EndPull, and at once the request itself
        -> Pulled: the leading blocks that are here are in the prefix cache, and the request behind it finds them

A pull has no error: what has not come is computed. It ends when it has taken as long as computing would, or when its
holder, a handle, a slab or the call is not as it should be. `PullFacts.note` says why. Its time is that of a timer on the event
loop, from the first command on; the engine is not waited for: it handles EndPull before what is sent after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from zlib import crc32

import msgspec
import structlog

from diptych.common.errors import (
    DiptychError,
    IncompatibleWorkersError,
    InvalidRequestError,
    StaleReferenceError,
    TransferError,
    WorkerLostError,
)
from diptych.common.kv_groups import hit_end
from diptych.common.request import Prompt
from diptych.common.secret import tenant_of
from diptych.engine.messages import EndPull, EngineEvent, Failed, PullBlocks, Pulled, PullStarted, RangeUnpacked
from diptych.kvtransfer.slabs.convert import ConvertedRange, RangeConverter
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.planner import plan_parts, wanted_ranks
from diptych.rpc.fields import same_fields
from diptych.rpc.v1 import prefill_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.liveness_timer import LivenessTimer
from diptych.worker.peers import Peer
from diptych.worker.ports import Engine
from diptych.worker.reads.coverage import KvCoverage
from diptych.worker.reads.range_reads import RangeReads, ReadContext, first_error, follow
from diptych.worker.refs import WorkerRef
from diptych.worker.role_spec import DECODE, FULL_NAMES, SOURCE

log = structlog.get_logger(__name__)

SOURCE_ATTEMPT = "source/"
"""In front of the attempt of a fetch: the holder itself may run the request that the reader's attempt names."""
LEAST_S = 0.05
"""No pull is given up before."""
FORGET_S = 60.0
"""The measured overhead of a pull halves in this time: a holder that was slow is tried again."""
_ALPHA = 0.3


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where leading blocks of a prompt may be taken from.

    Args:
        num_tokens: leading tokens of which `holder` has the KV.
        compute_s: predicted seconds to compute what the reader lacks of them.
    """

    holder: WorkerRef
    num_tokens: int
    compute_s: float


def parse_source(message: types_pb2.KvSource, param: str) -> KvSource:
    """Raises: InvalidRequestError."""
    ref = message.holder
    if not (ref.worker_id and ref.incarnation and ref.address):
        raise InvalidRequestError("a source of KV has no id, incarnation or address", param=f"{param}.holder")
    if not 0.0 <= message.compute_s < float("inf"):
        raise InvalidRequestError(f"compute_s={message.compute_s} is no time", param=f"{param}.compute_s")
    return KvSource(WorkerRef(ref.worker_id, ref.incarnation, ref.address), message.num_tokens, message.compute_s)


@dataclass(slots=True)
class PullFacts:
    """What a pull did. See proto KvPull. `num_tokens` and the engine's own note are there before an event of a request that was
    sent to the engine after the pull.

    Args:
        duration_s: that the request was held up for it.
        source_tiers: see proto.
    """

    reader: str
    holder: str
    first_token: int = 0
    num_tokens: int = 0
    kv_bytes: int = 0
    duration_s: float = 0.0
    note: str = ""
    other_bits: bool = False
    source_tiers: tuple[tuple[str, int], ...] = ()


class _Pull:
    """One pull, until the engine has ended it."""

    def __init__(self, begin: PullBlocks, fetch: _Fetch, facts: PullFacts) -> None:
        self.begin, self.fetch, self.facts = begin, fetch, facts
        self.events: asyncio.Queue[PullStarted | Pulled | Failed] = asyncio.Queue()
        self.last: Pulled | Failed | None = None
        """The engine has ended it; None: it has blocks for it."""
        self.is_ending = False
        """EndPull was sent."""
        self.is_left = False
        """What the engine says now is waited for by nobody."""
        self.is_late = False


class BlockPulls:
    """All pulls of a worker.

    Args:
        me: this worker's reference.
        on_pulled: called with the facts of each pull that a holder was asked for.
    """

    def __init__(
        self,
        engine: Engine,
        context: ReadContext,
        me: Callable[[], WorkerRef],
        on_pulled: Callable[[PullFacts], None] = lambda facts: None,
    ) -> None:
        self._engine, self._context, self._me, self._on_pulled = engine, context, me, on_pulled
        self._open: dict[str, _Pull] = {}
        self._overheads: dict[str, tuple[float, float]] = {}
        """By holder: seconds, and when they were measured."""
        self._met: set[WorkerRef] = set()
        """Holders whose first pull, which connects, is over."""
        self._coming: dict[bytes, asyncio.Event] = {}
        """By the key of a block that a pull is bringing: set when that pull has ended."""

    def __len__(self) -> int:
        return len(self._open)

    def overheads(self) -> dict[str, float]:
        """By holder: measured seconds of a pull beside the transfer of its bytes."""
        now = self._context.clock.now()
        return {name: seconds * 0.5 ** ((now - at) / FORGET_S) for name, (seconds, at) in self._overheads.items()}

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        """The engine's events of one step, of all attempts."""
        for event in events:
            if isinstance(event, RangeUnpacked):
                self._context.unpacker.on_unpacked(event)
            elif isinstance(event, PullStarted | Pulled | Failed) and (pull := self._open.get(event.attempt)):
                pull.events.put_nowait(event)
                if not isinstance(event, PullStarted):
                    pull.last = event
                    if pull.is_left:
                        self._finish(pull)

    async def pull(
        self,
        source: KvSource,
        prompt: Prompt,
        *,
        attempt: str,
        request_id: str,
        remaining_s: float,
        vouch: bool = False,
    ) -> PullFacts | None:
        """Take what this worker lacks of the prompt's leading blocks. What is sent to the engine next finds them in its prefix
        cache, from which they may be evicted. Returns: None: nothing was lacking. May be cancelled.

        Args:
            attempt: unique among this worker's pulls.
            vouch: see PullBlocks.
        """
        me, clock = self._me(), self._context.clock
        size = self._context.kv.groups[0].block_size
        end = min(source.num_tokens // size * size, hit_end(size, len(prompt.token_ids)))
        if not end or source.holder.worker_id == me.worker_id:
            return None
        name, began = f"pull/{attempt}", clock.now()
        limit_s = min(max(LEAST_S, source.compute_s), remaining_s)
        wanted = msgspec.structs.replace(prompt, token_ids=prompt.token_ids[:end])
        begin = PullBlocks(name, wanted, tenant_of(prompt.cache_salt), vouch)
        facts = PullFacts(me.worker_id, source.holder.worker_id)
        fetch = _Fetch(source.holder, name, request_id, end, began + limit_s)
        pull = self._open[name] = _Pull(begin, fetch, facts)
        try:
            await self._bring_in_time(pull, limit_s)
        except BaseException:
            self._end(pull)
            del self._open[name]
            raise
        facts.duration_s = clock.now() - began
        self._end(pull)
        pull.is_left = True
        if (last := pull.last) is None:
            return facts  # the rest of them comes with the engine's answer
        if isinstance(last, Pulled) and not facts.note and last.num_tokens == end and not last.num_new:
            del self._open[name]
            return None
        self._finish(pull)
        return facts

    def _end(self, pull: _Pull) -> None:
        if pull.last is None and not pull.is_ending:
            pull.is_ending = True
            self._engine.send(EndPull(pull.fetch.name))

    def _finish(self, pull: _Pull) -> None:
        """The engine has ended it, and nobody waits for it."""
        facts, last, fetch = pull.facts, pull.last, pull.fetch
        assert last is not None
        del self._open[fetch.name]
        if isinstance(last, Failed):
            facts.note = facts.note or last.error.message
        else:
            facts.num_tokens = last.num_new
            facts.note = facts.note or last.note
        if facts.note:
            log.info(
                "not all KV was pulled",
                attempt=fetch.name,
                request_id=fetch.request_id,
                holder=facts.holder,
                why=facts.note,
            )
        if pull.is_late or not facts.note:
            self._observe(pull)
        self._on_pulled(facts)

    @contextmanager
    def _bringing(self, keys: Sequence[bytes]) -> Iterator[None]:
        ended = asyncio.Event()
        self._coming.update(dict.fromkeys(keys, ended))
        try:
            yield
        finally:
            ended.set()
            for key in keys:
                if self._coming.get(key) is ended:
                    del self._coming[key]

    def _observe(self, pull: _Pull) -> None:
        """One that was given up would have taken longer: it only raises the mean. Without these the mean would be that of the
        fast ones, and the slow ones would be planned again and again."""
        facts, now = pull.facts, self._context.clock.now()
        rate, seconds = self._context.links.link(facts.holder), facts.duration_s
        if pull.fetch.holder in self._met and (rate or pull.is_late):
            overhead = max(0.0, seconds - facts.kv_bytes / rate) if rate else seconds
            known, _ = self._overheads.get(facts.holder, (overhead, now))
            if overhead >= known or not pull.is_late:
                self._overheads[facts.holder] = known + _ALPHA * (overhead - known), now
        self._met.add(pull.fetch.holder)

    async def _bring_in_time(self, pull: _Pull, limit_s: float) -> None:
        facts, waits_for = pull.facts, pull.facts.reader
        try:
            async with asyncio.timeout(limit_s):
                started = await self._begin(pull)
                if started is not None:
                    waits_for = facts.holder
                    size = self._context.kv.groups[0].block_size
                    facts.first_token = started.num_cached_tokens
                    with self._bringing(started.keys[started.num_cached_tokens // size :]):
                        await self._fetch(pull.fetch, started, facts)
        except TimeoutError:
            pull.is_late = True
            facts.note = f"{waits_for} took longer than computing would have ({limit_s:.3g} s)"
        except DiptychError as error:
            facts.note = f"{facts.holder}: {error.reason}: {error.message}"
        except Exception as error:  # a bug must not end the request
            log.exception("unexpected error in a pull", attempt=pull.fetch.name)
            facts.note = f"{facts.holder}: unexpected error: {error!r}"

    async def _begin(self, pull: _Pull) -> PullStarted | None:
        """None: nothing is to be fetched."""
        size = self._context.kv.groups[0].block_size
        while True:
            pull.last, pull.is_ending = None, False
            self._engine.send(pull.begin)
            event = await pull.events.get()
            if not isinstance(event, PullStarted):
                return None
            other = self._coming.get(event.keys[event.num_cached_tokens // size])
            if other is None:
                return event
            # Another pull is bringing the same blocks: what it has not brought is taken afterwards.
            self._end(pull)
            await pull.events.get()
            await other.wait()

    async def _fetch(self, fetch: _Fetch, started: PullStarted, facts: PullFacts) -> None:
        """Raises: DiptychError; what has arrived is with the engine then."""
        ref = fetch.holder
        peer = await self._context.peers.connect(ref, SOURCE)
        if peer.kv is not None and peer.kv.is_converted:
            raise IncompatibleWorkersError(f"{ref.worker_id} has another KV format")
        left_s = max(fetch.until - self._context.clock.now(), 0.001)
        facts.other_bits = not self._context.same_bits and FULL_NAMES[DECODE] in peer.services
        request = prefill_pb2.FetchRequest(
            attempt=fetch.name,
            request_id=fetch.request_id,
            block_keys=b"".join(started.keys),
            cached_tokens=started.num_cached_tokens,
            source=wire.ref_to_proto(ref),
            reader=wire.ref_to_proto(self._me()),
            remaining_s=left_s,
        )
        silence = LivenessTimer(self._context.silence_s)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_watch(silence, ref, self._context.silence_s))
                try:
                    await self._follow(peer, request, fetch, facts, silence, group)
                finally:
                    watch.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, (WorkerLostError, StaleReferenceError)):
                self._context.peers.drop(ref)
            raise error from None

    async def _follow(
        self,
        peer: Peer,
        request: prefill_pb2.FetchRequest,
        fetch: _Fetch,
        facts: PullFacts,
        silence: LivenessTimer,
        group: asyncio.TaskGroup,
    ) -> None:
        held, reads, arrived, renewing = request.cached_tokens, None, None, None
        context, converter = self._context, None
        source, turn = context.parts if peer.kv is None else peer.kv.parts, crc32(fetch.name.encode())
        if peer.kv is not None:
            ranks = wanted_ranks(plan_parts(source, context.parts, turn))
            if len(ranks) < len(source):
                wire.ask_for_ranks(request, ranks, peer.request_fields, peer.ref.worker_id)
        window = asyncio.Semaphore(self._context.reads_in_flight)

        async def take(handle: SlabHandle, reads: RangeReads, arrived: KvCoverage) -> None:
            async with window:
                began = self._context.clock.now()
                slab = await reads.read(peer, handle)
                facts.kv_bytes += handle.size_bytes
                ranges: list[ConvertedRange | SlabHandle] = [handle]
                if converter is None:
                    unpacked = await context.unpacker.unpack(fetch.name, slab, pull=True)
                else:
                    unpacking = context.unpacker.unpack_converted(fetch.name, slab, converter, pull=True)
                    ranges = [one for one, _ in unpacking]
                    unpacked = all(await asyncio.gather(*(answer for _, answer in unpacking)))
                reads.unpacked(slab, began)
            reads.done_with(handle)
            if not unpacked:
                raise TransferError("the engine dropped a range: the pull has ended")
            for one in ranges:
                arrived.add(one.group, one.first_token, one.num_tokens, one.first_layer, one.num_layers, one.part)

        call = peer.source.Fetch(request, timeout=request.remaining_s)
        taking: list[asyncio.Task[None]] = []
        try:
            async with aclosing(follow(call, peer.ref, silence)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "alive":
                        continue
                    if reads is None or arrived is None:
                        found = self._check_started(event, held, fetch, facts)
                        if found <= held:
                            return
                        reads = RangeReads(
                            context, peer.ref, SOURCE_ATTEMPT + fetch.name, source,
                            KvCoverage(source, held, found, ranks=request.ranks or None), most_s=request.remaining_s,
                        )  # fmt: skip
                        arrived = KvCoverage(context.parts, held, found)
                        if peer.kv is not None:
                            converter = RangeConverter(source, context.parts, held, found, turn=turn)
                        renewing = group.create_task(reads.renew(peer))
                    elif event.WhichOneof("event") == "computed":
                        taking += [
                            group.create_task(take(handle, reads, arrived)) for handle in reads.take(event.computed)
                        ]
            await asyncio.gather(*taking)
        finally:
            if renewing is not None:
                renewing.cancel()
        if arrived is None or not arrived.complete:
            raise WorkerLostError(f"{peer.ref.worker_id} ended the call before all KV had arrived")

    def _check_started(self, event: prefill_pb2.PrefillEvent, held: int, fetch: _Fetch, facts: PullFacts) -> int:
        """Returns: the leading tokens that will be here; at most `held`: nothing comes. Raises: TransferError."""
        kind = event.WhichOneof("event")
        if kind != "started":
            raise TransferError(f"{fetch.holder.worker_id} sent {kind} before it said what it has")
        found, size = int(event.started.cached_tokens), self._context.kv.groups[0].block_size
        if found > fetch.end or found % size:
            raise TransferError(f"{fetch.holder.worker_id} has {found} of {fetch.end} tokens in blocks of {size}")
        if found < fetch.end:
            facts.note = f"{fetch.holder.worker_id} had {found} of {fetch.end} tokens"
            if any(group.window for group in self._context.kv.groups):
                return held  # what the token at `found` sees has no place here
        facts.source_tiers = _of_the_last(found - held, [(one.tier, one.tokens) for one in event.started.tiers])
        return found


def _of_the_last(num_tokens: int, tiers: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Of the last tokens those in lower tiers, nearest tier first: of what a holder has, the farthest tier has the end."""
    out = []
    for tier, count in reversed(tiers):
        if (part := min(count, num_tokens)) > 0:
            out.append((tier, part))
            num_tokens -= part
    return tuple(reversed(out))


@dataclass(frozen=True, slots=True)
class _Fetch:
    holder: WorkerRef
    name: str
    request_id: str
    end: int
    until: float


async def _watch(silence: LivenessTimer, ref: WorkerRef, silence_s: float) -> None:
    await silence.expired()
    raise WorkerLostError(f"{ref.worker_id} sent nothing for {silence_s:g} s")


def source_to_proto(source: KvSource | None) -> types_pb2.KvSource | None:
    if source is None:
        return None
    return types_pb2.KvSource(
        holder=wire.ref_to_proto(source.holder), num_tokens=source.num_tokens, compute_s=source.compute_s
    )


def pull_to_proto(facts: PullFacts) -> types_pb2.KvPull:
    tiers = wire.tier_tokens_to_proto(facts.source_tiers)
    return types_pb2.KvPull(**same_fields(PullFacts, facts, but=("source_tiers",)), source_tiers=tiers)
