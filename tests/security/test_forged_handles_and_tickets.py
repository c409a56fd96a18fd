"""Forged, stale and twice used: handles of slabs, and placement tickets. Whatever field is changed, however it is changed, the
answer is a typed refusal, and what was forged stays usable for who has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.clock import FakeClock
from diptych.common.errors import DiptychError, StaleReferenceError, TicketRefusedError, TransferError
from diptych.common.sampling import SamplingParams
from diptych.common.secret import call_token
from diptych.common.ticket import MAGIC, seal, unseal
from diptych.decode.submission import parse_submit
from diptych.decode.ticket_verifier import TicketVerifier
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import MAC_BYTES, Refusal, SlabHandle, decode, encode, verify
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import decode_pb2, prefill_pb2
from diptych.worker.incoming import Limits
from diptych.worker.wire import handle_from_proto, handle_to_proto

DEADLINE_S = 60.0
SIZE = 1000
WIRE = list(prefill_pb2.SlabHandle.DESCRIPTOR.fields)
BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}

# ---- handles ----


def other_value(field: Any, value: Any) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_STRING:
        near = st.sampled_from([f"{value}x", value[1:], value.upper(), f"{value} ", f"{value}\0"])
        return (near | st.text(max_size=40)).filter(lambda new: new != value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        bit = st.integers(0, 8 * MAC_BYTES - 1).map(
            lambda at: (int.from_bytes(value, "big") ^ 1 << at).to_bytes(MAC_BYTES, "big")
        )
        return (bit | st.binary(max_size=64) | st.just(value + b"\0")).filter(lambda new: new != value)
    most = 2 ** BITS[field.type] - 1
    near = st.sampled_from([0, 1, value + 1, max(0, value - 1), value ^ 1 << 31, most])
    return (near | st.integers(0, most)).filter(lambda new: new != value)


class Desk:
    """A prefill and a decode Transfer, with a loop that a property can drive."""

    def __init__(self, lease_s: float = 1000.0) -> None:
        self.runner = asyncio.Runner()
        self.grants: asyncio.Queue[SlabGrant]
        self.runner.run(self._start(lease_s))

    async def _start(self, lease_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.grants = asyncio.Queue()

        def build(worker_id: str, **role: bool) -> Any:
            config = TransferConfig(transport="inproc", slab_bytes=4096, num_slabs=2, peer_quota=2, lease_s=lease_s)
            return build_transfer(config, worker_id=worker_id, incarnation="i", layout_hash=7, loop=loop, **role)

        self.p, self.d = build("p0", publishes=True), build("d0", reads=True)
        self.ref = PeerRef("p0", "i", self.p.address)
        self.p.start(
            lambda grants: [loop.call_soon_threadsafe(self.grants.put_nowait, g) for g in grants] and None,
            lambda attempt, slab: None,
        )

    async def publish(self, attempt: str = "att", fill: int = 5) -> SlabHandle:
        grant = await asyncio.wait_for(self.grants.get(), DEADLINE_S)
        grant.payload[:SIZE] = bytes([fill]) * SIZE
        digest = xxhash.xxh3_64_intdigest(grant.payload[:SIZE])
        packed = RangePacked(attempt, grant.slab, grant.generation, 0, 16, SIZE, digest)
        handle: SlabHandle = self.p.publish("d0", packed)
        return handle

    async def read(self, handle: SlabHandle) -> bytes:
        """Also through a reader that checks nothing of the handle itself: prefill must."""
        received = await self.d.read(self.ref, handle, deadline_s=DEADLINE_S)
        content = bytes(received.payload)
        self.d.finish(received)
        return content

    async def refusal(self, handle: SlabHandle) -> DiptychError:
        with pytest.raises((TransferError, StaleReferenceError)) as caught:
            await self.read(handle)
        return caught.value

    def close(self) -> None:
        async def close() -> None:
            await self.d.close()
            await self.p.close()

        self.runner.run(close())
        self.runner.close()


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def test_the_wire_handle_has_the_fields_that_are_tried() -> None:
    assert {field.name for field in WIRE} == {field.name for field in fields(SlabHandle)}


@pytest.mark.parametrize("field", WIRE, ids=lambda field: field.name)
def test_a_handle_with_another_value_in_any_field_is_refused(desk: Desk, field: Any) -> None:
    handle = desk.runner.run(desk.publish(field.name))
    message = handle_to_proto(handle)

    @settings(max_examples=25)
    @given(data=st.data())
    def forge(data: st.DataObject) -> None:
        forged = prefill_pb2.SlabHandle.FromString(message.SerializeToString())
        setattr(forged, field.name, data.draw(other_value(field, getattr(message, field.name))))
        try:
            parsed = handle_from_proto(forged)
        except TransferError:
            return  # of a shape that no handle has
        desk.runner.run(desk.refusal(parsed))

    forge()
    # None of them was the one that counts: the real handle is still good.
    assert desk.runner.run(desk.read(handle)) == bytes([5]) * SIZE


@settings(max_examples=60)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_byte_of_the_request_changed_is_refused_by_prefill(desk: Desk, at: int, flip: int) -> None:
    """What prefill gets over the transport: decode's own checks are not asked."""

    async def run() -> None:
        handle = await desk.publish()
        raw = bytearray(encode(handle))
        raw[at % len(raw)] ^= flip
        try:
            forged = decode(bytes(raw))
        except ValueError:
            forged = None
        if forged is not None:
            assert not verify(desk.p._key, forged)
        desk.p.release("att")

    desk.runner.run(run())


def test_a_handle_is_good_once(desk: Desk) -> None:
    async def run() -> None:
        handle = await desk.publish()
        received = await desk.d.read(desk.ref, handle, deadline_s=DEADLINE_S)
        assert Refusal.USED.name in str(await desk.refusal(handle))
        desk.d.finish(received)

    desk.runner.run(run())


def test_a_stale_handle_gets_nothing_of_the_slabs_next_life(desk: Desk) -> None:
    async def run() -> None:
        old = await desk.publish("old", fill=1)
        desk.p.release("old")
        lives = [await desk.publish(f"new-{i}", fill=2) for i in range(2)]
        assert old.slab in [life.slab for life in lives]
        error = await desk.refusal(old)
        assert isinstance(error, StaleReferenceError)
        # Nor with the present generation, which anybody can guess.
        life = next(life for life in lives if life.slab == old.slab)
        assert Refusal.FORGED.name in str(await desk.refusal(replace(old, generation=life.generation)))
        for life in lives:
            assert await desk.read(life) == bytes([2]) * SIZE

    desk.runner.run(run())


def test_a_handle_of_another_life_or_worker_is_refused(desk: Desk) -> None:
    other = Desk()
    try:
        foreign = other.runner.run(other.publish())
        assert Refusal.FORGED.name in str(desk.runner.run(desk.refusal(foreign)))  # the same names, another key
        there = replace(foreign, incarnation="later")
        assert isinstance(desk.runner.run(desk.refusal(there)), StaleReferenceError)
    finally:
        other.close()


# ---- placement tickets ----

KEY = bytes(range(32))
LIMITS = Limits("d0", "life1", 1000, 256, 16)


def submit() -> decode_pb2.Submit:
    """With a value in every field that a router sets."""
    ref = {"worker_id": "d0", "incarnation": "life1", "address": "127.0.0.1:1"}
    prefill = {"worker_id": "p0", "incarnation": "life2", "address": "127.0.0.1:2"}
    message = decode_pb2.Submit(
        attempt="att", request_id="req", prompt_token_ids=[1, 2, 3], remaining_s=30.0, cache_salt=b"s" * 16, priority=1
    )
    message.sampling.CopyFrom(sampling_to_proto(SamplingParams(max_tokens=4, seed=7)))
    message.placement.decode.CopyFrom(type(message.placement.decode)(**ref))
    message.placement.prefill.add(**prefill)
    return message


def leaves(message: Message, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every field that is set, also within messages and lists."""
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            yield *path, field.name
        elif isinstance(value, Message):
            yield from leaves(value, (*path, field.name))
        else:
            for index, item in enumerate(value):
                yield from leaves(item, (*path, field.name, index))


def change(message: Any, path: tuple[Any, ...]) -> None:
    for step in path[:-1]:
        message = message[step] if isinstance(step, int) else getattr(message, step)
    value = getattr(message, path[-1])
    if isinstance(value, (str, bytes)):
        setattr(message, path[-1], value + value[:1])
    elif isinstance(value, (int, float)):
        setattr(message, path[-1], type(value)(value + 1) if not isinstance(value, bool) else not value)
    else:
        value.append(value[0])


def ticket_of(claims: decode_pb2.TicketClaims, key: bytes = KEY) -> bytes:
    return seal(key, claims.SerializeToString())


CLAIMS = decode_pb2.TicketClaims(submit=submit(), epoch=1)
PATHS = list(leaves(CLAIMS))


@pytest.fixture
def verifier() -> TicketVerifier:
    return TicketVerifier(KEY, now=FakeClock(100.0).now, epoch_s=10.0)


def redeem(verifier: TicketVerifier, ticket: bytes, attempt: str = "att") -> decode_pb2.Submit:
    return verifier.redeem(decode_pb2.Redeem(attempt=attempt, ticket=ticket, remaining_s=20.0))


def test_the_fields_that_are_tried_are_those_of_a_submission() -> None:
    names = {path[1] for path in PATHS if path[0] == "submit"}
    assert {"attempt", "request_id", "prompt_token_ids", "sampling", "placement", "cache_salt", "remaining_s"} <= names
    assert ("epoch",) in PATHS
    assert len(PATHS) >= 15


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_ticket_with_another_value_in_any_field_is_refused(verifier: TicketVerifier, path: tuple[Any, ...]) -> None:
    """The claims can be read by their holder; changed, they have no MAC that fits. The ticket itself stays good."""
    real = ticket_of(CLAIMS)
    forged = decode_pb2.TicketClaims.FromString(CLAIMS.SerializeToString())
    change(forged, path)
    front = real[: len(MAGIC) + 32]
    with pytest.raises(TicketRefusedError, match="not signed"):
        redeem(verifier, front + forged.SerializeToString(), attempt=forged.submit.attempt)
    with pytest.raises(TicketRefusedError, match="not signed"):
        redeem(verifier, ticket_of(forged, key=bytes(32)), attempt=forged.submit.attempt)
    assert redeem(verifier, real).request_id == "req"


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
def test_a_ticket_with_any_byte_changed_cut_or_added_is_refused(at: int, flip: int, cut: int) -> None:
    real = ticket_of(CLAIMS)
    raw = bytearray(real)
    raw[at % len(raw)] ^= flip
    for forged in (bytes(raw), real[: cut % len(real)], real + bytes([flip]), real + real):
        with pytest.raises(TicketRefusedError):
            unseal(KEY, forged)


def test_a_ticket_is_good_once_and_not_for_long(verifier: TicketVerifier) -> None:
    real = ticket_of(CLAIMS)
    redeem(verifier, real)
    with pytest.raises(TicketRefusedError, match="used before"):
        redeem(verifier, real)
    # The claims in other bytes (a field that no version knows is behind them) are the same ticket.
    again = seal(KEY, CLAIMS.SerializeToString() + b"\xfa\x3f\x01x")
    with pytest.raises(TicketRefusedError, match="used before"):
        redeem(verifier, again)
    later = TicketVerifier(KEY, now=FakeClock(0.0).now, epoch_s=10.0)
    for epoch in (3, 2**40):
        with pytest.raises(TicketRefusedError, match="expired"):
            redeem(later, ticket_of(decode_pb2.TicketClaims(submit=submit(), epoch=epoch)))


@pytest.mark.parametrize(("name", "value"), [("worker_id", "d1"), ("incarnation", "life0")])
def test_a_ticket_for_another_worker_or_life_is_refused(verifier: TicketVerifier, name: str, value: str) -> None:
    """Well signed, since routers sign for all workers of the cluster."""
    claims = decode_pb2.TicketClaims(submit=submit(), epoch=1)
    setattr(claims.submit.placement.decode, name, value)
    with pytest.raises(StaleReferenceError):
        parse_submit(redeem(verifier, ticket_of(claims)), LIMITS)
    claims.submit.placement.decode.CopyFrom(CLAIMS.submit.placement.decode)
    claims.submit.attempt = "another"
    assert parse_submit(redeem(verifier, ticket_of(claims), "another"), LIMITS).attempt == "another"


# ---- tokens of calls ----


def test_a_call_token_is_for_one_cluster_and_one_address() -> None:
    keys, addresses = (bytes(32), b"x" * 32), ("10.0.0.1:1", "10.0.0.1:11", "10.0.0.11:1")
    assert len({call_token(key, address) for key in keys for address in addresses}) == 6
