"""A request's adapter on both hops: loaded where it is missing, computed with on every way that an answer takes, and never left
out: an answer under an adapter is that adapter's, or an error."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from diptych.common.adapters.load_errors import without_details
from diptych.common.adapters.peft import AdapterFacts, read_adapter
from diptych.common.errors import AdapterError, InvalidRequestError, NoWorkerError, OverloadedError
from diptych.common.store.codec import decode_record, encode_record
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import LoadedAdapter
from diptych.rpc.errors import from_rpc_error
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2, worker_pb2
from diptych.worker import wire
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting
from diptych_tests.lora import write_adapter
from diptych_tests.prefill import Prefill

PROMPT = [(7 * i + 3) % 1000 for i in range(40)]
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6)}
BASE = ""


class Folders:
    """Adapters below one folder. ids: by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = {BASE: ""}
        for seed, name in enumerate(("french", "german", "dutch")):
            write_adapter(root / name, SHAPES, seed=seed)
            self.ids[name] = read_adapter(root / name).id

    def ask(self, message: decode_pb2.Submit, name: str) -> decode_pb2.Submit:
        message.adapter = self.ids[name]
        message.adapter_folder = str(self.root / name) if name else ""
        return message

    def settings(self, **changes: object) -> dict[str, object]:
        return {"enable_lora": True, "max_loras": 2, "lora_dir": (str(self.root),), **changes}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "lora")


@asynccontextmanager
async def cluster_of(
    pd: ModuleType, folders: Folders, *, prefill_settings: dict[str, object] | None = None, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A cluster and its router. Args: prefill_settings: those of the prefill workers."""
    model = lambda: pd.fake_model(max_loras=2)  # noqa: E731
    settings = folders.settings()
    options = {"decode": model, "prefill": model, "decode_config": settings, **options}
    async with (
        pd.cluster(
            prefill_config=folders.settings() if prefill_settings is None else prefill_settings, **options
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        yield cluster, router
        await cluster.nothing_left()
        for worker in cluster.workers:
            assert not any(worker.record().load.adapters.values()), "nothing is held by requests that have ended"


_alone: dict[str, list[int]] = {}


async def alone(pd: ModuleType, folders: Folders) -> dict[str, list[int]]:
    """The answer under each adapter of one worker that computes prompts itself: the same in every test."""
    if not _alone:
        async with cluster_of(pd, folders, num_prefill=0) as (cluster, router):
            for name in folders.ids:
                message = cluster.submit_message(attempt=name or "base", prompt=PROMPT)
                answer = await router.run(folders.ask(message, name))
                assert answer.error is None
                _alone[name] = answer.token_ids
        assert len({tuple(tokens) for tokens in _alone.values()}) == len(folders.ids)
    return _alone


async def call(worker: WorkerRuntime, pd: ModuleType, name: str, request: Any) -> Any:
    async with pd.worker_channel(worker.address) as channel:
        try:
            return await getattr(WorkerStub(channel), name)(request, timeout=pd.DEADLINE_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


async def test_prefill_and_decode_load_the_adapter_of_a_request_and_compute_with_it(
    pd: ModuleType, folders: Folders
) -> None:
    want = await alone(pd, folders)
    async with cluster_of(pd, folders) as (cluster, router):
        for i, name in enumerate((BASE, "french", "german", "french")):
            answer = await router.run(folders.ask(cluster.submit_message(attempt=f"a{i}", prompt=PROMPT), name))
            assert answer.token_ids == want[name]
            assert not answer.explanation.local_prefill
            cached = answer.finished.usage.cached_tokens
            assert cached == (32 if i == 3 else 0), "blocks of the same adapter only"
        for worker in cluster.workers:
            assert worker.library is not None
            assert worker.library.counts.by_outcome["loaded"] == 2, "each of them once"


async def test_a_prefill_worker_that_cannot_load_it_leaves_the_prompt_to_another_one_and_to_decode(
    pd: ModuleType, folders: Folders, tmp_path: Path
) -> None:
    want = await alone(pd, folders)
    (tmp_path / "elsewhere").mkdir()
    lacks = folders.settings(lora_dir=(str(tmp_path / "elsewhere"),))
    for settings in (lacks, {}):
        async with cluster_of(pd, folders, num_prefill=2, prefill_settings=settings) as (cluster, router):
            answer = await router.run(folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "french"))
            assert answer.token_ids == want["french"]
            assert answer.explanation.local_prefill
            notes = " ".join(answer.explanation.notes)
            assert "the adapter cannot be loaded" in notes
            assert str(tmp_path) not in notes, "a caller reads it"
            message = cluster.submit_message(attempt="b", prompt=PROMPT, policy=router_pb2.FAILURE_POLICY_FAIL)
            strict = await router.run(folders.ask(message, "german"))
            assert isinstance(strict.error, NoWorkerError)
            assert not strict.token_ids


@pytest.mark.parametrize("fault", ["gone", "changed", "cut", "off"])
async def test_decode_refuses_what_it_cannot_load_before_it_accepts(
    pd: ModuleType, folders: Folders, fault: str
) -> None:
    """So that the router gives the request to another worker."""
    want = await alone(pd, folders)
    folder = folders.root / "french"
    options: dict[str, Any] = {}
    match fault:
        case "gone":
            shutil.rmtree(folder)
        case "changed":
            write_adapter(folder, SHAPES, seed=9)
        case "cut":
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
        case "off":
            options = {"decode_config": {}, "prefill_settings": {}}
    async with cluster_of(pd, folders, **options) as (cluster, router):
        answer = await router.run(folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "french"))
        assert isinstance(answer.error, NoWorkerError)
        assert not answer.accepted
        assert not answer.token_ids
        base = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT))
        assert base.token_ids == want[BASE]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_an_unload_at_one_pool_never_gives_the_answer_of_the_base_model(
    pd: ModuleType, folders: Folders, pool: str
) -> None:
    want = await alone(pd, folders)
    async with cluster_of(pd, folders) as (cluster, router):
        worker = cluster.decode if pool == "decode" else cluster.prefill[0]
        unload = worker_pb2.UnloadAdapterRequest(id=folders.ids["french"])
        for i in range(2):
            answer = await router.run(folders.ask(cluster.submit_message(attempt=f"a{i}", prompt=PROMPT), "french"))
            assert answer.token_ids == want["french"]
            unloaded = await call(worker, pd, "UnloadAdapter", unload)
            assert (unloaded.found, unloaded.num_requests) == (True, 0)
        assert not (await call(worker, pd, "UnloadAdapter", unload)).found
        shutil.rmtree(folders.root / "french")
        prompt = PROMPT[::-1]
        answer = await router.run(folders.ask(cluster.submit_message(attempt="b", prompt=prompt), "french"))
        if pool == "decode":
            assert isinstance(answer.error, NoWorkerError)
        else:  # decode has it, and computes the prompt
            assert answer.error is None
            assert answer.explanation.local_prefill
            base = await router.run(cluster.submit_message(attempt="c", prompt=prompt))
            assert answer.token_ids != base.token_ids


async def test_an_unload_waits_for_the_answers_that_use_it(pd: ModuleType, folders: Folders) -> None:
    want = await alone(pd, folders)  # not beside the other cluster, whose workers have the same ids
    gate = pd.Gate(after=2)
    model = lambda: pd.fake_model(max_loras=2, before_execute=gate)  # noqa: E731
    async with cluster_of(pd, folders, num_prefill=0, decode=model) as (cluster, router):
        answer = router.submit(folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "french"))
        await gate.wait()
        stats = await call(cluster.decode, pd, "GetStats", worker_pb2.GetStatsRequest())
        assert [(one.id, one.num_requests) for one in stats.adapters] == [(folders.ids["french"], 1)]
        unload = worker_pb2.UnloadAdapterRequest(id=folders.ids["french"])
        assert (await call(cluster.decode, pd, "UnloadAdapter", unload)).num_requests == 1
        gate.open()
        await router.ended("a")
        assert answer.token_ids == want["french"]
        assert not cluster.decode.record().load.adapters


async def test_an_answer_goes_on_with_its_adapter_on_another_worker(pd: ModuleType, folders: Folders) -> None:
    """What the router does after a worker's loss, and at a migration: the tokens so far, and the same adapter."""
    want = (await alone(pd, folders))["french"]
    async with cluster_of(pd, folders) as (cluster, router):
        for i, done in enumerate((3, 5)):
            message = folders.ask(cluster.submit_message(attempt=f"a{i}", prompt=PROMPT), "french")
            message.output_token_ids.extend(want[:done])
            message.sampling.max_tokens = len(want)
            answer = pd.Answer(token_ids=want[:done])
            router._answers[message.attempt] = (answer, asyncio.Event(), asyncio.Event())
            router._commands.put_nowait(decode_pb2.Command(submit=message))
            await router.ended(message.attempt)
            assert answer.token_ids == want


async def test_a_resumed_answer_is_that_of_its_adapter(pd: ModuleType, folders: Folders) -> None:
    want = await alone(pd, folders)
    gate = pd.Gate(after=3)
    model = lambda: pd.fake_model(max_loras=2, before_execute=gate)  # noqa: E731
    async with (
        cluster_of(pd, folders, num_prefill=0, decode=model) as (cluster, router),
        pd.FakeRouter(cluster.decode.address) as second,
    ):
        message = folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "german")
        message.keep = True
        router.submit(message)
        await gate.wait()
        answer = second.resume("a")
        gate.open()
        await second.ended("a")
        assert answer.token_ids == want["german"]


async def test_a_worker_takes_its_adapters_along_to_its_other_role(pd: ModuleType, folders: Folders) -> None:
    want = await alone(pd, folders)
    async with cluster_of(pd, folders, num_prefill=2) as (cluster, router):
        changing, prefill = cluster.prefill
        message = cluster.submit_message(attempt="a", prompt=PROMPT, prefill=[changing])
        assert (await router.run(folders.ask(message, "french"))).token_ids == want["french"]
        await changing.set_role("decode")
        shutil.rmtree(folders.root / "french")
        async with pd.FakeRouter(changing.address) as to_changed:
            message = pd.submit_message(changing, [prefill], attempt="b", prompt=PROMPT, local=True, local_max=100)
            assert (await to_changed.run(folders.ask(message, "french"))).token_ids == want["french"]


async def test_preempted_answers_come_back_with_their_adapters(pd: ModuleType, folders: Folders) -> None:
    """Decode has blocks for less than two answers, and one slot: each request leaves and returns, and so do the adapters."""
    names = ("french", "german", BASE, "french")
    prompts = [[(11 * i + 7 * n + 3) % 1000 for i in range(60)] for n in range(len(names))]
    answers = {}
    for num_blocks in (64, 11):
        model = lambda n=num_blocks: pd.fake_model(num_blocks=n, max_loras=1)  # noqa: E731
        settings = folders.settings(enable_prefix_caching=False, max_loras=1)
        async with cluster_of(pd, folders, decode=model, decode_config=settings) as (cluster, router):
            sent = []
            for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                message = cluster.submit_message(attempt=f"a{i}", prompt=prompt, max_tokens=60)
                sent.append(router.submit(folders.ask(message, name)))
            for i in range(len(names)):
                await router.ended(f"a{i}")
            answers[num_blocks] = [answer.token_ids for answer in sent]
            preempted = cluster.decode.engine.stats().preemptions_total
    assert preempted > 0
    assert all(len(tokens) == 60 for tokens in answers[64])
    assert answers[11] == answers[64]


async def test_pulled_blocks_are_those_of_the_adapter_also_where_it_was_unloaded(
    pd: ModuleType, folders: Folders
) -> None:
    async with cluster_of(pd, folders) as (cluster, router):
        decode, prefill = cluster.decode, cluster.prefill[0]
        turn_1 = await router.run(
            folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=40), "french")
        )
        history = [*PROMPT, *turn_1.token_ids]
        held = (len(history) - 1) // pd.BLOCK * pd.BLOCK
        for i, (name, pulled) in enumerate(((BASE, 0), ("german", 0), ("french", held - 32))):
            if name == "french":
                assert (
                    await call(decode, pd, "UnloadAdapter", worker_pb2.UnloadAdapterRequest(id=folders.ids[name]))
                ).found
            message = folders.ask(cluster.submit_message(attempt=f"b{i}", prompt=[*history, 5, 6, 7]), name)
            source = types_pb2.KvSource(holder=wire.ref_to_proto(decode.ref), num_tokens=held, compute_s=pd.NEVER_S)
            message.placement.prefill_source.CopyFrom(source)
            answer = await router.run(message)
            assert sum(pull.num_tokens for pull in answer.explanation.pulls) == pulled
        assert prefill.library.counts.by_outcome["loaded"] == 2
        want = await router.run(folders.ask(cluster.submit_message(attempt="c", prompt=[*history, 5, 6, 7]), "french"))
        assert answer.token_ids == want.token_ids


class HeldReads:
    """A model's reads of adapters wait for the test."""

    def __init__(self, pd: ModuleType) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self._deadline_s = pd.DEADLINE_S
        self._pd = pd

    def model(self) -> Any:
        loaded = self._pd.fake_model(max_loras=2)
        read = FakeRunner.read_adapter

        def held(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
            self.begun.set()
            assert self.gate.wait(self._deadline_s)
            return read(loaded.runner, folder, facts)

        loaded.runner.read_adapter = held
        return loaded

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, self._deadline_s)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_a_load_delays_no_other_request_and_a_cancelled_one_leaves_nothing(
    pd: ModuleType, folders: Folders, pool: str
) -> None:
    want = await alone(pd, folders)
    held = HeldReads(pd)
    models: dict[str, Any] = {pool: held.model}
    async with cluster_of(pd, folders, **models) as (cluster, router):
        answer = router.submit(folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "french"))
        given_up = router.submit(folders.ask(cluster.submit_message(attempt="b", prompt=PROMPT), "french"))
        await held.wait()
        base = await router.run(cluster.submit_message(attempt="c", prompt=PROMPT))
        assert base.token_ids == want[BASE]
        router.cancel("b")
        await router.ended("b")
        assert not given_up.token_ids
        assert not answer.token_ids
        held.gate.set()
        await router.ended("a")
        assert answer.token_ids == want["french"]


async def test_a_decode_worker_that_ends_in_the_middle_of_a_load_leaves_the_answer_to_another(
    pd: ModuleType, folders: Folders
) -> None:
    """It ends though the file system does not answer, and the answer goes on as if it had not been there."""
    want = (await alone(pd, folders))["french"]
    held = HeldReads(pd)

    def continued(cluster: Any, router: Any, attempt: str) -> Any:
        message = folders.ask(cluster.submit_message(attempt=attempt, prompt=PROMPT), "french")
        message.output_token_ids.extend(want[:3])
        message.sampling.max_tokens = len(want)
        answer = router.submit(message)
        answer.token_ids.extend(want[:3])
        return answer

    async with cluster_of(pd, folders, num_prefill=0, decode=held.model) as (cluster, router):
        lost = continued(cluster, router, "a")
        await held.wait()
        await router.break_stream()
    assert (lost.accepted, lost.token_ids) == (False, want[:3])
    held.gate.set()
    async with cluster_of(pd, folders, num_prefill=0) as (cluster, router):
        answer = continued(cluster, router, "a")
        await router.ended("a")
        assert answer.token_ids == want


async def test_a_load_that_takes_too_long_ends_typed(pd: ModuleType, folders: Folders) -> None:
    held = HeldReads(pd)
    settings = folders.settings(lora_load_timeout_s=0.05)
    async with cluster_of(pd, folders, decode=held.model, decode_config=settings) as (cluster, router):
        answer = await router.run(folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT), "french"))
        assert isinstance(answer.error, NoWorkerError)
        assert "within 0.05 s" in answer.error.message
        assert without_details(answer.error).message == "the adapter cannot be loaded", "for those who asked"
        held.gate.set()


async def test_a_worker_that_is_killed_in_the_middle_of_a_load_leaves_the_prompt_to_decode(
    pd: ModuleType, folders: Folders
) -> None:
    """A process of its own, over UCX."""
    want = await alone(pd, folders)
    settings = folders.settings(transport="ucx")
    prefill = await Prefill.start("prefill-0", **settings)
    try:
        async with cluster_of(pd, folders, num_prefill=0, decode_config=settings) as (cluster, router):
            first = folders.ask(cluster.submit_message(attempt="a", prompt=PROMPT, prefill=[prefill]), "french")
            answer = await router.run(first)
            assert answer.explanation.prefill == "prefill-0"
            assert answer.token_ids == want["french"]
            await prefill.ask("hold-load")
            message = cluster.submit_message(attempt="b", prompt=PROMPT, prefill=[prefill])
            answer = router.submit(folders.ask(message, "german"))
            await prefill.held()
            prefill.process.kill()
            await router.ended("b")
            assert answer.token_ids == want["german"]
            assert answer.explanation.local_prefill
            assert "prefill-0 failed" in answer.explanation.notes[0]
    finally:
        await prefill.stop()


async def test_an_operator_loads_an_adapter_and_the_lease_says_so(pd: ModuleType, folders: Folders) -> None:
    async with cluster_of(pd, folders, num_prefill=0) as (cluster, _):
        worker, french = cluster.decode, folders.ids["french"]

        async def load(folder: str, expected_id: str = "") -> worker_pb2.LoadAdapterResponse:
            request = worker_pb2.LoadAdapterRequest(folder=folder, expected_id=expected_id)
            answer: worker_pb2.LoadAdapterResponse = await call(worker, pd, "LoadAdapter", request)
            return answer

        loaded = await load(str(folders.root / "french"))
        assert (loaded.id, loaded.rank) == (french, 4)
        assert loaded.num_bytes > 0
        record = decode_record(encode_record(worker.record()))
        assert (record.max_loras, record.max_lora_rank, record.load.adapters) == (2, 16, {french: 0})
        info = await pd.get_info(worker)
        assert (info.max_loras, info.max_lora_rank) == (2, 16)
        with pytest.raises(AdapterError, match=f"holds the adapter {folders.ids['german']}, not {french[::-1]}"):
            await load(str(folders.root / "german"), french[::-1])
        with pytest.raises(AdapterError, match="not in an allowed folder"):
            await load("/etc")
        for wrong in ("", "french", "/a\0"):
            with pytest.raises(InvalidRequestError, match="folder"):
                await load(wrong)


async def series_of(pd: ModuleType, worker: WorkerRuntime) -> dict[str, float]:
    """Its series of adapters, by name and label."""
    return {
        f"{sample.name} {sample.labels.get('outcome', '')}".strip(): sample.value
        for sample in await pd.samples(worker)
        if "_lora_" in sample.name and not sample.name.endswith(("_created", "_bucket"))
    }


async def test_every_series_of_adapters_moves(pd: ModuleType, folders: Folders) -> None:
    gate = pd.Gate(after=1)
    model = lambda: pd.fake_model(max_loras=1, before_execute=gate)  # noqa: E731
    settings = folders.settings(max_loras=1, max_cpu_loras=2, lora_load_timeout_s=0.05)
    async with cluster_of(pd, folders, num_prefill=0, decode=model, decode_config=settings) as (cluster, router):
        worker = cluster.decode
        before = await series_of(pd, worker)
        assert set(before.values()) == {0.0}
        worker.library._timeout_s = pd.DEADLINE_S
        names = ("french", "german")
        for name in names:
            router.submit(folders.ask(cluster.submit_message(attempt=name, prompt=PROMPT), name))
        await gate.wait()
        await waiting.until(lambda: len(worker.library.resident()) == 2)
        during = await series_of(pd, worker)
        worker.library._timeout_s = 0.05
        full = await router.run(folders.ask(cluster.submit_message(attempt="full", prompt=PROMPT), "dutch"))
        assert isinstance(full.error, OverloadedError)
        worker.library._timeout_s = pd.DEADLINE_S
        gate.open()
        for name in names:
            await router.ended(name)
        assert (await router.run(folders.ask(cluster.submit_message(attempt="c", prompt=PROMPT), "dutch"))).finished
        for name in names:  # one of them has left
            shutil.rmtree(folders.root / name)
        gone = [
            await router.run(folders.ask(cluster.submit_message(attempt=f"d-{n}", prompt=PROMPT), n)) for n in names
        ]
        assert [type(one.error) for one in gone if one.error is not None] == [NoWorkerError]
        after = await series_of(pd, worker)
        moved = {name for name in after if len({one.get(name) for one in (before, during, after)}) > 1}
        assert set(after) - moved == {f"diptych_lora_loads_total {outcome}" for outcome in ("failed", "timeout")}
        assert after["diptych_lora_requests"] == after["diptych_lora_running"] == 0
        assert during["diptych_lora_running"] == during["diptych_lora_slots_used"] == 1
        assert during["diptych_lora_requests"] == 2


async def test_a_worker_without_adapters_says_so(pd: ModuleType) -> None:
    async with pd.cluster(num_prefill=0) as cluster:
        record = cluster.decode.record()
        assert (record.max_loras, record.max_lora_rank, record.load.adapters) == (0, 0, {})
        for name, request in (
            ("LoadAdapter", worker_pb2.LoadAdapterRequest(folder="/a")),
            ("UnloadAdapter", worker_pb2.UnloadAdapterRequest(id="0f" * 16)),
        ):
            with pytest.raises(InvalidRequestError, match="--enable-lora"):
                await call(cluster.decode, pd, name, request)
