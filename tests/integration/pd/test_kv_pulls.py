"""A worker takes leading blocks of a prompt from any other one's prefix cache: real engines, gRPC and ledgers, in process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from diptych.cli.worker_roles import services_of
from diptych.common.errors import NoWorkerError, WorkerDrainedError
from diptych.engine.messages import EndPull, EngineRequest, PullBlocks
from diptych.engine.sched.cache.kv_cache_manager import KvCacheManager
from diptych.rpc.v1 import decode_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.process import make_transfer
from diptych.worker.reads.block_pulls import FORGET_S
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

PROMPT = [(7 * i + 3) % 1000 for i in range(100)]
NEW = [(13 * i + 1) % 1000 for i in range(21)]
BLOCK = 16


def source(holder: WorkerRuntime, num_tokens: int, compute_s: float = 3600.0, **changes: str) -> types_pb2.KvSource:
    """A plan to take the leading tokens from `holder`. `changes`: of its reference."""
    ref = wire.ref_to_proto(holder.ref)
    for name, value in changes.items():
        setattr(ref, name, value)
    return types_pb2.KvSource(holder=ref, num_tokens=num_tokens, compute_s=compute_s)


def submit(cluster: Any, attempt: str, prompt: list[int], **arguments: Any) -> decode_pb2.Submit:
    for_prefill, for_decode = arguments.pop("for_prefill", None), arguments.pop("for_decode", None)
    message: decode_pb2.Submit = cluster.submit_message(attempt=attempt, prompt=prompt, **arguments)
    if for_prefill is not None:
        message.placement.prefill_source.CopyFrom(for_prefill)
    if for_decode is not None:
        message.placement.decode_source.CopyFrom(for_decode)
    return message


async def undisturbed(pd: ModuleType, *prompts: list[int], max_tokens: int = 8, **model: Any) -> list[list[int]]:
    async with (
        pd.cluster(num_prefill=0, decode=lambda: pd.fake_model(**model)) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        return [
            (await router.run(alone.submit_message(attempt=f"l{i}", prompt=prompt, max_tokens=max_tokens))).token_ids
            for i, prompt in enumerate(prompts)
        ]


async def first_turn(pd: ModuleType, cluster: Any, router: Any) -> tuple[list[int], int]:
    """Returns: the second turn's prompt, and how many of its leading tokens decode holds."""
    answer = await router.run(submit(cluster, "turn-1", PROMPT, max_tokens=40))
    history = [*PROMPT, *answer.token_ids]
    return [*history, *NEW], (len(history) - 1) // BLOCK * BLOCK


def second_decode(pd: ModuleType) -> AbstractAsyncContextManager[WorkerRuntime]:
    return other_decode(pd, pd.fake_model())


@asynccontextmanager
async def other_decode(pd: ModuleType, model: Any, **settings: object) -> AsyncIterator[WorkerRuntime]:
    worker = WorkerRuntime(
        pd.worker_config("decode", "decode-1", **settings),
        model,
        make_transfer=make_transfer,
        make_services=services_of,
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


@pytest.mark.parametrize("windows", [(), (0, 40, 40)])
async def test_the_second_turn_computes_at_most_a_block_and_the_new_tokens(pd: ModuleType, windows: Any) -> None:
    model = {"num_layers": len(windows), "windows": windows} if windows else {}
    make = lambda: pd.fake_model(**model)  # noqa: E731
    async with pd.cluster(decode=make, prefill=make) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        prefill = cluster.prefill[0]
        turn_2, held = await first_turn(pd, cluster, router)
        before = prefill.engine.stats().computed_tokens_total
        answer = await router.run(submit(cluster, "turn-2", turn_2, for_prefill=source(cluster.decode, held)))
        computed = prefill.engine.stats().computed_tokens_total - before
        assert computed == len(turn_2) - held <= BLOCK + len(NEW)
        why = answer.explanation
        assert why.prefill == prefill.worker_id
        assert why.cached_tokens_prefill == why.cached_tokens_decode == held
        [pull] = why.pulls
        assert (pull.reader, pull.holder, pull.note) == ("prefill-0", "decode-0", "")
        assert (pull.first_token, pull.num_tokens) == (96, held - 96)  # prefill computed 96 of them in the first turn
        assert pull.kv_bytes > 0
        assert answer.finished.usage.cached_tokens == held
        await cluster.nothing_left()
    assert [answer.token_ids] == await undisturbed(pd, turn_2, **model)


async def test_without_a_source_prefill_computes_the_answer_again(pd: ModuleType) -> None:
    """What it costs without, with the same prompts."""
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        turn_2, held = await first_turn(pd, cluster, router)
        before = cluster.prefill[0].engine.stats().computed_tokens_total
        answer = await router.run(submit(cluster, "turn-2", turn_2))
        assert cluster.prefill[0].engine.stats().computed_tokens_total - before == len(turn_2) - 96 > len(turn_2) - held
        assert not answer.explanation.pulls


async def test_decode_takes_a_prompt_from_another_decode_worker_and_computes_the_rest(pd: ModuleType) -> None:
    async with (
        pd.cluster() as cluster,
        second_decode(pd) as other,
        pd.FakeRouter(cluster.decode.address) as router,
        pd.FakeRouter(other.address) as to_other,
    ):
        turn_2, held = await first_turn(pd, cluster, router)
        message = pd.submit_message(other, [], attempt="turn-2", prompt=turn_2, local=True, local_max=64)
        message.placement.decode_source.CopyFrom(source(cluster.decode, held))
        answer = await to_other.run(message)
        assert answer.explanation.local_prefill
        assert answer.explanation.cached_tokens_decode == held
        [pull] = answer.explanation.pulls
        assert (pull.reader, pull.holder, pull.num_tokens) == ("decode-1", "decode-0", held)
        assert other.engine.stats().computed_tokens_total - 32 == len(turn_2) - held  # 32: the warm-up
        # and from a worker that has it by a pull, a prefill worker takes it, too
        again = await router.run(submit(cluster, "turn-3", turn_2, for_prefill=source(other, held)))
        assert again.token_ids == answer.token_ids
        await cluster.nothing_left()
        await cluster.settle(other)
    assert [answer.token_ids] == await undisturbed(pd, turn_2)


async def test_prefill_takes_a_prompt_from_another_prefill_worker(pd: ModuleType) -> None:
    async with pd.cluster(num_prefill=2) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        one, two = cluster.prefill
        await router.run(submit(cluster, "a", PROMPT, prefill=[one]))
        await cluster.decode.engine.reset_cache()
        before = two.engine.stats().computed_tokens_total
        answer = await router.run(submit(cluster, "b", PROMPT, prefill=[two], for_prefill=source(one, 96)))
        assert two.engine.stats().computed_tokens_total - before == 4
        [pull] = answer.explanation.pulls
        assert (pull.reader, pull.holder, pull.num_tokens) == ("prefill-1", "prefill-0", 96)
        await cluster.nothing_left()
    assert [answer.token_ids] == await undisturbed(pd, PROMPT)


async def test_what_has_left_the_pool_for_host_memory_is_taken_from_there(pd: ModuleType) -> None:
    def model() -> Any:
        return pd.fake_model(num_blocks=8, num_host_blocks=32)

    async with (
        pd.cluster(num_prefill=1) as cluster,
        other_decode(pd, model(), num_host_blocks=32, max_model_len=120) as holder,
        pd.FakeRouter(holder.address) as to_holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        for attempt, prompt in (("a", PROMPT), ("b", list(range(800, 900)))):
            await to_holder.run(
                pd.submit_message(holder, [], attempt=attempt, prompt=prompt, local=True, local_max=200, max_tokens=2)
            )
        answer = await router.run(submit(cluster, "b", PROMPT, for_prefill=source(holder, 96)))
        [pull] = answer.explanation.pulls
        assert (pull.num_tokens, pull.note) == (96, "")
        [part] = pull.source_tiers
        assert (part.tier, part.tokens) == ("host", 80)
        await cluster.nothing_left()
        await cluster.settle(holder)
    assert [answer.token_ids] == await undisturbed(pd, PROMPT)


async def test_two_readers_of_one_request_take_from_one_holder(pd: ModuleType) -> None:
    """Prefill and decode both lack the prompt: each has a pull of its own name."""
    async with (
        pd.cluster(num_prefill=1) as cluster,
        second_decode(pd) as holder,
        pd.FakeRouter(holder.address) as to_holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        await to_holder.run(pd.submit_message(holder, [], attempt="a", prompt=PROMPT, local=True, local_max=200))
        plan = source(holder, 96)
        answer = await router.run(submit(cluster, "b", PROMPT, for_prefill=plan, for_decode=plan))
        assert {pull.reader: pull.num_tokens for pull in answer.explanation.pulls} == {"prefill-0": 96, "decode-0": 96}
        await cluster.nothing_left()
        await cluster.settle(holder)
    assert [answer.token_ids] == await undisturbed(pd, PROMPT)


async def gone(pd: ModuleType, cluster: Any, held: int) -> types_pb2.KvSource:
    """A worker that has ended since the placement."""
    async with second_decode(pd) as worker:
        return source(worker, held)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("holder gone", "WORKER_LOST"),
        ("another incarnation", "STALE"),
        ("evicted", "had 0 of"),
        ("other model", "INCOMPATIBLE"),
        ("no role", "offers no"),
        ("too slow", "took longer than computing"),
        ("no room", "no free blocks"),
        ("damaged", "TRANSFER_FAILED"),
    ],
)
async def test_whatever_happens_to_a_pull_the_answer_is_the_same(
    pd: ModuleType, what: str, why: str, monkeypatch: Any
) -> None:
    config: dict[str, Any] = {}
    if what == "damaged":
        config["fault_corrupt_every"] = 1
    async with (
        pd.cluster(prefill_config=config) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        turn_2, held = await first_turn(pd, cluster, router)
        plan = source(cluster.decode, held)
        match what:
            case "holder gone":
                plan = await gone(pd, cluster, held)
            case "another incarnation":
                plan = source(cluster.decode, held, incarnation="old")
            case "evicted":
                await cluster.decode.engine.reset_cache()
            case "other model":
                monkeypatch.setattr(
                    "diptych.worker.peers.differences", lambda mine, theirs, **_: ["model_revision: mine a, theirs b"]
                )
            case "no role":
                monkeypatch.setattr("diptych.worker.peers._services", lambda info: {"diptych.rpc.v1.Decode"})
            case "no room":
                admit = KvCacheManager.admit
                monkeypatch.setattr(
                    KvCacheManager,
                    "admit",
                    lambda kv, request, **how: "pull/" not in request.attempt and admit(kv, request, **how),
                )
            case "too slow":
                plan.compute_s = 0.0
                monkeypatch.setattr("diptych.worker.reads.block_pulls.LEAST_S", 1e-6)
        answer = await router.run(submit(cluster, "turn-2", turn_2, for_prefill=plan, local_max=0))
        [pull] = answer.explanation.pulls
        assert why in pull.note, pull
        assert pull.num_tokens == 0
        await cluster.nothing_left()
    assert [answer.token_ids] == await undisturbed(pd, turn_2)


class Endless:
    """Once it is armed, a step has layers without end, until `end`."""

    def __init__(self) -> None:
        self.armed = False
        self.began, self._end = threading.Event(), threading.Event()
        self.runner: Any = None

    def model(self, pd: ModuleType) -> Any:
        model = pd.fake_model(before_execute=self._before, between_layers=self._between)
        self.runner = model.runner
        return model

    def _before(self, seqs: Any) -> None:
        if self.armed:
            self.began.set()

    def _between(self, num_layers: int) -> None:
        while self.began.is_set() and not self._end.wait(0.001):  # short: a layer of the long step
            self.runner.on_layers(num_layers)

    def end(self) -> None:
        self._end.set()


async def test_a_holder_in_a_long_step_serves_a_pull(pd: ModuleType) -> None:
    """And the reader takes it in a long step of its own: what was pulled is there before either of them ends."""
    busy_holder, busy_reader = Endless(), Endless()
    async with (
        pd.cluster(prefill=lambda: busy_reader.model(pd)) as cluster,
        other_decode(pd, busy_holder.model(pd)) as holder,
        pd.FakeRouter(holder.address) as to_holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        prefill = cluster.prefill[0]
        await to_holder.run(pd.submit_message(holder, [], attempt="h", prompt=PROMPT, local=True, local_max=200))
        try:
            busy_holder.armed = busy_reader.armed = True
            to_holder.submit(pd.submit_message(holder, [], attempt="b1", prompt=NEW, local=True, local_max=200))
            router.submit(submit(cluster, "b2", NEW))
            for busy in (busy_holder, busy_reader):
                assert await asyncio.to_thread(busy.began.wait, pd.DEADLINE_S)
            answer = router.submit(submit(cluster, "a", PROMPT, for_prefill=source(holder, 96)))
            pulls = prefill.role.services["source"]._reading.pulls  # type: ignore[attr-defined]
            taken: list[Any] = []
            pulls._on_pulled = taken.append
            await waiting.until(lambda: bool(taken), "the engine has the blocks")
            assert (taken[0].num_tokens, taken[0].note) == (96, "")
            assert holder.engine.stats().busy_since is not None
            assert prefill.engine.stats().busy_since is not None
        finally:
            busy_holder.end()
            busy_reader.end()
        for ended in ("b2", "a"):
            await router.ended(ended)
        await to_holder.ended("b1")
        [pull] = answer.explanation.pulls
        assert pull.num_tokens == answer.explanation.cached_tokens_prefill == 96
        await cluster.nothing_left()
        await cluster.settle(holder)
    assert [answer.token_ids] == await undisturbed(pd, PROMPT)


async def test_a_pull_is_given_up_while_the_readers_own_step_goes_on(pd: ModuleType, monkeypatch: Any) -> None:
    """By a timer of the event loop, and the request is with the engine at once."""
    monkeypatch.setattr("diptych.worker.reads.block_pulls.LEAST_S", 1e-6)
    gate = pd.Gate(after=10**6)
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate)) as cluster,
        second_decode(pd) as holder,
        pd.FakeRouter(holder.address) as to_holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        prefill = cluster.prefill[0]
        await to_holder.run(pd.submit_message(holder, [], attempt="h", prompt=PROMPT, local=True, local_max=200))
        sent: list[Any] = []
        send = prefill.engine.send
        monkeypatch.setattr(prefill.engine, "send", lambda command: (sent.append(command), send(command)))
        gate.close(after=0)
        router.submit(submit(cluster, "busy", NEW))
        await gate.wait()
        answer = router.submit(submit(cluster, "a", PROMPT, for_prefill=source(holder, 96, compute_s=0.0)))
        await waiting.until(lambda: len(sent) == 4, "the request is with the engine")
        assert [type(command) for command in sent] == [EngineRequest, PullBlocks, EndPull, EngineRequest]
        gate.open()
        for ended in ("busy", "a"):
            await router.ended(ended)
        [pull] = answer.explanation.pulls
        assert pull.num_tokens == 0
        assert "prefill-0 took longer than computing would have" in pull.note
        await cluster.nothing_left()
    assert [answer.token_ids] == await undisturbed(pd, PROMPT)


async def test_part_of_it_is_used(pd: ModuleType) -> None:
    """The holder has evicted the last blocks."""
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        turn_2, held = await first_turn(pd, cluster, router)

        def evict_last(core: Any) -> None:
            pool = core.scheduler.kv.pool
            pool.discard(pool.find(pool.dump().tiers[0].keys)[-1:])

        await cluster.decode.engine._query(evict_last, pd.DEADLINE_S)
        answer = await router.run(submit(cluster, "turn-2", turn_2, for_prefill=source(cluster.decode, held)))
        [pull] = answer.explanation.pulls
        assert pull.num_tokens == held - 96 - BLOCK
        assert f"had {held - BLOCK} of {held} tokens" in pull.note
        await cluster.nothing_left()
    assert [answer.token_ids] == await undisturbed(pd, turn_2)


async def test_a_tenant_never_gets_the_blocks_of_another(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        first = submit(cluster, "a", PROMPT, max_tokens=40)
        first.cache_salt = b"one"
        await router.run(first)
        second = submit(cluster, "b", PROMPT, for_prefill=source(cluster.decode, 96))
        second.cache_salt = b"two"
        answer = await router.run(second)
        [pull] = answer.explanation.pulls
        assert pull.num_tokens == 0
        assert "had 0 of 96" in pull.note
        await cluster.nothing_left()


async def test_a_request_that_is_cancelled_while_its_blocks_come_leaves_nothing(pd: ModuleType) -> None:
    async with (
        pd.cluster() as cluster,
        second_decode(pd) as holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):

        async def never(self: Any, *_: Any) -> None:
            started.set()
            await asyncio.get_running_loop().create_future()

        started = asyncio.Event()
        pulls = cluster.prefill[0].role.services["source"]._reading.pulls  # type: ignore[attr-defined]
        pulls._fetch = never.__get__(pulls)
        router.submit(submit(cluster, "a", PROMPT, for_prefill=source(holder, 96)))
        await asyncio.wait_for(started.wait(), pd.DEADLINE_S)
        assert len(pulls) == 1
        router.cancel("a")
        await router.ended("a")
        await cluster.nothing_left()
        assert len(pulls) == 0


async def test_metrics_name_holder_and_outcome(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        turn_2, held = await first_turn(pd, cluster, router)
        await router.run(submit(cluster, "turn-2", turn_2, for_prefill=source(cluster.decode, held)))
        await cluster.decode.engine.reset_cache()
        await router.run(submit(cluster, "other", NEW * 2, for_prefill=source(cluster.decode, 32)))
        pulls = {
            (sample.name.removeprefix("diptych_"), *sorted(sample.labels.items())): sample.value
            for sample in await pd.samples(cluster.prefill[0])
        }
        assert pulls["kv_pulls_total", ("outcome", "whole")] == pulls["kv_pulls_total", ("outcome", "none")] == 1
        assert pulls["kv_pulled_tokens_total", ("holder", "decode-0")] == held - 96
        assert pulls["kv_pulled_bytes_total", ("holder", "decode-0")] > 0


async def test_two_that_lack_the_same_blocks_take_them_once(pd: ModuleType) -> None:
    """Two turns of one history at once: the second one waits for what the first one is bringing, and takes the rest."""
    async with (
        pd.cluster() as cluster,
        second_decode(pd) as holder,
        pd.FakeRouter(holder.address) as to_holder,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        longer = [*PROMPT, *NEW]
        await to_holder.run(pd.submit_message(holder, [], attempt="h", prompt=longer, local=True, local_max=200))
        pulls = cluster.prefill[0].role.services["source"]._reading.pulls  # type: ignore[attr-defined]
        fetch, held, go = pulls._fetch, asyncio.Event(), asyncio.Event()

        async def first_waits(*arguments: Any) -> None:
            if not held.is_set():
                held.set()
                await go.wait()
            await fetch(*arguments)

        pulls._fetch = first_waits
        one = router.submit(submit(cluster, "a", PROMPT, for_prefill=source(holder, 96)))
        await asyncio.wait_for(held.wait(), pd.DEADLINE_S)
        two = router.submit(submit(cluster, "b", longer, for_prefill=source(holder, 112)))
        await waiting.until(lambda: len(pulls) == 2, "both pull")
        go.set()
        for attempt in ("a", "b"):
            await router.ended(attempt)
        [first], [second] = one.explanation.pulls, two.explanation.pulls
        assert (first.first_token, first.num_tokens) == (0, 96)
        assert (second.first_token, second.num_tokens) == (96, 16)
        assert not pulls._coming
        await cluster.nothing_left()
        await cluster.settle(holder)
    assert [one.token_ids, two.token_ids] == await undisturbed(pd, PROMPT, longer)


async def test_a_slow_pull_is_forgotten_in_time(pd: ModuleType) -> None:
    """The first one, which connects, does not count; a slow one is believed for a minute or two."""
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        pulls = cluster.prefill[0].role.services["source"]._reading.pulls  # type: ignore[attr-defined]
        for turn in range(3):
            prompt = [turn, *PROMPT]
            await router.run(submit(cluster, f"d{turn}", prompt, local=True, local_max=200))
            await router.run(submit(cluster, f"p{turn}", prompt, for_prefill=source(cluster.decode, 96)))
            assert bool(pulls.overheads()) == (turn > 0)
        seconds, at = pulls._overheads["decode-0"]
        pulls._overheads["decode-0"] = seconds, at - 10 * FORGET_S
        assert pulls.overheads()["decode-0"] < seconds / 1000


@pytest.mark.parametrize("prefill", [False, True])
async def test_a_moved_answer_takes_its_kv_from_the_worker_that_it_left(pd: ModuleType, prefill: bool) -> None:
    """The rest of an answer on another decode worker: KV of the prompt and of the tokens so far come from the first one, for
    decode itself, or for the prefill worker that computes the rest."""
    [whole] = await undisturbed(pd, PROMPT, max_tokens=60)
    async with (
        pd.cluster() as cluster,
        second_decode(pd) as other,
        pd.FakeRouter(cluster.decode.address) as router,
        pd.FakeRouter(other.address) as to_other,
    ):
        first = await router.run(submit(cluster, "a", PROMPT, max_tokens=60))
        assert first.token_ids == whole
        sent = whole[:40]
        held = (len(PROMPT) + len(sent) - 1) // BLOCK * BLOCK
        message = pd.submit_message(
            other, cluster.prefill if prefill else [], attempt="b", prompt=PROMPT, max_tokens=60, local=not prefill,
            local_max=0 if prefill else 64,
        )  # fmt: skip
        message.output_token_ids.extend(sent)
        plan = message.placement.prefill_source if prefill else message.placement.decode_source
        plan.CopyFrom(source(cluster.decode, held))
        computes = cluster.prefill[0] if prefill else other
        before = computes.engine.stats().computed_tokens_total
        rest = await router_answer(to_other, message, len(sent))
        assert rest == whole[40:]
        assert computes.engine.stats().computed_tokens_total - before <= BLOCK
        await cluster.nothing_left()
        await cluster.settle(other)


async def draining(pd: ModuleType, cluster: Any, router: Any, gate: Any) -> tuple[asyncio.Task[None], Any]:
    """Decode drains, with one answer that waits for prefill. Returns: the drain, and that answer."""
    gate.close(0)
    answer = router.submit(submit(cluster, "held", [900, *PROMPT]))
    await gate.wait()
    drain = asyncio.create_task(cluster.decode.drain())
    await waiting.until(lambda: cluster.decode.record().leaves_in_s > 0.0)
    return drain, answer


def second_turn(pd: ModuleType, other: Any, cluster: Any, attempt: str, prompt: list[int], held: int) -> Any:
    """At another decode worker, which may take KV from the one that drains."""
    message = pd.submit_message(other, [], attempt=attempt, prompt=prompt, local=True, local_max=200)
    message.placement.decode_source.CopyFrom(source(cluster.decode, held))
    return message


async def test_a_worker_that_drains_serves_its_kv_until_it_leaves(pd: ModuleType) -> None:
    gate = pd.Gate(after=1 << 20)
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate)) as cluster,
        second_decode(pd) as other,
        pd.FakeRouter(cluster.decode.address) as router,
        pd.FakeRouter(other.address) as to_other,
    ):
        turn_2, held = await first_turn(pd, cluster, router)
        drain, answer = await draining(pd, cluster, router, gate)
        assert (cluster.decode.record().state, other.record().leaves_in_s) == ("draining", 0.0)
        refused = await router.run(submit(cluster, "new", PROMPT))
        assert isinstance(refused.error, NoWorkerError), "it computes nothing for others"
        first = await to_other.run(second_turn(pd, other, cluster, "turn-2", turn_2, held))
        [pull] = first.explanation.pulls
        assert (pull.holder, pull.num_tokens, pull.note) == ("decode-0", held, "")
        gate.open()
        await drain
        await router.ended("held")
        assert answer.finished is not None, answer.error
        # it has no request left, and leaves
        await other.engine.reset_cache()
        again = await to_other.run(second_turn(pd, other, cluster, "turn-2b", turn_2, held))
        [pull] = again.explanation.pulls
        assert pull.num_tokens == 0
        assert "draining" in pull.note
        await cluster.settle(other)
    assert first.token_ids == again.token_ids
    assert [first.token_ids] == await undisturbed(pd, turn_2)


async def test_who_continues_what_a_drain_has_given_up_takes_its_kv(pd: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(WorkerRuntime, "hand_over_s", pd.NEVER_S)
    gate = pd.Gate(after=1 << 20)
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate), decode_config={"drain_s": 0.05}) as cluster,
        second_decode(pd) as other,
        pd.FakeRouter(cluster.decode.address) as router,
        pd.FakeRouter(other.address) as to_other,
    ):
        turn_2, held = await first_turn(pd, cluster, router)
        drain, answer = await draining(pd, cluster, router, gate)
        await router.ended("held")
        assert isinstance(answer.error, WorkerDrainedError)
        assert 0.0 < cluster.decode.record().leaves_in_s <= pd.NEVER_S
        moved = await to_other.run(second_turn(pd, other, cluster, "turn-2", turn_2, held))
        [pull] = moved.explanation.pulls
        assert (pull.holder, pull.num_tokens, pull.note) == ("decode-0", held, "")
        drain.cancel()
        gate.open()
        await asyncio.gather(drain, return_exceptions=True)
    assert [moved.token_ids] == await undisturbed(pd, turn_2)


async def router_answer(router: Any, message: decode_pb2.Submit, offset: int) -> list[int]:
    """The tokens from `offset` on."""
    answer = router.submit(message)
    answer.token_ids.extend([0] * offset)  # the client has them
    await router.ended(message.attempt)
    assert answer.finished is not None, answer.error
    tokens: list[int] = answer.token_ids[offset:]
    return tokens
