"""One request to one prefill worker to compute the prompt of an attempt, with its own attempt id.

    connect (handshake) -> Prefill call -> PrefillStarted
        Computed(handles)  -> read each slab (a few at once) -> verified -> UnpackRange -> RangeUnpacked -> acknowledged
        FirstTokens        -> digest matches the prompt? -> FirstToken to the engine at once
    every token of [decode_cached, num_tokens) received and verified, first token known  => complete: KvComplete
        the call is read until prefill closes it; its outcome then no longer matters

A call without a message for `silence_s` has failed: a stopped worker breaks no connection.

A failure before `complete` ends it with a typed error. Cancelling the task cancels the gRPC call, upon which prefill
frees everything of it; slabs being unpacked by the step thread are returned by the SlabUnpacker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from zlib import crc32

import structlog

from diptych.common.errors import (
    DiptychError,
    IncompatibleWorkersError,
    InternalError,
    StaleReferenceError,
    TransferError,
    WorkerLostError,
)
from diptych.common.kv_parts import degrees
from diptych.common.text.prompt_digest import prompt_digest
from diptych.decode.refetch_policy import PrefillRates
from diptych.decode.remote_prefill_facts import RemotePrefillFacts
from diptych.decode.spans import RemotePrefillSpan
from diptych.kvtransfer.api import ReceivedSlab
from diptych.kvtransfer.slabs.convert import RangeConverter
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.planner import first_token_to_ask
from diptych.rpc.convert import later_fields_of
from diptych.rpc.v1 import prefill_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.liveness_timer import LivenessTimer
from diptych.worker.peers import Peer
from diptych.worker.reads.block_pulls import BlockPulls
from diptych.worker.reads.coverage import KvCoverage
from diptych.worker.reads.range_reads import RangeReads, ReadContext, first_error, follow
from diptych.worker.refs import WorkerRef

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefillContext(ReadContext):
    """Shared by all remote prefills of a worker."""

    rates: PrefillRates
    pulls: BlockPulls | None = None
    """None: nothing is pulled."""
    backend: str = ""
    """The local back ends, for explanations."""


@dataclass(frozen=True, slots=True)
class RemotePrefillCallbacks:
    """Callbacks, called on the event loop."""

    on_first_token: Callable[[prefill_pb2.FirstToken], None]
    on_first_candidates: Callable[[list[prefill_pb2.FirstToken]], None]
    """Used by beam search instead."""
    on_complete: Callable[[], None]
    on_prompt_logprobs: Callable[[types_pb2.PromptLogprobs], None]
    on_all_given: Callable[[], None] = lambda: None
    """See AllGiven."""


class RemotePrefill:
    """One remote prefill.

    Args:
        attempt: the attempt whose blocks are filled; the request has a different id.
        ref: the prefill worker.
        num_tokens: KV is fetched for tokens [decode_cached_tokens, num_tokens).
        traceparent: the attempt's trace context.
    """

    def __init__(
        self,
        context: RemotePrefillContext,
        hooks: RemotePrefillCallbacks,
        *,
        attempt: str,
        ref: WorkerRef,
        request: prefill_pb2.PrefillRequest,
        num_tokens: int,
        traceparent: str = "",
    ) -> None:
        self._context = context
        self._hooks = hooks
        self._attempt = attempt
        self._ref = ref
        self._request = request
        self._num_tokens = num_tokens
        self._first = first = request.decode_cached_tokens if request.want_kv else num_tokens
        self._source = context.parts
        """The formats in which KV arrives, by rank of the peer."""
        self._converter: RangeConverter | None = None
        self._announced = KvCoverage(self._source, first, num_tokens)
        """By rank of the peer."""
        self._arrived = KvCoverage(context.parts, first, num_tokens)
        """By rank of this worker: what is in its blocks."""
        self._beam_search = request.sampling.beam_width > 0
        num_choices = 1 if self._beam_search else request.sampling.best_of or request.sampling.n or 1
        self._vouched = False
        """Prefill confirmed the tokens that it computed. Before that no output is sent and no token is decoded on this
        KV."""
        self._prompt_logprobs: list[types_pb2.PromptLogprobs] = []
        """Held until that confirmation."""
        self._choices_due = set() if request.output_token_ids else set(range(num_choices))
        self._window = asyncio.Semaphore(context.reads_in_flight)
        self._silence = LivenessTimer(context.silence_s)
        self._called = 0.0
        self._offers: asyncio.Queue[ReceivedSlab | DiptychError] = asyncio.Queue()
        """Slabs that came unasked, and why some could not be had."""
        self._given = 0
        """Tokens times layers of the KV handed to the engine for unpacking."""
        self.complete = False
        self.facts = RemotePrefillFacts()
        self._span = RemotePrefillSpan(traceparent, ref.worker_id, request.attempt)

    async def run(self) -> None:
        """Return when prefill closed the call after completion. Raises: DiptychError when it failed before."""
        failed: DiptychError | None = None
        try:
            await self._run()
        except DiptychError as error:
            failed = error
            raise
        finally:
            self._span.end(self.facts, failed)

    async def _run(self) -> None:
        peer = await self._context.peers.connect(self._ref)
        if unknown := later_fields_of(self._request) - peer.request_fields:
            raise IncompatibleWorkersError(
                f"prefill worker {self._ref.worker_id} is of a version that does not know {', '.join(sorted(unknown))}"
            )
        self.facts.prefill_pid = peer.pid
        self._expect_layout(peer)
        self._request.layer_groups = not self.facts.converted
        self._request.link_bytes_per_s = self._context.links.link(self._ref.worker_id)
        self._reads = reads = RangeReads(
            self._context, self._ref, self._request.attempt, self._source, self._announced,
            some_layers=self._request.layer_groups, most_s=self._request.remaining_s,
        )  # fmt: skip
        expects = self._expect(peer)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._watch()), group.create_task(reads.renew(peer))]
                if expects:
                    beside.append(group.create_task(self._take_offers(group)))
                try:
                    await self._follow(peer, group)
                finally:
                    for task in beside:
                        task.cancel()
                # Running fetches end on their own: each has a deadline.
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, (WorkerLostError, StaleReferenceError)):
                self._context.peers.drop(self._ref)
            if not self.complete:
                raise error from None
            log.info("prefill call ended badly after its KV was complete", attempt=self._attempt, error=str(error))
        finally:
            if expects:
                self._context.reader.unexpect(self._request.attempt)
            reads.close()
            while not self._offers.empty():
                if isinstance(left := self._offers.get_nowait(), ReceivedSlab):
                    self._context.reader.finish(left)
        if not self.complete:
            raise WorkerLostError(
                f"prefill worker {self._ref.worker_id} ended the call before all KV had arrived"
                + (f": {self._arrived.missing}" if self._arrived.missing else "")
            )

    def _expect_layout(self, peer: Peer) -> None:
        """What is to arrive: of window groups also what makes a hit of it, from a peer that knows how. Where the peer's KV lies
        in other ranks or blocks, whole blocks of its own, of those ranks of which anything is taken."""
        context, first, end = self._context, self._first, self._announced.end
        windows = any(group.window for group in context.kv.groups)
        self._request.reusable = reusable = wire.REUSABLE in peer.request_fields and windows
        if reusable:
            self._announced, self._arrived = (KvCoverage(self._source, first, end, reusable=True) for _ in range(2))
        if peer.kv is None or first >= end:
            return
        self._source, theirs = peer.kv.parts, degrees(peer.kv.parts)
        self._converter = converter = RangeConverter(
            self._source, context.parts, first, end, reusable=reusable, turn=crc32(self._request.attempt.encode())
        )
        asked = self._request.decode_cached_tokens = first_token_to_ask(first, self._source[0].block_size)
        self._announced = KvCoverage(self._source, asked, end, reusable=reusable, ranks=converter.ranks)
        if len(converter.ranks) < len(self._source):
            wire.ask_for_ranks(self._request, converter.ranks, peer.request_fields, self._ref.worker_id)
        name, mine = self._ref.worker_id, degrees(context.parts)
        if theirs != mine:
            self.facts.regrouped = f"KV of {name} ({theirs}) was put together for the ranks here ({mine})"
        if peer.kv.is_converted:
            self.facts.converted = f"KV of {name} was converted from {self._source[0]} to {context.parts[0]}"

    def _expect(self, peer: Peer) -> bool:
        """Slabs may come as they are published, where that spares a round trip and they are unpacked as they are."""
        if not self._request.want_kv or self._converter is not None or len(self._source) > 1:
            return False
        read_s = min(self._context.read_base_s, self._request.remaining_s)
        return self._context.reader.expect(peer.feed(0), self._request.attempt, self._on_offer, read_s=read_s)

    def _on_offer(self, slab: ReceivedSlab | DiptychError) -> None:
        """At once: the announcement may be the next event."""
        try:
            if isinstance(slab, DiptychError) or self._reads.take_offered(slab):
                self._offers.put_nowait(slab)
        except DiptychError as error:
            self._offers.put_nowait(error)

    async def _take_offers(self, group: asyncio.TaskGroup) -> None:
        """What comes before it is announced. Until prefill has vouched for it, it is KV like that of an early range: nothing
        is decoded on it."""
        while True:
            slab = await self._offers.get()
            if isinstance(slab, DiptychError):
                raise slab
            began = self._context.clock.now()
            self._span.announced()
            # The slab is the unpacker's before anything can be cancelled.
            group.create_task(self._unpacked(slab, self._unpack(slab), began))

    async def _watch(self) -> None:
        await self._silence.expired()
        raise WorkerLostError(f"prefill worker {self._ref.worker_id} sent nothing for {self._context.silence_s:g} s")

    async def _follow(self, peer: Peer, group: asyncio.TaskGroup) -> None:
        called = self._called = self._context.clock.now()
        call = peer.prefill.Prefill(self._request, timeout=self._request.remaining_s, metadata=self._span.metadata)
        async with aclosing(follow(call, self._ref, self._silence)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "started":
                        self.facts.cached_tokens = event.started.cached_tokens
                        self.facts.kept_tokens = event.started.kept_tokens
                        self.facts.prefill_pid = event.started.pid
                        self.facts.tiers = list(event.started.tiers)
                        self.facts.queue_s = self._context.clock.now() - called
                        if event.started.HasField("pulled"):
                            self.facts.pulled = event.started.pulled
                    case "computed":
                        self._span.announced()
                        for handle in self._reads.take(event.computed):
                            group.create_task(self._fetch(peer, handle))
                    case "first_tokens":
                        self._first_token(event.first_tokens)
                    case "prompt_logprobs":
                        self._prompt_logprobs.append(event.prompt_logprobs)

    def _computed(self, message: prefill_pb2.FirstTokens) -> None:
        """Once for each prompt, before the token that may end the answer."""
        facts, compute_s = self.facts, message.compute_s
        facts.kv_ranges_overlapped = message.num_ranges_overlapped
        facts.compute_s = compute_s
        # The start was reported with the first step's results: the time of that step was not queueing.
        facts.queue_s = max(0.0, min(facts.queue_s, self._context.clock.now() - self._called - compute_s))
        num_tokens = self._num_tokens - facts.cached_tokens
        self._context.rates.observe(self._ref.worker_id, num_tokens, compute_s=compute_s, queue_s=facts.queue_s)

    def _check_computed(self, message: prefill_pb2.FirstTokens) -> None:
        """Raises: TransferError when prefill computed other tokens, or does not report them."""
        name, known = self._ref.worker_id, message.computed_from
        if not message.HasField("computed_from") or not known.block_size:
            raise TransferError(f"prefill worker {name} does not report the tokens that it computed")
        if known.num_tokens != self._num_tokens:
            raise TransferError(
                f"prefill worker {name} computed {known.num_tokens} tokens, {self._num_tokens} were requested"
            )
        asked = [*self._request.prompt_token_ids, *self._request.output_token_ids][: self._num_tokens]
        if known.digest != prompt_digest(asked, known.block_size):
            raise TransferError(
                f"prefill worker {name} computed {known.num_tokens} tokens that differ from the requested ones"
            )

    def _first_token(self, message: prefill_pb2.FirstTokens) -> None:
        self._check_computed(message)
        if not self._vouched:
            self._computed(message)
        self._vouched = True
        for entries in self._prompt_logprobs:
            self._hooks.on_prompt_logprobs(entries)
        self._prompt_logprobs.clear()
        if self._beam_search:
            if message.tokens or not self._choices_due:
                raise InternalError(
                    "prefill sent first tokens that are not due: beam search waits for one list of candidates"
                )
            self._choices_due.clear()
            self._hooks.on_first_candidates(list(message.candidates))
            self._maybe_complete()
            return
        for token in message.tokens:
            if token.choice not in self._choices_due:
                raise InternalError(f"prefill sent a first token of choice {token.choice}, which is not due")
            self._choices_due.discard(token.choice)
            self._hooks.on_first_token(token)
        self._maybe_complete()
        if not self.complete and not self._choices_due and self._all_given:
            self._hooks.on_all_given()

    async def _fetch(self, peer: Peer, handle: SlabHandle) -> None:
        async with self._window:
            began = self._context.clock.now()
            slab = await self._reads.read(peer, handle)
            if self._converter is None:
                await self._unpacked(slab, self._unpack(slab), began)
                return
            self._count(slab)
            unpacked = await self._unpack_converted(self._converter, slab)
        self._done_with(handle, unpacked)

    def _count(self, slab: ReceivedSlab) -> None:
        """Before unpacking: after the last range the request runs, and may end, before the task that waits continues."""
        self.facts.path = slab.path
        self.facts.kv_bytes += slab.handle.size_bytes
        self.facts.kv_ranges += 1

    def _unpack(self, slab: ReceivedSlab) -> asyncio.Future[bool]:
        self._count(slab)
        # Announced ranges do not overlap, so the sum tells when everything announced was handed over.
        self._given += slab.handle.num_tokens * slab.handle.num_layers
        return self._context.unpacker.unpack(self._attempt, slab, last=self._vouched and self._all_given)

    @property
    def _all_given(self) -> bool:
        """Everything was announced and handed to the engine."""
        return self._announced.complete and self._given == self._announced.size

    async def _unpacked(self, slab: ReceivedSlab, answer: asyncio.Future[bool], began: float) -> None:
        unpacked = await answer
        self._reads.unpacked(slab, began)
        handle = slab.handle
        if unpacked:
            self._arrived.add(
                handle.group, handle.first_token, handle.num_tokens, handle.first_layer, handle.num_layers, handle.part
            )
        self._done_with(handle, unpacked)

    async def _unpack_converted(self, converter: RangeConverter, slab: ReceivedSlab) -> bool:
        """The slab is free as soon as its bytes were converted. Runs on the event loop: a few milliseconds a slab, only
        for pairs that need it."""
        unpacking = self._context.unpacker.unpack_converted(self._attempt, slab, converter)
        if not all(await asyncio.gather(*(answer for _, answer in unpacking))):
            return False
        for one, _ in unpacking:
            self._arrived.add(one.group, one.first_token, one.num_tokens, one.first_layer, one.num_layers, one.part)
        return True

    def _done_with(self, handle: SlabHandle, unpacked: bool) -> None:
        self._reads.done_with(handle)
        if not unpacked:
            raise TransferError("the engine dropped a range: the attempt does not wait for KV any more")
        self._maybe_complete()

    def _maybe_complete(self) -> None:
        if self._vouched and not self._choices_due and self._arrived.complete and not self.complete:
            self.complete = True
            self._span.complete(self.facts)
            self._hooks.on_complete()
