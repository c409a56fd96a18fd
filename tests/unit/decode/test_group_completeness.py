"""Item: a KV group, or the KV of a rank, that is dropped, zeroed or mixed up in transit is noticed before a token is computed
from it: every mutation of every range of every group of every rank, through decode's own RemotePrefill and the slab's own
checks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import xxhash

from diptych.common.clock import MonotonicClock
from diptych.common.errors import DiptychError
from diptych.common.kv_format import KvFormat, KvGroup, KvKind, full_format, windowed_format
from diptych.common.kv_groups import GroupRange, expected_ranges
from diptych.common.kv_parts import split
from diptych.common.text.prompt_digest import prompt_digest
from diptych.decode.refetch_policy import PrefillRates
from diptych.decode.remote_prefill import RemotePrefill, RemotePrefillCallbacks, RemotePrefillContext
from diptych.engine.messages import RangeUnpacked
from diptych.kvtransfer.api import KvAddress, PeerRef, ReceivedSlab, TakeOffer
from diptych.kvtransfer.slabs.handle import SlabHandle, sign
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, check_slab, message_bytes, write_frame
from diptych.kvtransfer.slabs.planner import plan_parts, wanted_ranks
from diptych.rpc.v1 import prefill_pb2
from diptych.worker import peers as workers
from diptych.worker import wire
from diptych.worker.reads.coverage import Coverage
from diptych.worker.reads.link_rate import LinkRates
from diptych.worker.reads.slab_unpacker import SlabUnpacker
from diptych.worker.refs import WorkerRef

BLOCK, LENGTH, CACHED = 4, 26, 4
PROMPT = [(7 * i + 3) % 100 for i in range(LENGTH)]
LATENT = KvGroup(KvKind.LATENT, (0, 1), 1, (6,), "float16", BLOCK)
SIZES: dict[str, Any] = {"head_dim": 4, "block_size": BLOCK, "dtype": "float16"}
FORMATS: dict[str, tuple[KvFormat, ...]] = {
    "full": (full_format(2, 1, **SIZES),),
    "window": (windowed_format([0, 9, 9], 1, **SIZES),),
    "two windows": (windowed_format([5, 0, 12, 0], 1, **SIZES),),
    "only a window": (windowed_format([9, 9], 1, **SIZES),),
    "latent": (KvFormat((LATENT, replace(LATENT, kind=KvKind.FULL, layers=(2,), dims=(4, 4)))),),
    "two ranks": split(full_format(2, 2, **SIZES), tensor_parallel=2),
    "two stages": split(full_format(4, 1, **SIZES), pipeline=2),
    "stages with windows": split(windowed_format([0, 9, 9, 0], 1, **SIZES), pipeline=2),
    "stages of two ranks": split(full_format(4, 2, **SIZES), tensor_parallel=2, pipeline=2),
}
"""Of the ranks."""
_FULL, _WINDOWS = full_format(4, 2, **SIZES), windowed_format([0, 9, 9, 0], 2, **SIZES)
UNEQUAL: dict[str, tuple[tuple[KvFormat, ...], tuple[KvFormat, ...]]] = {
    f"{name}: {here} to {there}": (
        split(kv, tensor_parallel=here[0], pipeline=here[1]), split(kv, tensor_parallel=there[0], pipeline=there[1])
    )
    for name, kv, here, there in (
        ("full", _FULL, (2, 1), (4, 1)), ("full", _FULL, (4, 1), (4, 1)), ("full", _FULL, (2, 2), (1, 3)),
        ("full", _FULL, (1, 3), (1, 1)), ("full", _FULL, (4, 1), (1, 1)), ("windows", _WINDOWS, (2, 1), (1, 1)),
        ("windows", _WINDOWS, (1, 1), (2, 2)),
    )
}  # fmt: skip
"""Of the ranks of prefill, and of decode. Of four ranks two hold the same head."""
PAIRS = {kind: (parts, parts) for kind, parts in FORMATS.items()} | UNEQUAL


@dataclass
class Range:
    """What prefill announces, and what its slab holds when it is read."""

    handle: SlabHandle
    slab: bytearray


def sent(parts: tuple[KvFormat, ...], ranks: Sequence[int] = (), *, own_slabs: bool = False) -> list[Range]:
    """Each group's tokens in ranges of two blocks, intact. Args: ranks: of these only; empty: of all. own_slabs: each rank counts
    its slabs from 0."""
    return [Range(one.handle, bytearray(one.slab)) for one in _signed(parts, tuple(ranks), own_slabs)]


@cache
def _signed(parts: tuple[KvFormat, ...], ranks: tuple[int, ...], own_slabs: bool) -> list[Range]:
    ranges: list[Range] = []
    for rank, kv in enumerate(parts):
        if ranks and rank not in ranks:
            continue
        first = len(ranges) if own_slabs else 0
        for one in expected_ranges(kv, CACHED, LENGTH, reusable=True):
            ranges += _ranges(rank, kv, one, len(ranges) - first)
    return ranges


def _ranges(rank: int, kv: KvFormat, part: GroupRange, slab_number: int) -> list[Range]:
    ranges: list[Range] = []
    group = kv.groups[part.group]
    for first in range(part.first, part.end, 2 * BLOCK):
        num = min(2 * BLOCK, part.end - first)
        size = num * group.bytes_per_token(kv.shard)
        begin = rank * 131 + part.group * 97 + first * 31 + 1
        data = ((begin + 7 * np.arange(size)) % 251 + 1).astype(np.uint8).tobytes()
        handle = SlabHandle(
            "p0", "life", "a", slab_number + len(ranges), 1, first, num, 0, group.num_layers, 7, size,
            xxhash.xxh3_64_intdigest(data), 99,
            group=part.group, part=rank,
        )  # fmt: skip
        slab = bytearray(message_bytes(size))
        slab[HEADER_BYTES : HEADER_BYTES + size] = data
        write_frame(memoryview(slab), handle)
        ranges.append(Range(sign(b"k" * 32, handle), slab))
    return ranges


# ---- what can happen on the way ----

Mutation = Callable[[list[Range], int], list[Range] | None]
"""(all ranges, the one that is hit) -> what arrives; None: it does not apply."""


def _changed(**change: Any) -> Mutation:
    def mutate(ranges: list[Range], at: int) -> list[Range] | None:
        handle = ranges[at].handle
        values = {name: new(handle, ranges) for name, new in change.items()}
        if any(value is None for value in values.values()):
            return None
        ranges[at] = Range(replace(handle, **values), ranges[at].slab)
        return ranges

    return mutate


def _payload(change: Callable[[bytearray, int], None]) -> Mutation:
    def mutate(ranges: list[Range], at: int) -> list[Range]:
        change(ranges[at].slab, ranges[at].handle.size_bytes)
        return ranges

    return mutate


def _zero(slab: bytearray, size: int) -> None:
    slab[HEADER_BYTES : HEADER_BYTES + size] = bytes(size)


def _zero_all(slab: bytearray, size: int) -> None:
    slab[:] = bytes(len(slab))


def _flip(slab: bytearray, size: int) -> None:
    slab[HEADER_BYTES + size // 2] ^= 1


def _plane(one: Range) -> tuple[int, int]:
    return one.handle.part, one.handle.group


def _drop_group(ranges: list[Range], at: int) -> list[Range]:
    return [one for one in ranges if _plane(one) != _plane(ranges[at])]


def _drop_rank(ranges: list[Range], at: int) -> list[Range]:
    return [one for one in ranges if one.handle.part != ranges[at].handle.part]


def _swap_slabs(ranges: list[Range], at: int) -> list[Range] | None:
    other = next((one for one in ranges if _plane(one) != _plane(ranges[at])), None)
    if other is None:
        return None
    one = ranges[at]
    one.slab, other.slab = other.slab, one.slab
    return ranges


MUTATIONS: dict[str, Mutation] = {
    "a range is dropped": lambda ranges, at: ranges[:at] + ranges[at + 1 :],
    "a group is dropped": _drop_group,
    "a rank is dropped": _drop_rank,
    "a range comes twice in place of another": lambda ranges, at: [*ranges[:at], ranges[at - 1], *ranges[at + 1 :]],
    "a payload is zeroed": _payload(_zero),
    "a slab is zeroed": _payload(_zero_all),
    "a bit is flipped": _payload(_flip),
    "slabs of two groups or ranks are swapped": _swap_slabs,
    "a range is called another rank's": _changed(
        part=lambda handle, ranges: next((one.handle.part for one in ranges if one.handle.part != handle.part), 1)
    ),
    "a range is called another group's": _changed(
        group=lambda handle, ranges: next((one.handle.group for one in ranges if one.handle.group != handle.group), 1)
    ),
    "a range is moved by a block": _changed(first_token=lambda handle, _: handle.first_token + BLOCK),
    "a range is cut by a token": _changed(num_tokens=lambda handle, _: handle.num_tokens - 1),
    "a layer is missing": _changed(num_layers=lambda handle, _: handle.num_layers - 1),
    "layers are moved": _changed(first_layer=lambda handle, _: 1),
    "the checksum is another's": _changed(checksum=lambda handle, _: handle.checksum ^ 1),
    "another generation": _changed(generation=lambda handle, _: handle.generation + 1),
}


def sent_in(kind: str) -> list[Range]:
    """What prefill sends of the ranks of which decode takes anything."""
    source, target = PAIRS[kind]
    return sent(source, () if kind in FORMATS else wanted_ranks(plan_parts(source, target, crc32(b"a"))))


def cases() -> Iterator[tuple[str, str, int]]:
    for kind in PAIRS:
        for name, mutate in MUTATIONS.items():
            for at in range(len(sent_in(kind))):
                if mutate(sent_in(kind), at) is not None:
                    yield kind, name, at


# ---- decode's side ----


class Peer:
    """Announces, and serves what it announced; then ends the call. `offers`: what arrives intact comes before that,
    unasked."""

    def __init__(
        self, ranges: list[Range], num_feeds: int = 1, *, offers: bool = False, kv: workers.PeerKv | None = None
    ) -> None:
        self._offers, self._kv = offers, kv
        self.unpacker = SlabUnpacker(self, self)
        self._take: TakeOffer | None = None
        self.finished: list[SlabHandle] = []
        self._handles = [one.handle for one in ranges]
        self.feeds = tuple(PeerRef("p0", "life", KvAddress("inproc", "", port)) for port in range(num_feeds))
        self._slabs = {(self.feeds[one.handle.part % num_feeds], one.handle.slab): one.slab for one in ranges}
        self.renewed: set[tuple[PeerRef, int]] = set()
        self.go = asyncio.Event()
        """Reads wait for it."""
        self.go.set()
        self.began = False
        """The engine was told that nothing is missing."""

    async def connect(self, ref: WorkerRef) -> Any:
        prefill: Any = SimpleNamespace(Prefill=self.call)
        return workers.Peer(ref, 1, self.feeds, prefill, prefill, self._kv, frozenset({wire.REUSABLE, wire.RANKS}))

    def drop(self, ref: WorkerRef) -> None: ...

    def call(self, request: Any, **_: Any) -> Call:
        return Call(self._events())

    async def _events(self) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted())
        for handle in self._handles if self._offers and self._take is not None else ():
            try:
                self._take(await self.read(self.feeds[0], handle, deadline_s=1.0))
            except DiptychError as error:
                self._take(error)
            if handle.first_token != self._handles[0].first_token:  # the others while it is announced, or later
                await asyncio.sleep(0)
        known = prefill_pb2.ComputedFrom(num_tokens=LENGTH, digest=prompt_digest(PROMPT, BLOCK), block_size=BLOCK)
        token = prefill_pb2.FirstToken(choice=0, token_id=5)
        first = prefill_pb2.FirstTokens(tokens=[token], computed_from=known, num_ranges_overlapped=3, compute_s=0.25)
        yield prefill_pb2.PrefillEvent(first_tokens=first)
        for handle in self._handles:
            yield prefill_pb2.PrefillEvent(
                computed=prefill_pb2.Computed(
                    first_token=handle.first_token, num_tokens=handle.num_tokens, handles=[wire.handle_to_proto(handle)]
                )
            )
        yield prefill_pb2.PrefillEvent(finished=prefill_pb2.PrefillFinished(num_ranges=len(self._handles)))
        for _ in range(20):
            await asyncio.sleep(0)

    # the reader
    async def read(self, peer: PeerRef, handle: SlabHandle, *, deadline_s: float) -> ReceivedSlab:
        await self.go.wait()
        slab = bytearray(self._slabs[peer, handle.slab]).ljust(message_bytes(handle.size_bytes), b"\0")
        error = check_slab(memoryview(slab), handle)
        if error is not None:
            raise error
        return ReceivedSlab(handle, 0, memoryview(slab)[HEADER_BYTES : HEADER_BYTES + handle.size_bytes], "test")

    def expect(self, peer: PeerRef, attempt: str, take: TakeOffer, *, read_s: float) -> bool:
        assert (peer, attempt) == (self.feeds[0], "a")
        self._take = take
        return self._offers

    def unexpect(self, attempt: str) -> None:
        self._take = None

    def finish(self, slab: ReceivedSlab) -> None:
        self.finished.append(slab.handle)

    def renew(self, peer: PeerRef, handle: SlabHandle) -> None:
        self.renewed.add((peer, handle.slab))
        if self.renewed == set(self._slabs):
            self.go.set()

    # the engine
    def send(self, command: Any) -> None:
        self.began = self.began or command.last
        self.unpacker.on_unpacked(RangeUnpacked(command.attempt, command.job, True))


class Call:
    def __init__(self, events: AsyncIterator[Any]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._events

    def cancel(self) -> None: ...


async def begins(parts: tuple[KvFormat, ...], ranges: list[Range], peer: Peer | None = None) -> bool:
    """Whether decode computes a token on what arrived. `parts`: its own ranks."""
    peer = peer or Peer(ranges)
    context = RemotePrefillContext(
        peers=peer, reader=peer, unpacker=peer.unpacker, links=LinkRates(), clock=MonotonicClock(), kv=parts[0],
        kv_parts=parts, rates=PrefillRates(), silence_s=600.0, renew_every_s=0.0,
    )  # type: ignore[arg-type]  # fmt: skip
    completed: list[bool] = []

    def on_complete() -> None:
        # The answer may end here, and its explanation with it.
        assert (leg.facts.kv_ranges_overlapped, leg.facts.compute_s) == (3, 0.25)
        completed.append(True)

    hooks = RemotePrefillCallbacks(
        on_first_token=lambda token: None, on_first_candidates=lambda tokens: None, on_complete=on_complete,
        on_prompt_logprobs=lambda logprobs: None,
    )  # fmt: skip
    request = prefill_pb2.PrefillRequest(
        attempt="a", prompt_token_ids=PROMPT, want_kv=True, decode_cached_tokens=CACHED, remaining_s=60.0
    )
    leg = RemotePrefill(
        context, hooks, attempt="a", ref=WorkerRef("p0", "life", "x:1"), request=request, num_tokens=LENGTH
    )
    try:
        await leg.run()
    except DiptychError:
        return bool(completed)
    return bool(completed) or peer.began


@pytest.mark.parametrize("kind", FORMATS)
async def test_undisturbed_kv_of_every_group_is_used(kind: str) -> None:
    assert await begins(FORMATS[kind], sent(FORMATS[kind]))
    assert await begins(FORMATS[kind], sent(FORMATS[kind])[::-1]), "in any order"
    assert await begins(FORMATS[kind], sent(FORMATS[kind]), Peer(sent(FORMATS[kind]), offers=True))


def unequal(kind: str, ranges: list[Range]) -> Peer:
    return Peer(ranges, kv=workers.PeerKv(UNEQUAL[kind][0], is_converted=False))


@pytest.mark.parametrize("kind", UNEQUAL)
async def test_undisturbed_kv_of_other_ranks_is_used(kind: str) -> None:
    target, ranges = UNEQUAL[kind][1], sent_in(kind)
    assert await begins(target, ranges, unequal(kind, ranges))
    assert await begins(target, ranges[::-1], unequal(kind, ranges[::-1])), "in any order"


async def test_a_rank_that_was_not_asked_for_is_noticed() -> None:
    source, target = UNEQUAL["full: (4, 1) to (1, 1)"]
    assert not await begins(target, sent(source), unequal("full: (4, 1) to (1, 1)", sent(source)))


async def test_an_offer_that_is_announced_as_another_range_is_noticed() -> None:
    ranges = sent(FORMATS["full"])
    peer = Peer(ranges, offers=True)
    announced = peer._handles
    peer._handles = [announced[0], *announced]
    assert not await begins(FORMATS["full"], ranges, peer), "it comes twice"
    assert len(peer.finished) == len(peer._handles), "the second goes back, and all that is unpacked"
    peer = Peer(ranges, offers=True)

    events = peer._events()

    async def other() -> AsyncIterator[Any]:
        async for event in events:
            if event.HasField("computed"):
                event.computed.handles[0].slab += 1
            yield event

    peer._events = other  # type: ignore[method-assign]
    assert not await begins(FORMATS["full"], ranges, peer)


@pytest.mark.parametrize("kind", ["two ranks", "two stages", "stages of two ranks"])
async def test_each_rank_may_have_a_feed_of_its_own(kind: str) -> None:
    """With slabs that bear the same numbers. All are renewed while they wait, each where it is read."""
    parts = FORMATS[kind]
    ranges = sent(parts, own_slabs=True)
    assert len({one.handle.slab for one in ranges}) < len(ranges)
    peer = Peer(ranges, len(parts))
    peer.go.clear()
    async with asyncio.timeout(60):
        assert await begins(parts, ranges, peer)


async def test_without_the_checks_they_would_not_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = FORMATS["window"]
    dropped, zeroed = MUTATIONS["a group is dropped"], MUTATIONS["a payload is zeroed"]
    monkeypatch.setattr(Coverage, "complete", property(lambda self: True))
    assert await begins(kv, dropped(sent(kv), 0) or [])
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "check_slab", partial(check_slab, verify_checksum=False))
    assert await begins(kv, zeroed(sent(kv), 0) or [])


async def test_every_mutation_of_every_range_is_noticed() -> None:
    missed, count = [], 0
    for kind, name, at in cases():
        mutated = MUTATIONS[name](sent_in(kind), at)
        assert mutated is not None
        count += 1
        for offers in (False, True) if kind in FORMATS else (False,):
            peer = Peer(mutated, offers=offers) if kind in FORMATS else unequal(kind, mutated)
            if await begins(PAIRS[kind][1], mutated, peer):
                missed.append((kind, name, at, offers))
    assert count > 450
    assert not missed
