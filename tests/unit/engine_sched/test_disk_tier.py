"""Blocks in files, from the engine's side: what is written, what comes back, and that nothing about it changes an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.common.block_identity import block_keys
from diptych.common.errors import ConfigError, RequestCancelledError
from diptych.common.kv_format import windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import CacheClaim, Prompt
from diptych.common.secret import tenant_folder
from diptych.common.text.prompt_digest import prompt_digest
from diptych.engine.disk_messages import BlocksRead, BlocksWritten, DiskBlock, DiskReply, pieces_of
from diptych.engine.fake_runner import FakeAdapter, FakeRunner
from diptych.engine.messages import (
    Admitted,
    Cancel,
    EndPull,
    Failed,
    GrantSlabs,
    KeepAdapter,
    KvMode,
    PromptComputed,
    PublishCached,
    PullBlocks,
    Pulled,
    RangePacked,
    RunLocally,
    TierEvicted,
    TierStored,
    UnpackRange,
)
from diptych.engine.offline import OfflineEngine
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.cache.eviction import tier_orders

PROMPT = tuple(range(100, 141))
"""Ten blocks and a token."""
RATE = 1e12
WEAK = FakeRunner(8, 4).kv_bytes_per_token


class MemoryFiles:
    """A BlockStore whose disk is a dict, and whose threads are the test's calls of `work`."""

    is_shared = False

    def __init__(
        self,
        kept: dict[bytes, tuple[DiskBlock, bytes]] | None = None,
        chunk_blocks: int = 3,
        piece_bytes: Sequence[int] = (4 * WEAK,),
    ) -> None:
        self.kept = {} if kept is None else kept
        self.found = [block for block, _ in self.kept.values()]
        self.chunk_blocks, self.bytes_per_s = chunk_blocks, RATE
        self.damaged: dict[str, int] = {}
        self.piece_bytes, self.block_bytes = tuple(piece_bytes), sum(piece_bytes)
        self.buffers = [memoryview(bytearray(chunk_blocks * self.block_bytes)) for _ in range(2)]
        self.queue: deque[tuple[str, object, object]] = deque()
        self.cancelled: set[int] = set()
        self.lent = 0
        self.failing = ""
        self.bad: dict[bytes, str] = {}

    def begin(self, reply) -> None: ...

    def write_buffer(self):
        return self.buffers.pop() if self.buffers else None

    def write(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> None:
        if blocks:
            self.queue.append(("write", tuple(blocks), buffer))
        else:
            self.buffers.append(buffer)

    def remove(self, blocks: Sequence[DiskBlock]) -> None:
        if blocks:
            self.queue.append(("remove", tuple(blocks), None))

    def read(self, job: int, blocks: Sequence[DiskBlock]) -> None:
        for first in range(0, len(blocks), self.chunk_blocks):
            part = blocks[first : first + self.chunk_blocks]
            self.queue.append(("read", (job, first + len(part) == len(blocks)), tuple(part)))

    def cancel(self, job: int) -> None:
        self.cancelled.add(job)

    def give_back(self, buffer: int) -> None:
        self.lent -= 1

    def close(self, deadline_s: float) -> None: ...

    def work(self) -> DiskReply | None:
        """One thing; its reply, if it has one."""
        kind, one, two = self.queue.popleft()
        if kind == "write":
            return self._write(one, two)
        if kind == "remove":
            for block in one:
                self.kept.pop(block.key, None)
            return None
        job, last = one
        return None if job in self.cancelled else self._read(job, last, two)

    def _write(self, blocks, buffer):
        pieces = [bytes(piece) for piece in pieces_of(buffer, len(blocks), self.piece_bytes)]
        self.buffers.append(buffer)
        if self.failing:
            return BlocksWritten(blocks, blocks, self.failing)
        for at, block in enumerate(blocks):
            mine = [piece[at * n : (at + 1) * n] for piece, n in zip(pieces, self.piece_bytes, strict=True)]
            self.kept[block.key] = block, b"".join(mine)
        return BlocksWritten(blocks)

    def _read(self, job, last, blocks):
        self.lent += 1
        whole, bad = [], None
        for block in blocks:
            if block.key in self.bad or block.key not in self.kept:
                bad = block
                self.cancelled.add(job)
                break
            whole.append(self.kept[block.key][1])
        error = "" if bad is None else self.bad.get(bad.key, "missing")
        ends = list(accumulate(self.piece_bytes))
        pieces = tuple(
            memoryview(b"".join(one[end - size : end] for one in whole))
            for end, size in zip(ends, self.piece_bytes, strict=True)
        )
        return BlocksRead(job, len(whole), pieces, 0, 1e-6, last or bad is not None, bad, error)


def engine_on(
    kit, files: MemoryFiles, num_blocks: int = 32, num_disk_blocks: int = 64, windows: Sequence[int] = (), **fields
) -> OfflineEngine:
    config = kit.make_config(num_blocks=num_blocks, num_disk_blocks=num_disk_blocks, **fields)
    demand = PoolDemand(config.max_num_seqs, config.max_num_batched_tokens)
    runner = FakeRunner(
        num_blocks, kit.BLOCK, num_host_blocks=config.num_host_blocks, windows=windows, demand=demand, max_loras=1
    )
    engine = OfflineEngine(kit.local(runner), config, kit.IDENTITY, clock=kit.FakeClock(), disk=files)
    engine.core.open_disk()
    return engine


def settle(kit, engine: OfflineEngine, files: MemoryFiles) -> list:
    """Until the engine and the disk have nothing to do."""
    events = kit.run_until_idle(engine)
    while files.queue:
        reply = files.work()
        if reply is not None:
            engine.send(reply)
        events += kit.run_until_idle(engine)
    assert files.lent == 0
    assert len(files.buffers) == 2
    assert not engine.core.scheduler.requests
    assert not engine.core.scheduler.check()
    return events


def once(kit, engine, files, request) -> list:
    engine.send(request)
    return settle(kit, engine, files)


def computed(engine) -> int:
    return engine.stats().computed_tokens_total


def tier(engine, name: str = "disk"):
    [found] = [one for one in engine.stats().tiers if one.name == name]
    return found


def filled(kit, prompt=PROMPT, **fields) -> MemoryFiles:
    """The files after a prompt and eight tokens were computed."""
    files = MemoryFiles()
    once(kit, engine_on(kit, files), files, kit.make_request("first", prompt, 8, **fields))
    return files


def test_an_engine_that_starts_again_computes_a_block_at_most(kit):
    request = kit.make_request("a", PROMPT, 8)
    want = kit.undisturbed([request])["a"]
    files = filled(kit)
    assert len(files.kept) == 12  # of 41 + 8 tokens, the last of which was not computed
    again = engine_on(kit, MemoryFiles(files.kept))
    events = once(kit, again, again.core._disk._store, request)
    assert kit.tokens_of(events) == want
    assert computed(again) == 1
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    assert (admitted.num_cached_tokens, admitted.tiers) == (40, (("disk", 40),))
    assert tier(again).hit_tokens == 40
    assert tier(again, "device").hit_tokens == 0
    # the second time it is the first tier's
    events = once(kit, again, again.core._disk._store, kit.make_request("b", PROMPT, 8))
    assert [event.tiers for event in events if isinstance(event, Admitted)] == [()]
    assert tier(again, "device").hit_tokens == 40


def test_steps_of_others_go_on_while_blocks_are_read(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.send(kit.make_request("other", range(500, 520), 12))
    engine.step()
    engine.send(kit.make_request("a", PROMPT, 8))
    before = engine.core.steps
    seen = [event for _ in range(5) for event in engine.step()]
    assert engine.core.steps == before + 5
    assert len(kit.tokens_of(seen, "other")) == 5
    assert not kit.tokens_of(seen, "a")
    assert not [event for event in seen if isinstance(event, Admitted)]
    events = seen + settle(kit, engine, files)
    assert len(kit.tokens_of(events, "a")) == 8


def test_a_tenants_blocks_are_no_others(kit):
    files = MemoryFiles(filled(kit, cache_salt=b"alice", tenant="alice").kept)
    assert {block.tenant for block, _ in files.kept.values()} == {tenant_folder("alice")}
    engine = engine_on(kit, files)
    once(kit, engine, files, kit.make_request("b", PROMPT, 2, cache_salt=b"bob", tenant="bob"))
    assert tier(engine).hit_tokens == 0
    assert computed(engine) == len(PROMPT)


def test_blocks_in_files_are_those_of_their_adapter(kit):
    adapters = [kit.adapter_id(name) for name in "ab"]

    def run(files, adapter, *known):
        engine = engine_on(kit, files)
        for one in known:
            engine.send(KeepAdapter(FakeAdapter(one)))
        events = once(kit, engine, files, kit.make_request("r", Prompt(PROMPT, adapter=adapter), 8))
        return engine, kit.tokens_of(events, "r"), [e for e in events if isinstance(e, Failed)]

    files = MemoryFiles()
    _, expected, _ = run(files, adapters[0], *adapters)
    engine, tokens, _ = run(MemoryFiles(files.kept), adapters[0], *adapters)
    assert (tokens, computed(engine), tier(engine).hit_tokens) == (expected, 1, 40)
    for other in ("", adapters[1]):
        engine, tokens, _ = run(MemoryFiles(dict(files.kept)), other, *adapters)
        assert (computed(engine), tier(engine).hit_tokens) == (len(PROMPT), 0)
        assert tokens != expected
    unread = MemoryFiles(files.kept)
    _, tokens, [failed] = run(unread, adapters[0])
    assert (tokens, failed.error.param) == ([], "adapter")


@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("reason", ["corrupt", "foreign", "truncated", "missing"])
def test_a_bad_block_is_counted_removed_and_computed(kit, at, reason):
    kept = filled(kit).kept
    files = MemoryFiles(dict(kept))
    key = next(key for key, (block, _) in kept.items() if block.index == at)
    files.bad[key] = reason
    engine = engine_on(kit, files)
    request = kit.make_request("a", PROMPT, 8)
    events = once(kit, engine, files, request)
    assert kit.tokens_of(events) == kit.undisturbed([request])["a"]
    assert computed(engine) == len(PROMPT) - 4 * at
    assert tier(engine).errors == ((reason, 1),)
    evicted = [key for event in events if isinstance(event, TierEvicted) for key in event.keys]
    assert evicted == [key]
    # it is computed by now, and written once more
    assert files.kept[key][1] == kept[key][1]


def test_damage_that_was_found_at_the_start_is_counted(kit):
    files = MemoryFiles()
    files.damaged = {"truncated": 2, "unfinished": 1}
    assert tier(engine_on(kit, files)).errors == (("truncated", 2), ("unfinished", 1))


def test_a_full_disk_is_counted_and_serving_goes_on(kit):
    files = MemoryFiles()
    engine = engine_on(kit, files)
    files.failing = "ENOSPC"
    request = kit.make_request("a", PROMPT, 8)
    events = once(kit, engine, files, request)
    assert kit.tokens_of(events) == kit.undisturbed([request])["a"]
    assert tier(engine).errors == (("ENOSPC", 12),)
    assert (tier(engine).used_bytes, files.kept) == (0, {})
    assert not [event for event in events if isinstance(event, TierStored)]
    files.failing = ""
    once(kit, engine, files, kit.make_request("b", range(600, 621), 2))
    assert len(files.kept) == 5


def test_its_events_mirror_the_files(kit):
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=7)
    mirror: set[bytes] = set()
    sequence = 0
    for i in range(5):
        for event in once(kit, engine, files, kit.make_request(f"r{i}", range(100 * i, 100 * i + 18), 3)):
            if isinstance(event, TierStored | TierEvicted):
                sequence += 1
                assert (event.tier, event.sequence) == ("disk", sequence)
                (mirror.update if isinstance(event, TierStored) else mirror.difference_update)(event.keys)
    dump = engine.core.scheduler.kv.pool.dump()
    assert mirror == set(dump.tiers[2].keys) == files.kept.keys()
    assert dump.tiers[2].sequence == sequence
    assert len(mirror) == 7
    assert tier(engine).evicted_blocks > 0


def test_a_new_epoch_begins_with_all_files(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.core.take_events()
    engine.core.scheduler.kv.clear()
    events = engine.core.take_events()
    [stored] = [event for event in events if isinstance(event, TierStored)]
    assert (stored.sequence, set(stored.keys)) == (1, files.kept.keys())


def test_given_up_nothing_stays_and_nothing_comes(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.core.take_events()
    engine.core.scheduler.kv.clear(files=True)
    events = settle(kit, engine, files)
    assert not [event for event in events if isinstance(event, TierStored)]
    events = once(kit, engine, files, kit.make_request("a", PROMPT, 8))
    assert computed(engine) == len(PROMPT)
    assert (files.kept, tier(engine).used_bytes) == ({}, 0)


def test_nothing_is_taken_before_it_is_opened(kit):
    files = MemoryFiles(filled(kit).kept)
    runner = FakeRunner(32, kit.BLOCK)
    config = kit.make_config(num_blocks=32, num_disk_blocks=64)
    engine = OfflineEngine(kit.local(runner), config, kit.IDENTITY, clock=kit.FakeClock(), disk=files)
    once(kit, engine, files, kit.make_request("warm-up", range(8), 2))
    assert tier(engine).used_bytes == 0
    assert len(files.kept) == 12
    engine.core.open_disk()
    assert tier(engine).used_bytes == 12 * files.block_bytes


def test_bad_logits_take_the_block_from_the_disk_too(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.core._executor.runner.bad_attempts.add("a")
    once(kit, engine, files, kit.make_request("a", PROMPT, 8))
    assert len(files.kept) == 2  # those of the first answer, which it did not read
    assert tier(engine).errors == ()


# ---- window groups ----

WINDOWS = [(0, 6, 6, 9), (7, 0, 3), (10, 10)]


def grouped(kit, windows, kept=None) -> MemoryFiles:
    kv = windowed_format(windows, 1, 4, block_size=kit.BLOCK, dtype="int8")
    return MemoryFiles(kept, piece_bytes=[group.block_bytes(kv.shard) for group in kv.groups])


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [8, 64])
def test_a_file_has_the_blocks_of_all_groups(kit, windows, chunk):
    request, files = kit.make_request("a", PROMPT, 8), grouped(kit, windows)
    want = kit.undisturbed([request], windows)["a"]
    fields = {"windows": windows, "max_num_batched_tokens": chunk}
    once(kit, engine_on(kit, files, **fields), files, request)
    assert len(files.kept) == 12
    again = grouped(kit, windows, dict(files.kept))
    engine = engine_on(kit, again, **fields)
    events = once(kit, engine, again, request)
    assert kit.tokens_of(events) == want
    assert computed(engine) == 1
    assert tier(engine).hit_tokens == 40


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("at", [0, 5, 9])
def test_with_windows_a_bad_block_leaves_all_or_nothing_to_be_used(kit, windows, at):
    """An end before the bad block sees other window blocks than the end that was asked for."""
    request, files = kit.make_request("a", PROMPT, 8), grouped(kit, windows)
    once(kit, engine_on(kit, files, windows=windows), files, request)
    again = grouped(kit, windows, dict(files.kept))
    again.bad[next(key for key, (block, _) in files.kept.items() if block.index == at)] = "corrupt"
    engine = engine_on(kit, again, windows=windows)
    events = once(kit, engine, again, request)
    assert kit.tokens_of(events) == kit.undisturbed([request], windows)["a"]
    assert computed(engine) == len(PROMPT)
    assert tier(engine).errors == (("corrupt", 1),)


@pytest.mark.parametrize("windows", [(7, 7, 7, 7), (0, 6, 6, 9)])
def test_a_block_that_slides_behind_the_window_at_once_is_vouched_for_all_the_same(kit, windows):
    """It stays in the cache, where a shorter prompt hits it: prefill could not say what that KV was computed from."""
    files = grouped(kit, windows)
    once(kit, engine_on(kit, files, windows=windows), files, kit.make_request("a", PROMPT, 8))
    again = grouped(kit, windows, dict(files.kept))
    engine = engine_on(kit, again, windows=windows)
    for end, left in ((13, 1), (7, 3)):
        before, prompt = computed(engine), PROMPT[:end]
        request = kit.make_request(f"of {end}", prompt, mode=KvMode.PREFILL, want_kv=False)
        [reported] = [e for e in once(kit, engine, again, request) if isinstance(e, PromptComputed)]
        assert computed(engine) - before == left
        assert reported.computed_from.digest == prompt_digest(prompt, 4)


@pytest.mark.parametrize("windows", [(0, 6, 6, 9), (7, 0, 3)])
def test_where_window_blocks_never_were_nothing_is_written(kit, windows):
    """KV from a prefill worker has no window blocks but the last ones."""
    files = grouped(kit, windows)
    decode = engine_on(kit, files, windows=windows)
    outcome = kit.Pair(kit.make_engine(windows=windows), decode).run([kit.make_request("a", PROMPT, 8)])["a"]
    settle(kit, decode, files)
    assert len(outcome.token_ids) == 8
    assert files.kept == {}


# ---- who waits for files, and how long ----


def test_what_is_computed_faster_is_not_read(kit):
    files = MemoryFiles(filled(kit).kept)
    files.bytes_per_s = 1e-3  # as measured at the start
    engine = engine_on(kit, files)
    once(kit, engine, files, kit.make_request("a", PROMPT, 8))
    assert computed(engine) == len(PROMPT)


def test_reading_takes_as_long_as_computing_at_most_and_what_has_come_is_used(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files, initial_prefill_tokens_per_s=20.0)
    engine.send(kit.make_request("a", PROMPT, 8))
    engine.send(files.work())  # three blocks of ten
    assert engine.core.wakes_at - engine.clock.now() == pytest.approx(2.0)
    engine.clock.advance(1.9)
    assert not [event for event in engine.step() if isinstance(event, Admitted)]
    engine.clock.advance(0.2)
    events = engine.step()
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    assert (admitted.num_cached_tokens, admitted.tiers) == (12, (("disk", 12),))
    settle(kit, engine, files)
    assert tier(engine).errors == (("late", 10),)


def test_a_cancelled_request_leaves_nothing(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.send(kit.make_request("a", PROMPT, 8))
    engine.send(files.work())
    engine.send(Cancel("a"))
    events = settle(kit, engine, files)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert isinstance(failed.error, RequestCancelledError)
    assert not [event for event in events if isinstance(event, Admitted)]
    counts = engine.core.scheduler.kv.pool.counts
    assert (counts.running, counts.reserved) == (0, 0)


def test_what_came_for_a_cancelled_request_is_vouched_for(kit):
    """It stays in the cache: every prompt that began with it failed, as prefill could not say what that KV was computed from."""
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.send(kit.make_request("a", PROMPT, mode=KvMode.PREFILL, want_kv=False))
    engine.send(files.work())  # three blocks of ten
    engine.send(Cancel("a"))
    settle(kit, engine, files)
    engine.send(kit.make_request("b", PROMPT[:13], mode=KvMode.PREFILL, want_kv=False))
    [reported] = [event for event in settle(kit, engine, files) if isinstance(event, PromptComputed)]
    assert computed(engine) == 1
    assert reported.computed_from.digest == prompt_digest(PROMPT[:13], 4)


def test_a_block_that_left_while_its_file_was_read_does_not_come_back_to_the_account(kit):
    """Its file is being removed: routers were told that it is there, and another block was evicted for it."""
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files, num_disk_blocks=12)
    engine.core.take_events()
    engine.send(kit.make_request("a", PROMPT, 8))
    reads = [files.work() for _ in range(4)]
    for block in (block for block, _ in list(files.kept.values()) if block.index < 10):
        engine.core.scheduler.kv.disk.discard(block.key)
    for reply in reads:
        engine.send(reply)
    events = engine.core.take_events()
    assert len(engine.core.scheduler.kv.disk.keys) == 2
    assert not [event for event in events if isinstance(event, TierStored)]
    settle(kit, engine, files)
    assert set(engine.core.scheduler.kv.disk.keys) == files.kept.keys()


def test_an_attempt_that_comes_twice_ends_once(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.send(kit.make_request("a", PROMPT, 8))
    engine.send(kit.make_request("a", PROMPT, 8))
    events = settle(kit, engine, files)
    assert [event for event in kit.ends_of(events) if isinstance(event, Failed)] == kit.ends_of(events)
    assert len(kit.ends_of(events)) == 1


def test_the_end_of_the_engine_ends_those_that_wait(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    engine.send(kit.make_request("a", PROMPT, 8))
    engine.core.fail_all(RequestCancelledError("the end"))
    events = engine.core.take_events()
    assert [event.attempt for event in kit.ends_of(events)] == ["a"]
    counts = engine.core.scheduler.kv.pool.counts
    assert (counts.running, counts.reserved) == (0, 0)


def test_without_room_nothing_is_read(kit):
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files, num_blocks=12)
    engine.send(kit.make_request("other", range(500, 528), 12))
    engine.step()
    engine.send(kit.make_request("a", PROMPT, 2))
    assert not files.queue
    events = settle(kit, engine, files)
    assert len(kit.tokens_of(events, "a")) == 2


@pytest.mark.parametrize(("extra", "own", "waits"), [(0, 0, False), (0, 1, True), (8, 8, False), (8, 9, True)])
def test_decode_reads_files_where_it_computes_the_rest_itself(kit, extra, own, waits):
    """KV from a prefill worker does not delay the first token; reading files first would."""
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    prompt = (*PROMPT, *range(900, 900 + extra))
    engine.send(kit.make_request("a", prompt, 4, mode=KvMode.REMOTE, own_tokens=own))
    assert bool(files.queue) is waits
    events = kit.run_until_idle(engine)
    while not any(isinstance(event, Admitted) for event in events):
        engine.send(files.work())
        events += kit.run_until_idle(engine)
    engine.send(RunLocally("a"))
    events += settle(kit, engine, files)
    assert kit.tokens_of(events) == kit.undisturbed([kit.make_request("a", prompt, 4)])["a"]
    assert computed(engine) == (1 + extra if waits else len(prompt))


def test_prefill_vouches_for_what_came_from_files(kit):
    prompt = (*PROMPT, 7, 8, 9)
    cold = kit.make_engine()
    cold.send(kit.make_request("a", prompt, mode=KvMode.PREFILL, want_kv=False))
    [want] = [event for event in kit.run_until_idle(cold) if isinstance(event, PromptComputed)]
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    events = once(kit, engine, files, kit.make_request("a", prompt, mode=KvMode.PREFILL, want_kv=False))
    [got] = [event for event in events if isinstance(event, PromptComputed)]
    assert got.computed_from == want.computed_from
    assert computed(engine) == len(prompt) - 40


def test_prompt_logprobs_need_their_rows(kit):
    from diptych.common.sampling import SamplingParams

    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files)
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    engine.send(kit.make_request("a", PROMPT, sampling=sampling))
    assert not files.queue


def test_host_and_disk_together(kit):
    """What is in host memory is copied from there, and what follows is read."""
    files = MemoryFiles(filled(kit).kept)
    engine = engine_on(kit, files, num_blocks=16, num_host_blocks=4, initial_copy_bytes_per_s=RATE)
    once(kit, engine, files, kit.make_request("a", PROMPT[:17], 2))  # four blocks
    once(kit, engine, files, kit.make_request("b", range(500, 560), 2))  # pushes them out, into the host tier
    assert engine.core.scheduler.kv.host.usage > 0
    request = kit.make_request("c", PROMPT, 8)
    events = once(kit, engine, files, request)
    assert kit.tokens_of(events, "c") == kit.undisturbed([request])["c"]
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    assert admitted.num_cached_tokens == 40


# ---- claims ----

SESSION = b"s" * 16


def claimed(kit, attempt: str, prompt=PROMPT, ttl_s: float = 60.0, session: bytes = b"", **fields):
    return kit.make_request(attempt, prompt, 8, claim=CacheClaim(ttl_s, session=session), **fields)


def flood(kit, engine, files, count: int = 6) -> None:
    """Prompts of ten blocks each, which nobody claims and nobody sends again."""
    for number in range(count):
        engine.clock.advance(0.1)
        once(kit, engine, files, kit.make_request(f"flood {number}", range(200 + 50 * number, 241 + 50 * number), 8))


@pytest.mark.parametrize(("ttl_s", "kept"), [(None, 0), (0.05, 0), (3600.0, 40)])
def test_a_claimed_prompt_stays_in_files_while_others_leave(kit, ttl_s, kept):
    """A prompt that is claimed for a day and had left the pool left the disk as any other."""
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=48)
    once(kit, engine, files, kit.make_request("a", PROMPT, 8) if ttl_s is None else claimed(kit, "a", ttl_s=ttl_s))
    flood(kit, engine, files)
    assert len(files.kept) <= 48
    events = once(kit, engine, files, kit.make_request("again", PROMPT, 8))
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    # of the pool a quarter is claimed, too: eight of its blocks
    assert (admitted.num_cached_tokens, dict(admitted.tiers)) == (kept, {"disk": 8} if kept else {})
    assert kit.tokens_of(events, "again") == kit.undisturbed([kit.make_request("again", PROMPT, 8)])["again"]


def test_claims_in_files_have_a_share_and_keep_nothing_from_being_written(kit):
    """A quarter of the files; and with all of them claimed blocks of the next prompt are written all the same."""
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=48)
    for number in range(4):
        once(kit, engine, files, claimed(kit, f"{number}", range(300 + 50 * number, 341 + 50 * number)))
    assert len(engine.core.scheduler.kv.disk._claims) == 12
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=12, claim_share=1.0)
    once(kit, engine, files, claimed(kit, "all"))
    assert len(engine.core.scheduler.kv.disk._claims) == len(files.kept) == 12
    once(kit, engine, files, kit.make_request("next", range(700, 741), 8))
    assert set(block_keys(kit.IDENTITY, range(700, 740))) & set(files.kept)
    assert len(engine.core.scheduler.kv.disk._claims) < 12


def test_the_end_of_a_session_frees_its_files_those_that_left_the_pool_too(kit):
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=100)
    once(kit, engine, files, claimed(kit, "a", session=SESSION))
    flood(kit, engine, files, 3)
    mine = set(block_keys(kit.IDENTITY, PROMPT[:40]))
    assert engine.core.scheduler.kv.num_cached_blocks(block_keys(kit.IDENTITY, PROMPT[:40])) == 8
    assert mine <= set(files.kept)
    # its own next turn is no use by others, though a restore comes before it
    once(kit, engine, files, claimed(kit, "b", session=SESSION))
    flood(kit, engine, files, 3)
    freed = engine.core.scheduler.live.close_session(SESSION)
    settle(kit, engine, files)
    assert not mine & set(files.kept)
    assert freed == 48  # with the answer's two blocks


def test_what_others_use_survives_the_session_in_files(kit):
    files = MemoryFiles()
    engine = engine_on(kit, files, num_disk_blocks=100)
    once(kit, engine, files, claimed(kit, "a", session=SESSION))
    once(kit, engine, files, kit.make_request("other", PROMPT[:21], 8))
    engine.core.scheduler.live.close_session(SESSION)
    settle(kit, engine, files)
    keys = block_keys(kit.IDENTITY, PROMPT[:40])
    assert set(keys[:5]) <= set(files.kept)
    assert not set(keys[5:]) & set(files.kept)


# ---- what other workers ask for ----


class Reader:
    """Another worker's engine: asks `holder` for the whole blocks of PROMPT, and computes the prompt with what has come."""

    def __init__(self, kit, holder: OfflineEngine, windows: Sequence[int] = ()) -> None:
        self.kit, self.holder, self.windows = kit, holder, windows
        self.engine = kit.make_engine(windows=windows)
        self.grants = kit.make_grants(8, 40 * holder.core.scheduler.limits.kv_bytes_per_token)
        holder.send(GrantSlabs(self.grants))

    def ask(self, held: int = 0) -> None:
        self.engine.send(PullBlocks("pull", Prompt(PROMPT[:40]), vouch=True))
        [started] = self.engine.core.take_events()
        self.holder.send(PublishCached("source/pull", started.keys, held, "reader"))

    def take(self, events: Sequence) -> tuple[Admitted, Pulled]:
        """Args: events: of the holder. Returns: what it said it has, and what is here."""
        for number, one in enumerate(event for event in events if isinstance(event, RangePacked)):
            payload = memoryview(bytes(self.grants[one.slab].payload[: one.size_bytes]))
            part = UnpackRange("pull", number, one.first_token, one.num_tokens, payload, group=one.group, pull=True)
            self.engine.send(part)
        self.engine.send(EndPull("pull"))
        [done] = [event for event in self.engine.core.take_events() if isinstance(event, Pulled)]
        [said] = [event for event in events if isinstance(event, Admitted) and event.attempt == "source/pull"]
        return said, done

    def check(self, cached: int) -> None:
        """The prompt's answer, and what is vouched for, are those of an engine that computes it all."""
        self.engine.send(self.kit.make_request("p", PROMPT, mode=KvMode.PREFILL, want_kv=False))
        events = self.kit.run_until_idle(self.engine)
        [vouched] = [event for event in events if isinstance(event, PromptComputed)]
        [admitted] = [event for event in events if isinstance(event, Admitted)]
        assert admitted.num_cached_tokens == cached
        assert vouched.computed_from.digest == prompt_digest(PROMPT, 4)
        request = self.kit.make_request("r", PROMPT, 8)
        [result] = self.engine.generate([request])
        assert result.token_ids == self.kit.undisturbed([request], self.windows)["r"]


@pytest.mark.parametrize("windows", [(), *WINDOWS])
def test_a_holder_serves_what_is_in_its_files(kit, windows):
    """A worker that started again served its files to its own requests alone: others computed those prompts."""
    written = grouped(kit, windows) if windows else MemoryFiles()
    once(kit, engine_on(kit, written, windows=windows), written, kit.make_request("a", PROMPT, 8))
    files = grouped(kit, windows, dict(written.kept)) if windows else MemoryFiles(dict(written.kept))
    holder = engine_on(kit, files, windows=windows)
    reader = Reader(kit, holder, windows)
    reader.ask()
    said, done = reader.take(settle(kit, holder, files))
    assert (said.num_cached_tokens, said.tiers) == (40, (("disk", 40),))
    assert (done.num_tokens, done.num_new) == (40, 40)
    reader.check(40)
    # It was for the reader alone: nothing says whose tokens they are, and no prompt of the holder's was a hit.
    assert holder.core.scheduler.kv.pool.dump().tiers[0].keys == ()
    assert tier(holder).hit_tokens == 0
    assert computed(holder) == 0


def test_a_holder_serves_all_tiers_of_one_prompt_together(kit):
    files = MemoryFiles()
    rates = {"num_host_blocks": 4, "initial_copy_bytes_per_s": RATE}
    holder = engine_on(kit, files, num_blocks=16, **rates)
    once(kit, holder, files, kit.make_request("a", PROMPT, 8))
    once(kit, holder, files, kit.make_request("b", range(500, 540), 8))
    reader = Reader(kit, holder)
    reader.ask()
    said, done = reader.take(settle(kit, holder, files))
    tiers = dict(said.tiers)
    assert said.num_cached_tokens == done.num_new == 40
    assert set(tiers) == {"host", "disk"}
    assert sum(tiers.values()) < 40
    reader.check(40)


@pytest.mark.parametrize("windows", [(), (0, 6, 6, 9)])
@pytest.mark.parametrize("at", [0, 5])
def test_a_bad_block_ends_what_a_holder_serves_and_is_removed(kit, windows, at):
    """With windows what is before it sees other blocks: nothing of the files is sent."""
    written = grouped(kit, windows) if windows else MemoryFiles()
    once(kit, engine_on(kit, written, windows=windows), written, kit.make_request("a", PROMPT, 8))
    files = grouped(kit, windows, dict(written.kept)) if windows else MemoryFiles(dict(written.kept))
    files.bad[next(key for key, (block, _) in files.kept.items() if block.index == at)] = "corrupt"
    holder = engine_on(kit, files, windows=windows)
    reader = Reader(kit, holder, windows)
    reader.ask()
    said, done = reader.take(settle(kit, holder, files))
    assert said.num_cached_tokens == done.num_new == (0 if windows else 4 * at)
    reader.check(done.num_new)
    assert tier(holder).errors == (("corrupt", 1),)


def test_a_fetch_that_is_cancelled_while_its_blocks_are_read_leaves_nothing(kit):
    files = MemoryFiles(filled(kit).kept)
    holder = engine_on(kit, files)
    Reader(kit, holder).ask()
    assert holder.core.scheduler.kv.pool.counts.reserved == 10
    holder.send(Cancel("source/pull"))
    events = settle(kit, holder, files)
    assert [type(event.error) for event in events if isinstance(event, Failed)] == [RequestCancelledError]
    assert holder.core.scheduler.kv.pool.counts.reserved == 0


def test_a_fetch_that_comes_twice_ends_once(kit):
    files = MemoryFiles(filled(kit).kept)
    holder = engine_on(kit, files)
    reader = Reader(kit, holder)
    reader.ask()
    holder.send(PublishCached("source/pull", (bytes(16),), 0, "reader"))
    assert len([event for event in settle(kit, holder, files) if isinstance(event, Failed)]) == 1


def test_a_fetch_waits_as_long_as_computing_would_take_at_most(kit):
    files = MemoryFiles(filled(kit).kept)
    holder = engine_on(kit, files)
    reader = Reader(kit, holder)
    reader.ask()
    kit.run_until_idle(holder)
    holder.send(files.work())  # three blocks
    holder.core._clock.advance(3600.0)
    events = kit.run_until_idle(holder)
    said, done = reader.take(events)
    assert said.num_cached_tokens == done.num_new == 12
    settle(kit, holder, files)
    assert dict(tier(holder).errors)["late"] == 10
    reader.check(12)


@pytest.mark.parametrize("held", [0, 40])
def test_without_room_or_where_the_reader_has_it_no_file_is_read(kit, held):
    files = MemoryFiles(filled(kit).kept)
    holder = engine_on(kit, files, num_blocks=32 if held else 9)
    Reader(kit, holder).ask(held)
    assert not [one for one in files.queue if one[0] == "read"]
    [said] = [event for event in settle(kit, holder, files) if isinstance(event, Admitted)]
    assert said.num_cached_tokens == 0


def test_the_end_of_the_engine_ends_a_fetch_that_waits_once(kit):
    files = MemoryFiles(filled(kit).kept)
    holder = engine_on(kit, files)
    Reader(kit, holder).ask()
    holder.core.fail_all(RequestCancelledError("the end"))
    assert len([event for event in settle(kit, holder, files) if isinstance(event, Failed)]) == 1


def test_copies_of_a_busy_engine_take_a_part_of_its_time_only(kit):
    class SlowPack(FakeRunner):
        def pack(self, *args, **kwargs):
            engine.clock.advance(0.01)
            packs.append(engine.clock.now())
            return super().pack(*args, **kwargs)

        def execute(self, *args, **kwargs):
            engine.clock.advance(0.1)
            return super().execute(*args, **kwargs)

    packs: list[float] = []
    files = MemoryFiles(chunk_blocks=1)
    began = kit.FakeClock().now()
    config = kit.make_config(num_blocks=64, num_disk_blocks=64)
    engine = OfflineEngine(kit.local(SlowPack(64, kit.BLOCK)), config, kit.IDENTITY, clock=kit.FakeClock(), disk=files)
    engine.core.open_disk()
    engine.send(kit.make_request("a", 80, 100))
    while engine.core.scheduler.kv.disk.has_offers or not packs:
        engine.step()
        while files.queue:
            if (reply := files.work()) is not None:
                engine.send(reply)
        if engine.clock.now() - began > 9.0:
            break
    assert 0.8 < 0.01 * len(packs) / (0.02 * (engine.clock.now() - began)) <= 1.2


def test_settings_that_cannot_be_are_refused(kit):
    with pytest.raises(ConfigError, match="num_disk_blocks"):
        kit.make_engine(num_disk_blocks=4)
    with pytest.raises(ConfigError, match="num_disk_blocks"):
        kit.make_config(num_disk_blocks=-1)
    config = kit.make_config(num_blocks=32, num_disk_blocks=4)
    runner = FakeRunner(32, kit.BLOCK, windows=(0, 6))
    with pytest.raises(ConfigError, match="piece_bytes"):
        OfflineEngine(kit.local(runner), config, kit.IDENTITY, clock=kit.FakeClock(), disk=MemoryFiles())


# ---- the account, at random ----


class Books(RuleBasedStateMachine):
    """The tier's account at random, beside a disk that does what it is told."""

    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.tier, self.there, self.mirror, self.writing = (
            DiskTier(6, 8, tier_orders(self.eviction, 20)[2], claim_share=0.5),
            set(),
            set(),
            [],
        )
        self.use, self.now = 0, 0.0
        self.tier.open([])

    def name(self, number: int) -> bytes:
        return number.to_bytes(16, "big")

    @rule(first=st.integers(0, 9), count=st.integers(1, 5))
    def offer(self, first, count):
        self.use += 1
        self.tier.offer([self.name(first + i) for i in range(count)], first, "t", self.use)

    @rule(most=st.integers(1, 4), odd=st.booleans())
    def take(self, most, odd):
        blocks = self.tier.take(most, lambda key: odd or key[-1] % 2 == 0)
        self.obey()
        if blocks:
            self.writing.append(blocks)

    @rule(data=st.data())
    def written(self, data):
        if self.writing:
            blocks = self.writing.pop(0)
            good = data.draw(st.integers(0, len(blocks)))
            self.there.update(block.key for block in blocks[:good])
            self.tier.written(blocks, blocks[good:])
            self.obey()

    @rule(numbers=st.lists(st.integers(0, 14), max_size=4))
    def read(self, numbers):
        """Files that are there, or were a moment ago."""
        self.tier.learn([DiskBlock(self.name(number), "t", number) for number in numbers], self.use)
        self.obey()

    @rule(number=st.integers(0, 14))
    def discard(self, number):
        self.tier.discard(self.name(number))
        self.obey()

    @rule(first=st.integers(0, 9), count=st.integers(1, 5))
    def use_again(self, first, count):
        self.use += 1
        self.tier.used([self.name(first + i) for i in range(count)], self.use)

    @rule(
        first=st.integers(0, 9),
        count=st.integers(1, 5),
        ttl_s=st.integers(1, 5),
        priority=st.integers(0, 2),
        mine=st.booleans(),
    )
    def claim(self, first, count, ttl_s, priority, mine):
        wanted = CacheClaim(float(ttl_s), priority, b"s" * 16 if mine else b"")
        keys = [self.name(first + i) for i in reversed(range(count))]
        self.tier.claim(keys, "t" if mine else "u", wanted, self.now)

    @rule()
    def expire(self):
        self.now += 1.0
        self.tier.expire(self.now)

    @rule()
    def close(self):
        self.tier.close_session(b"s" * 16)
        self.obey()

    @rule()
    def restart(self):
        self.tier.restart()
        self.mirror.clear()

    def obey(self):
        self.there -= {block.key for block in self.tier.take_removed()}

    @invariant()
    def the_laws_hold(self):
        assert self.tier.check() == []
        for event in self.tier.take_events():
            (self.mirror.update if isinstance(event, TierStored) else self.mirror.difference_update)(event.keys)
        assert self.mirror == set(self.tier.keys) == self.there
        assert len(self.there) + sum(map(len, self.writing)) <= 6


class BooksByValue(Books):
    eviction = "value"


@pytest.mark.parametrize("books", [Books, BooksByValue])
def test_the_account_at_random(books):
    run_state_machine_as_test(books, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_random_load_with_every_tier_too_small_keeps_every_token(kit):
    """Hits, restores, evictions, swaps and files mix; the disk is slow, and damages blocks."""
    import random

    rng = random.Random(7)
    files = MemoryFiles(chunk_blocks=2)
    rates = {"initial_copy_bytes_per_s": RATE, "initial_prefill_tokens_per_s": 1.0}
    engine = engine_on(kit, files, num_blocks=14, num_host_blocks=6, num_disk_blocks=20, **rates)
    requests, events = [], []
    for i in range(80):
        shared = range(1000 - 4 * (i % 5), 1000 - 4 * (i % 5) + 4 * rng.randrange(0, 5))
        own = [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
        requests.append(kit.make_request(f"r{i}", [t % 1000 for t in shared] + own, rng.randrange(1, 16), seed=i))
    for request in requests:
        engine.send(request)
        for _ in range(rng.randrange(0, 6)):
            engine.clock.advance(0.001)  # the time that copies may take
            events += engine.step()
            if files.queue and rng.random() < 0.7:
                if files.kept and rng.random() < 0.1:
                    files.bad[rng.choice(list(files.kept))] = "corrupt"
                if (reply := files.work()) is not None:
                    engine.send(reply)
            files.bad = {key: why for key, why in files.bad.items() if key in files.kept}
    events += settle(kit, engine, files)
    want = kit.undisturbed(requests)
    for request in requests:
        assert kit.tokens_of(events, request.attempt) == want[request.attempt]
    assert tier(engine).hit_tokens > 0
    assert tier(engine).evicted_blocks > 0
    assert tier(engine).errors
