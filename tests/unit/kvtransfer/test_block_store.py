"""The threads that write and read blocks, and an engine that starts again with its files."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.disk_messages import BlocksRead, BlocksWritten, DiskBlock, DiskReply
from diptych.engine.disk_traffic import MOST_LATE
from diptych.engine.disk_traffic import PAUSE_S as LATE_PAUSE_S
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Admitted, EngineEvent, EngineRequest, Finished, TokensOut
from diptych.engine.offline import OfflineEngine
from diptych.kvtransfer.disk import block_store
from diptych.kvtransfer.disk.block_file import identity_of
from diptych.kvtransfer.disk.block_folder import BlockFolder
from diptych.kvtransfer.disk.block_store import PAUSE_S, DiskBlockStore

SIZE = 4 * FakeRunner(8, 4).kv_bytes_per_token
BUFFER_BYTES = 64 * SIZE
"""The shipped ones are 64 MiB a store."""
TENANT = "a" * 32
DEADLINE_S = 30.0


def block(number: int) -> DiskBlock:
    return DiskBlock(number.to_bytes(16, "big"), TENANT, number)


class Started:
    """A store, its replies, and its folder's gate."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, FakeClock()
        self.folder = BlockFolder(root, "decode-0", identity_of("m"), SIZE)
        self.store = DiskBlockStore(self.folder, self.clock, buffer_bytes=BUFFER_BYTES)
        self.replies: SimpleQueue[DiskReply] = SimpleQueue()
        self.store.begin(self.replies.put)

    def reply(self) -> DiskReply:
        return self.replies.get(timeout=DEADLINE_S)

    def write(self, *numbers: int) -> None:
        buffer = self.store.write_buffer()
        assert buffer is not None
        for at, number in enumerate(numbers):
            buffer[at * SIZE : (at + 1) * SIZE] = bytes([number]) * SIZE
        self.store.write([block(number) for number in numbers], buffer)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    one = Started(tmp_path)
    yield one
    one.store.close(DEADLINE_S)


def test_what_is_written_is_read_in_parts(started, monkeypatch):
    started.store.chunk_blocks = 2
    started.write(1, 2)
    started.write(3)
    assert [started.reply(), started.reply()] == [BlocksWritten((block(1), block(2))), BlocksWritten((block(3),))]
    assert started.store.bytes_per_s > 0
    started.store.read(7, [block(1), block(2), block(3)])
    first, second = started.reply(), started.reply()
    assert isinstance(first, BlocksRead)
    assert isinstance(second, BlocksRead)
    assert (first.job, first.num_blocks, first.last, second.num_blocks, second.last) == (7, 2, False, 1, True)
    assert bytes(first.pieces[0]) + bytes(second.pieces[0]) == b"".join(bytes([n]) * SIZE for n in (1, 2, 3))
    assert first.buffer != second.buffer


def test_a_removal_follows_the_writes_before_it(started):
    started.write(1)
    started.store.remove([block(1), block(9)])
    started.write(2)
    assert [started.reply(), started.reply()] == [BlocksWritten((block(1),)), BlocksWritten((block(2),))]
    started.store.read(1, [block(2), block(1)])
    reply = started.reply()
    assert isinstance(reply, BlocksRead)
    assert (reply.num_blocks, reply.bad, reply.error, reply.last) == (1, block(1), "missing", True)


def test_of_what_was_purged_all_is_told_at_once(started):
    started.write(1, 2, 3)
    started.reply()
    for path in started.root.glob("*/*/*/*-[12]"):
        path.unlink()
    started.store.read(1, [block(1), block(2), block(3)])
    reply = started.reply()
    assert isinstance(reply, BlocksRead)
    assert (reply.num_blocks, reply.bad, reply.error, list(reply.gone)) == (0, block(1), "missing", [block(2)])


def test_a_full_disk_is_measured_by_what_is_on_it(tmp_path, monkeypatch):
    first = Started(tmp_path)
    first.write(1, 2, 3, 4)
    first.reply()
    first.store.close(DEADLINE_S)

    def full(self: BlockFolder, one: DiskBlock, payload: memoryview) -> str:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(BlockFolder, "write", full)
    second = Started(tmp_path)
    assert second.store.bytes_per_s > 0
    second.store.close(DEADLINE_S)
    empty = Started(tmp_path / "another")
    assert empty.store.bytes_per_s == 0
    empty.store.close(DEADLINE_S)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_for_a_while(started, code):
    def fail(name: str) -> None:
        raise OSError(code, "no")

    started.write(1)
    assert started.reply() == BlocksWritten((block(1),))
    started.folder.before_rename = fail
    started.write(2, 3)
    assert started.reply() == BlocksWritten((block(2), block(3)), (block(2), block(3)), errno.errorcode[code])
    assert started.store.write_buffer() is None
    started.store.read(1, [block(1)])  # what is there can be read
    reply = started.reply()
    assert isinstance(reply, BlocksRead)
    assert reply.num_blocks == 1
    started.folder.before_rename = lambda name: None
    started.clock.advance(PAUSE_S + 1)
    started.write(2)
    assert started.reply() == BlocksWritten((block(2),))


def test_a_block_whose_name_is_taken_keeps_no_other_from_being_written(started):
    taken = started.root / "decode-0" / identity_of("m").hex() / TENANT / f"{block(2).key.hex()}-2"
    (taken / "notes").mkdir(parents=True)
    started.write(1, 2, 3)
    assert started.reply() == BlocksWritten((block(1), block(2), block(3)), (block(2),), "EISDIR")
    started.store.read(1, [block(1), block(3)])
    reply = started.reply()
    assert isinstance(reply, BlocksRead)
    assert reply.num_blocks == 2
    assert started.store.write_buffer() is not None


def test_buffers_bound_what_is_under_way_and_nobody_waits_for_the_disk(started):
    held, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        held.set()
        assert go_on.wait(DEADLINE_S)

    started.folder.before_rename = hold
    for number in range(block_store.NUM_BUFFERS):
        started.write(number)
    assert held.wait(DEADLINE_S)
    assert started.store.write_buffer() is None
    started.store.remove([block(0)])
    go_on.set()
    assert [started.reply() for _ in range(block_store.NUM_BUFFERS)][-1] == BlocksWritten((block(3),))
    assert started.store.write_buffer() is not None


def test_a_read_that_nobody_waits_for_ends(started):
    started.store.chunk_blocks = 1
    started.write(1)
    started.reply()
    blocks = [block(1)] * (block_store.NUM_BUFFERS + 2)
    started.store.read(1, blocks)
    numbers = [started.reply() for _ in range(block_store.NUM_BUFFERS)]  # it waits for a buffer now
    started.store.cancel(1)
    for reply in numbers:
        assert isinstance(reply, BlocksRead)
        started.store.give_back(reply.buffer)
    started.store.read(2, [block(1)])
    jobs = []
    while not jobs or jobs[-1] != 2:
        reply = started.reply()
        assert isinstance(reply, BlocksRead)
        jobs.append(reply.job)
    assert len(jobs) <= 2
    assert not started.store._cancelled.jobs


def test_what_is_queued_is_written_at_the_end(tmp_path):
    one = Started(tmp_path)
    for number in range(3):
        one.write(number)
    one.store.close(DEADLINE_S)
    one.store.close(DEADLINE_S)
    again = Started(tmp_path)
    assert {found.index for found in again.store.found} == {0, 1, 2}
    again.store.close(DEADLINE_S)


# ---- an engine ----

IDENTITY = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", 4)


def engine_on(
    root: Path, identity: bytes = identity_of("m"), clock: FakeClock | None = None
) -> tuple[OfflineEngine, DiskBlockStore, SimpleQueue[DiskReply]]:
    store = DiskBlockStore(BlockFolder(root, "decode-0", identity, SIZE), FakeClock(), buffer_bytes=BUFFER_BYTES)
    replies: SimpleQueue[DiskReply] = SimpleQueue()
    store.begin(replies.put)
    config = EngineConfig(num_blocks=64, block_size=4, num_disk_blocks=100, check_invariants=True)
    engine = OfflineEngine(LocalExecutor(FakeRunner(64, 4)), config, IDENTITY, clock=clock or FakeClock(), disk=store)
    engine.core.open_disk()
    return engine, store, replies


def serve(engine: OfflineEngine, replies: SimpleQueue[DiskReply], num_files: int) -> list[EngineEvent]:
    """Until it has answered, and so many blocks are in files."""
    engine.send(
        EngineRequest("a", Prompt(tuple(range(200, 241))), SamplingParams(max_tokens=8, ignore_eos=True, seed=1))
    )
    events: list[EngineEvent] = []
    disk = engine.core.scheduler.kv.disk
    while not any(isinstance(event, Finished) for event in events) or disk.num_held != num_files:
        before = len(events)
        events += engine.step()
        if len(events) == before or not replies.empty():
            engine.send(replies.get(timeout=DEADLINE_S))
    return events


def answer(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokensOut) for token in event.token_ids]


def restored(events: list[EngineEvent]) -> int:
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    return sum(count for _, count in admitted.tiers)


def test_an_engine_starts_again_with_its_files_and_another_model_never_with_them(tmp_path):
    engine, store, replies = engine_on(tmp_path)
    cold = serve(engine, replies, 12)
    assert restored(cold) == 0
    store.close(DEADLINE_S)
    engine, store, replies = engine_on(tmp_path)
    warm = serve(engine, replies, 12)
    assert answer(warm) == answer(cold)
    assert restored(warm) == 40
    store.close(DEADLINE_S)
    engine, store, replies = engine_on(tmp_path, identity_of("another"))
    assert restored(serve(engine, replies, 12)) == 0
    store.close(DEADLINE_S)


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "remove"])
def test_damaged_files_change_no_answer(tmp_path, damage):
    engine, store, replies = engine_on(tmp_path)
    cold = serve(engine, replies, 12)
    store.close(DEADLINE_S)
    paths = sorted(tmp_path.glob("*/*/*/*-*"), key=lambda path: int(path.name.split("-")[1]))
    if damage == "flip":
        raw = bytearray(paths[5].read_bytes())
        raw[-1] ^= 4
        paths[5].write_bytes(raw)
    elif damage == "cut":
        paths[5].write_bytes(paths[5].read_bytes()[:-1])
    elif damage == "swap":
        five, six = paths[5].read_bytes(), paths[6].read_bytes()
        paths[5].write_bytes(six)
        paths[6].write_bytes(five)
    engine, store, replies = engine_on(tmp_path)
    if damage == "remove":
        paths[5].unlink()
    warm = serve(engine, replies, 12)
    assert answer(warm) == answer(cold)
    assert restored(warm) == 20
    [disk] = [tier for tier in engine.stats().tiers if tier.name == "disk"]
    reason = {"flip": "corrupt", "cut": "truncated", "swap": "foreign", "remove": "missing"}[damage]
    assert dict(disk.errors)[reason] >= 1
    store.close(DEADLINE_S)


def test_after_reads_that_take_too_long_nothing_is_read_for_a_while(tmp_path, monkeypatch):
    engine, store, replies = engine_on(tmp_path)
    cold = serve(engine, replies, 12)
    store.close(DEADLINE_S)
    clock = FakeClock()
    engine, store, replies = engine_on(tmp_path, clock=clock)
    reads: list[int] = []
    monkeypatch.setattr(store, "read", lambda job, blocks: reads.append(job))
    for number, begun in enumerate([1, 2, MOST_LATE, MOST_LATE, MOST_LATE + 1]):
        engine.core.scheduler.kv.clear()
        engine.send(
            EngineRequest(
                f"late-{number}", Prompt(tuple(range(200, 241))), SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
            )
        )
        events = engine.step()
        assert len(reads) == begun
        clock.advance(5.0 if begun != MOST_LATE or number < MOST_LATE else LATE_PAUSE_S)
        while not any(isinstance(event, Finished) for event in events):
            events += engine.step()
        assert answer(events) == answer(cold)
    store.close(DEADLINE_S)
