"""One engine over two processes with fake runners: the seam that tensor and pipeline parallelism will use."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from diptych.common import child
from diptych.common.adapters.peft import AdapterFacts, AdapterModule
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import AdapterError, ConfigError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.kv_format import windowed_format
from diptych.common.kv_parts import group_parts, split
from diptych.common.request import Prompt
from diptych.common.sampling import EarlyStopping, SamplingParams
from diptych.common.shared_memory import SharedArea
from diptych.engine.api import EngineClient
from diptych.engine.config import EngineConfig
from diptych.engine.executor import ExecutorLost, LocalExecutor
from diptych.engine.fake_runner import FakeAdapter, FakeRunner
from diptych.engine.grammar.program import mask_of, mask_words
from diptych.engine.messages import (
    BlockCopy,
    CopyKind,
    DropAdapter,
    EngineRequest,
    Failed,
    Finished,
    KeepAdapter,
    ScheduledSeq,
    TokensOut,
)
from diptych.engine.offline import OfflineEngine
from diptych.engine.ranks import executor as executor_module
from diptych.engine.ranks import starting
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.starting import RankSpec
from diptych.engine.runner import StepAborted
from diptych_tests.waiting import until, wait_until

pytestmark = pytest.mark.multiproc
BLOCK = 4
IDENTITY = IdentityHeader(b"k" * 32, "m", "t", "uint8", BLOCK)
POOL = {"num_blocks": 24, "block_size": BLOCK, "vocab_size": 300, "num_host_blocks": 8}
GENEROUS_S = 120.0


@pytest.fixture
def start(tmp_path, forked_ranks):
    """start(rank 0's fields, rank 1's fields, **executor's) -> (executor, notes of each rank)."""
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    executors = []

    def make(*ranks, sampler=1, deadline_s=GENEROUS_S, factory="rank_runner:RankRunner", **more):
        notes = [tmp_path / f"rank{i}" for i in range(len(ranks))]
        specs = [
            RankSpec(factory, {**POOL, **fields, "notes": str(path)}, env)
            for fields, path in zip(ranks, notes, strict=True)
        ]
        executors.append(RanksExecutor(specs, sampler=sampler, deadline_s=deadline_s, **more))
        return executors[-1], notes

    yield make
    for executor in executors:
        executor.close()


def engine_of(executor, drafter=None, **fields):
    settings = {"max_step_time_s": None, "mixed_step_time_s": None, "check_invariants": True, **fields}
    config = EngineConfig(24, BLOCK, num_host_blocks=8, **settings)
    return OfflineEngine(executor, config, IDENTITY, clock=FakeClock(), drafter=drafter)


class Alternates:
    """A grammar: even and odd tokens in turn."""

    slow, size_bytes, num_words = False, 1, mask_words(300)

    def __init__(self):
        self.count = 0

    def matcher(self):
        return Alternates()

    def accept(self, token_id):
        self.count += 1
        return token_id % 2 != self.count % 2

    def fill(self, mask):
        mask |= mask_of(range(self.count % 2, 300, 2), 300)


def requests():
    fields = [
        {},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": ((5, 2.0),), "bad_words": ((7, 8), (9,))},
        {"n": 3, "logprobs": 0},
        {"beam_width": 2, "n": 2, "temperature": 0.0, "early_stopping": EarlyStopping.NEVER},
    ]
    return [
        EngineRequest(
            f"r{i}", Prompt(tuple(range(10 + i, 20 + 2 * i))), SamplingParams(12, seed=i, ignore_eos=True, **some)
        )
        for i, some in enumerate(fields)
    ]


def outputs_of(engine):
    """Of every choice: a tight pool, so that sequences are preempted, swapped and forked."""
    out = {}
    for request in requests():
        engine.send(request)
    for _ in range(400):
        worked, events = engine.core.step(), engine.core.take_events()
        for event in events:
            if isinstance(event, TokensOut):
                one = out.setdefault((event.attempt, event.choice), [])
                one += zip(event.token_ids, event.logprobs or event.token_ids, strict=True)
        if not worked and not events:
            break
    assert engine.core.scheduler.audit(True).attempts == {}
    return out


def test_two_ranks_compute_what_one_runner_does(start, monkeypatch):
    monkeypatch.setattr(starting, "child", child)  # as shipped
    alone = engine_of(LocalExecutor(FakeRunner(**POOL)), preemption_mode="swap")
    expected = outputs_of(alone)
    executor, notes = start({}, {})
    engine = engine_of(executor, preemption_mode="swap")
    assert outputs_of(engine) == expected
    assert engine.stats().preemptions_total > 0
    assert engine.stats().swaps_total > 0
    first, second = ([json.loads(line) for line in path.read_text().splitlines()] for path in notes)
    assert [step for step, _ in first] == [step for step, _ in second], "every rank gets the same step message"
    assert sum(drawn for _, drawn in second) > 50
    assert executor.capabilities.kv_bytes_per_token == 2 * FakeRunner(**POOL).kv_bytes_per_token


def test_kv_of_all_ranks_is_packed_and_unpacked(start):
    prefill, _ = start({}, {})
    decode, _ = start({}, {})
    tokens = list(range(40, 51))
    seq = ScheduledSeq("a", tokens, 0, ([3, 5, 7],), True, SamplingParams(9, seed=1), 0)
    [(token,)] = prefill.execute([seq], lambda: False).token_ids
    assert prefill.capabilities.rank_sizes == ((2, 16), (2, 16))
    assert prefill.capabilities.kv_bytes_per_token == 32
    for part in (0, 1):
        payload = bytearray(11 * 16)
        checksum = prefill.pack([3, 5, 7], 11, memoryview(payload), part=part)
        assert checksum == prefill.pack([3, 5, 7], 11, memoryview(bytearray(11 * 16)), part=part)
        decode.unpack([9, 2, 4], 11, memoryview(payload), part=part)
    decode.copy_blocks([BlockCopy(CopyKind.FORK, 4, 6)])
    rows = [
        executor.execute([ScheduledSeq("a", [token], 11, (table,), True, SamplingParams(9, seed=1), 1)], lambda: False)
        for executor, table in ((prefill, [3, 5, 7]), (decode, [9, 2, 6]))
    ]
    assert rows[0].token_ids == rows[1].token_ids


def test_23_ranks_have_their_heads_of_every_kv_group(start):
    """A worker of two ranks kept every token of layers with a window."""
    kv = windowed_format([0, 8], 2, FakeRunner(4, BLOCK).kv.only_group.dims[0], block_size=BLOCK, dtype="int8")
    fields = {"windows": [0, 8], "num_host_blocks": 0}
    executor, _ = start(fields, fields, kv=kv, parts=split(kv, tensor_parallel=2))
    local = FakeRunner(**{**POOL, **fields})
    assert executor.capabilities.group_blocks == local.group_blocks
    config = EngineConfig(24, BLOCK, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True)
    over_ranks, alone = (
        OfflineEngine(one, config, IDENTITY, clock=FakeClock()) for one in (executor, LocalExecutor(local))
    )
    found, expected = (engine.generate(requests()[:3]) for engine in (over_ranks, alone))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    tables = ([3, 5], [1, 2])
    seq = ScheduledSeq("a", list(range(40, 47)), 0, tables, True, SamplingParams(9), 0, first_blocks=(0, 0))
    executor.execute([seq], lambda: False)
    local.execute([seq])
    for group, table in enumerate(tables):
        size = 7 * kv.groups[group].bytes_per_token(kv.shard) // 2
        want, got = bytearray(size), bytearray(size)
        checksum = local.pack(table, 7, memoryview(want), None, group)
        for part in (0, 1):
            assert executor.pack(table, 7, memoryview(got), None, group, part) == checksum
            assert got == want


def test_23_stages_have_the_kv_groups_of_their_layers(start):
    """Of three groups the first stage has two, the second, which samples, the third one only. What it has recorded of blocks of
    the first group is forgotten when other KV comes into them, on the first stage."""
    dim = FakeRunner(4, BLOCK).kv.only_group.dims[0]
    kv = windowed_format([0, 8, 0, 12], 1, dim, block_size=BLOCK, dtype="int8")
    parts = split(kv, pipeline=2)
    fields = [{"windows": [0, 8], "num_host_blocks": 0}, {"windows": [0, 12], "num_host_blocks": 0}]
    executor, _ = start(*fields, kv=kv, parts=parts)
    able = executor.capabilities
    assert (able.kv, able.parts, able.num_layers, able.group_blocks) == (kv, parts, 4, (24, 24, 24))
    assert able.rank_sizes == ((2, kv.bytes_per_token // 2),) * 2
    want = {}
    for number, one in enumerate(group_parts(kv, parts)):
        want[one] = bytes((n + 1) * (number + 3) % 251 for n in range(7 * one.bytes_per_token))
        executor.unpack([3 + number, 9], 7, memoryview(bytearray(want[one])), None, one.own, one.part)
    for number, one in enumerate(want):
        got = bytearray(len(want[one]))
        executor.pack([3 + number, 9], 7, memoryview(got), None, one.own, one.part)
        assert got == want[one]
    with pytest.raises(ConfigError, match=r"groups=\['full', 'window-8'\]: rank 0 .* expects \['full', 'window-12'\]"):
        start(*fields, kv=kv, parts=parts[::-1])
    both = windowed_format([0, 8, 0, 8], 1, dim, block_size=BLOCK, dtype="int8")
    with pytest.raises(ConfigError, match=r"group_blocks=\[\[24\], \[4, 24\]\]: must be the same"):
        start(fields[0], {**fields[0], "demand": [1, 4]}, kv=both, parts=split(both, pipeline=2))


def test_23_the_rank_that_samples_forgets_blocks_that_another_stage_unpacks(start):
    """It records what the first group's blocks were computed from, also where it has no layers of that group."""
    dim = FakeRunner(4, BLOCK).kv.only_group.dims[0]
    kv = windowed_format([0, 0, 8, 8], 1, dim, block_size=BLOCK, dtype="int8")
    fields = [
        {"windows": windows, "groups": [group], "num_host_blocks": 0} for group, windows in enumerate(([0, 0], [8, 8]))
    ]
    executor, _ = start(*fields, kv=kv, parts=split(kv, pipeline=2))
    config = EngineConfig(24, BLOCK, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True)
    last = FakeRunner(**{**POOL, **fields[1], "groups": []})
    over_ranks, alone = (
        OfflineEngine(one, config, IDENTITY, clock=FakeClock()) for one in (executor, LocalExecutor(last))
    )
    found, expected = (engine.generate(requests()[:4]) for engine in (over_ranks, alone))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected], "what its own layers see"
    tables = ([3, 5, 7], [2, 4, 6])

    def computed_from(first):
        seq = ScheduledSeq(
            "a", [9], first, tables, True, SamplingParams(9, temperature=0.0), 0, first_blocks=(0, 0), vouch=True
        )
        return executor.execute([seq], lambda: False).computed_from

    executor.note_pulled([3, 5], list(range(40, 48)), 0)
    assert computed_from(8)[0].num_tokens == 9
    payload = memoryview(bytearray(BLOCK * kv.bytes_per_token // 2))
    executor.unpack([7], BLOCK, payload, part=1)
    executor.unpack([6], BLOCK, payload, part=0)
    assert computed_from(9)[0].num_tokens == 10, "other blocks, or of another group"
    executor.unpack([7], BLOCK, payload, part=0)
    assert computed_from(10) == {}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["die", "hang"])
def test_a_rank_that_dies_or_hangs_ends_the_engine(start, rank, what):
    """Long before the call's deadline, wherever the rank is; and no process is left that waits for it."""
    fields = [{}, {}]
    fields[rank] = {"at": 3, "what": what}
    executor, _ = start(*fields, silence_s=2.0)
    processes = [one.process for one in executor._ranks]
    engine = engine_of(executor)
    with pytest.raises(ExecutorLost, match=f"rank {rank} ended" if what == "die" else "no rank made progress"):
        engine.generate(requests())
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(ExecutorLost):
        executor.execute([], lambda: False)


async def test_with_a_lost_rank_every_request_fails_and_the_worker_is_notified(start):
    executor, _ = start({}, {"at": 2, "what": "die"})
    ended = asyncio.Event()
    seen = []

    def on_events(events):
        seen.extend(events)
        if any(isinstance(event, (Failed, Finished)) for event in events):
            ended.set()

    client = EngineClient(executor, EngineConfig(24, BLOCK), IDENTITY, None, on_events)
    client.start()
    try:
        client.send(requests()[0])
        async with asyncio.timeout(GENEROUS_S):
            await ended.wait()
        [failed] = [event for event in seen if isinstance(event, Failed)]
        assert "rank 1 ended" in failed.error.message
        await until(lambda: not client.stats().alive, "the worker is told", deadline_s=GENEROUS_S)
    finally:
        await client.close(GENEROUS_S)


def test_a_signal_to_all_processes_of_a_worker_ends_no_rank(start):
    """Ctrl-C in a terminal, or systemd's stop: the worker drains, and needs its ranks for that."""
    executor, _ = start({}, {})
    processes = [one.process for one in executor._ranks]
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert os.getpgid(process.pid) != os.getpgid(0)
    seq = ScheduledSeq("a", [4, 5], 0, ([1],), True, SamplingParams(9, seed=1), 0)
    assert executor.execute([seq], lambda: False) == FakeRunner(**POOL).execute([seq])
    executor.close()
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(("signum", "why"), [(signal.SIGKILL, "rank 1 ended"), (signal.SIGSTOP, "rank 1 is stopped")])
def test_a_rank_that_is_killed_or_stopped_while_nothing_is_computed_is_noticed(start, signum, why):
    executor, _ = start({}, {}, silence_s=2.0)
    processes, reasons = [one.process for one in executor._ranks], []
    executor.on_lost(reasons.append)
    os.kill(processes[1].pid, signum)
    wait_until(lambda: reasons, what="it is noticed")
    assert why in reasons[0]
    with pytest.raises(ExecutorLost, match=why):
        executor.copy_blocks([])
    assert all(process.poll() is not None for process in processes)


def test_a_rank_that_is_killed_while_it_reads_an_adapter_is_noticed_by_the_reader_and_by_the_engine(start, tmp_path):
    (tmp_path / "readable").touch()
    os.mkfifo(tmp_path / "gate")
    executor, _ = start({"max_loras": 1}, {"max_loras": 1})
    reasons = []
    executor.on_lost(reasons.append)

    def read():
        with pytest.raises(ExecutorLost, match="rank 0 ended"):
            executor.read_adapter(tmp_path, AdapterFacts("cd" * 16, 4, 100, "", ()))
        reasons.append("the reader knows")

    thread = threading.Thread(target=read)
    thread.start()
    gate = os.open(tmp_path / "gate", os.O_WRONLY)  # a rank reads, and cannot come to the end
    executor._ranks[0].process.kill()
    thread.join(GENEROUS_S)
    os.close(gate)
    assert sorted(reasons)[1:] == ["the reader knows"]


async def test_an_idle_worker_is_notified_of_a_lost_rank(start):
    executor, _ = start({}, {})
    client = EngineClient(executor, EngineConfig(24, BLOCK), IDENTITY, None, lambda events: None)
    client.start()
    try:
        await client.audit()
        executor._ranks[0].process.kill()
        await until(lambda: not client.stats().alive, "the worker is told", deadline_s=GENEROUS_S)
    finally:
        await client.close(GENEROUS_S)


def test_a_step_is_given_up_by_all_ranks_and_they_go_on(start):
    fields = {"at": 1, "what": "until it is given up"}
    executor, _ = start(fields, fields, sampler=0)
    seq = ScheduledSeq("a", [4, 5], 0, ([1],), True, SamplingParams(9, seed=1), 0)
    looks = iter([False, False, True])
    with pytest.raises(StepAborted):
        executor.execute([seq], lambda: next(looks, True))
    after = executor.execute([seq], lambda: False)
    assert after == FakeRunner(**POOL).execute([seq])


@pytest.mark.parametrize("drafts", [False, True])
def test_ranks_take_steps_ahead_and_draw_under_grammars(start, drafts):
    """As one runner that does neither: prompts, penalties, a grammar, beams and choices."""
    constrained = EngineRequest(
        "g", Prompt((1, 2)), SamplingParams(9, seed=3, ignore_eos=True, grammar=Grammar(GrammarKind.REGEX, "a")),
        grammar=Alternates(),
    )  # fmt: skip

    def run(executor, **fields):
        engine = engine_of(executor, **fields)
        everything = outputs_of(engine)
        few = engine.generate([requests()[0], requests()[2], constrained])
        return everything, [one.token_ids for one in few], engine.core.steps_ahead

    expected = run(LocalExecutor(FakeRunner(**POOL)))
    assert [token % 2 for token in expected[1][2]] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    executor, _ = start({}, {}, factory="rank_runner:AheadRunner")
    drafter = (lambda attempt, tokens, most: [5, 6][:most]) if drafts else None
    *outputs, num_ahead = run(executor, drafter=drafter)
    assert outputs == list(expected[:2])
    assert drafts or num_ahead > 10


@pytest.mark.parametrize("at", [1, 4])
def test_a_step_that_cannot_be_launched_fails_with_the_one_behind_it_and_the_engine_lives_on(start, at):
    """The step behind it takes its tokens from it. Nobody waits for either."""
    executor, _ = start({"at": at}, {"at": at}, factory="rank_runner:AheadRunner")
    engine = engine_of(executor)
    [failed] = engine.generate(requests()[:1])
    assert "memory is used up" in failed.error.message
    [after] = engine.generate(requests()[2:3])
    [alone] = engine_of(LocalExecutor(FakeRunner(**POOL))).generate(requests()[2:3])
    assert after.token_ids == alone.token_ids
    assert engine.core.scheduler.audit(True).violations == ()


def test_kv_of_a_computed_layer_is_packed_while_the_others_are_computed(start, tmp_path):
    fields = {"num_layers": 4, "go": str(tmp_path / "go")}
    executor, _ = start(fields, fields)
    seq = ScheduledSeq("a", list(range(40, 51)), 0, ([3, 5, 7],), True, SamplingParams(9, seed=1), 0)
    area = SharedArea(1 << 16)
    slab, seen = memoryview(area.memory)[512:1024], []

    def on_layers(num_layers):
        (tmp_path / "go").touch()
        some = range(num_layers - 1, num_layers)
        seen.append((num_layers, executor.pack([3, 5, 7], 11, slab, some, part=1), bytes(slab[: 11 * 8])))

    executor.execute([seq], lambda: False, on_layers)
    assert [num_layers for num_layers, _, _ in seen] == sorted({num_layers for num_layers, _, _ in seen})
    assert seen
    for num_layers, checksum, data in seen:
        again = memoryview(bytearray(11 * 8))
        assert executor.pack([3, 5, 7], 11, again, range(num_layers - 1, num_layers), part=1) == checksum
        assert bytes(again) == data
    executor.unpack([9, 8, 2], 11, slab, range(2, 3), part=1)
    assert executor.pack([9, 8, 2], 11, again, range(2, 3), part=1) == seen[-1][1]


def test_a_rank_that_takes_no_bytes_is_lost_too(start):
    """A frame larger than the socket holds, to a rank that hangs in the step before."""
    executor, _ = start({}, {"at": 1, "what": "hang"}, deadline_s=3.0)
    seq = ScheduledSeq("a", [1], 0, (list(range(24)) * 100_000,), True, SamplingParams(9), 0)
    with pytest.raises(ExecutorLost, match="did not answer within 3 s"):
        executor.execute([seq], lambda: False)


@pytest.mark.parametrize(("what", "message"), [("raise", "this rank's kernel failed"), ("memory", "memory is used up")])
def test_a_step_that_one_rank_cannot_compute_fails_and_the_engine_lives_on(start, what, message):
    executor, _ = start({"at": 1, "what": what}, {})
    engine = engine_of(executor)
    [failed] = engine.generate(requests()[:1])
    assert message in failed.error.message
    [after] = engine.generate(requests()[1:2])
    [alone] = engine_of(LocalExecutor(FakeRunner(**POOL))).generate(requests()[1:2])
    assert after.token_ids == alone.token_ids


@pytest.mark.parametrize(("what", "message"), [("raise", "this rank's kernel failed"), ("memory", "4 GiB")])
def test_23_an_error_of_one_rank_for_which_the_others_wait_ends_the_worker(start, monkeypatch, what, message):
    """They waited for its part until the end of their exchange's deadline, which is minutes. The machine is so busy that
    they seem to compute: no rank counts as silent."""
    monkeypatch.setattr(executor_module, "_AFTER_FAILURE_S", 0.2)
    executor, _ = start({"at": 1, "what": what}, {"at": 1, "what": "wait and look busy"}, silence_s=GENEROUS_S)
    lost = []
    executor.on_lost(lost.append)
    seq = ScheduledSeq("a", [1, 2], 0, ([0],), True, SamplingParams(9, temperature=0.0), 0)
    with pytest.raises(ExecutorLost, match=rf"rank 0 failed: .*{message}; ranks \[1\] wait for it"):
        executor.execute([seq], lambda: False)
    assert len(lost) == 1


def test_ranks_that_do_not_come_up_or_do_not_fit_together(start):
    with pytest.raises(ConfigError, match="model='m': a tensor of this rank cannot be read"):
        start({}, {"what": "refuse"}, factory="rank_runner:second_refuses")
    with pytest.raises(ExecutorLost, match="rank [01] ended"):
        start({}, {}, factory="rank_runner:broken")
    with pytest.raises(ConfigError, match="num_blocks"):
        start({"num_blocks": 30}, {})
    with pytest.raises(ConfigError, match="max_loras"):
        start({"max_loras": 2}, {"max_loras": 3})
    with pytest.raises(ConfigError, match=r"groups=\['full', 'window-8'\]: rank 0 .* expects \['full'\]"):
        start({"windows": [0, 8]}, {"windows": [0, 8]})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3: 8 heads cannot be divided among 3 ranks"):
        start({}, {}, factory="rank_runner:refuses")
    with pytest.raises(ConfigError, match="sampler"):
        start({}, {}, sampler=2)


def test_every_rank_reads_its_part_of_an_adapter_and_forgets_it(start, tmp_path):
    facts = AdapterFacts("ab" * 16, 4, 100, "base", (AdapterModule("model.q_proj", 4, 0.5, 8, 8),))
    fields = {"max_loras": 1, "max_lora_rank": 4}
    executor, _ = start(fields, fields)
    with pytest.raises(AdapterError, match="the folder is gone") as error:
        executor.read_adapter(tmp_path, facts)
    assert error.value.param == "lora_path"
    (tmp_path / "readable").touch()
    with pytest.raises(AdapterError, match="rank 5 is above the maximum of 4"):
        executor.read_adapter(tmp_path, dataclasses.replace(facts, rank=5))
    adapter = executor.read_adapter(tmp_path, facts)
    assert (adapter.id, adapter.rank, adapter.num_bytes) == (facts.id, 4, 200)
    request = EngineRequest("a", Prompt(tuple(range(9)), adapter=facts.id), SamplingParams(6, seed=1, ignore_eos=True))
    alone = engine_of(LocalExecutor(FakeRunner(**POOL, **fields)))
    alone.send(KeepAdapter(FakeAdapter(facts.id)))
    engine = engine_of(executor)
    engine.send(KeepAdapter(adapter))
    assert [r.token_ids for r in engine.generate([request])] == [r.token_ids for r in alone.generate([request])]
    engine.send(DropAdapter(facts.id))
    number = adapter.number
    del adapter
    gc.collect()
    assert list(executor._forgotten) == [number], "what failed was forgotten before"
    again = executor.read_adapter(tmp_path, facts)
    executor.install_adapter(0, again)
    assert not executor._forgotten


def test_steps_go_on_while_ranks_read_an_adapter(start, tmp_path):
    facts = AdapterFacts("cd" * 16, 4, 100, "", ())
    (tmp_path / "readable").touch()
    os.mkfifo(tmp_path / "gate")
    executor, _ = start({"max_loras": 1}, {"max_loras": 1})
    engine, read = engine_of(executor), []
    thread = threading.Thread(target=lambda: read.append(executor.read_adapter(tmp_path, facts)))
    thread.start()
    results = engine.generate(requests()[:1])
    assert (len(results[0].token_ids), read) == (12, [])
    gate = os.open(tmp_path / "gate", os.O_WRONLY)
    thread.join(GENEROUS_S)
    os.close(gate)
    assert [one.id for one in read] == [facts.id]
