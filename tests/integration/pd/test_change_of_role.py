"""A worker changes its role while it runs, and any worker publishes blocks of its prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych.cli.worker_roles import services_of
from diptych.common.block_identity import block_keys
from diptych.common.clock import MonotonicClock
from diptych.common.errors import InvalidRequestError, NoWorkerError, StaleReferenceError, WorkerDrainedError
from diptych.common.observe import logging
from diptych.common.observe.tracing import tracing
from diptych.common.store.memory import MemoryStore
from diptych.kvtransfer.api import PeerRef
from diptych.rpc.errors import from_rpc_error
from diptych.rpc.stubs import SourceStub, WorkerStub
from diptych.rpc.v1 import prefill_pb2, worker_pb2
from diptych.worker import wire
from diptych.worker.process import make_transfer
from diptych.worker.role_spec import DECODE, PREFILL, ROLES, SOURCE, RoleSpec
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

PROMPT = [(7 * i + 3) % 1000 for i in range(100)]
OTHER = [(11 * i + 5) % 1000 for i in range(100)]


async def expected(pd: ModuleType, *prompts: list[int]) -> list[list[int]]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        return [
            (await router.run(alone.submit_message(attempt=f"l{i}", prompt=prompt))).token_ids
            for i, prompt in enumerate(prompts)
        ]


async def test_a_prefill_worker_becomes_a_decode_worker_and_back(pd: ModuleType) -> None:
    want = await expected(pd, PROMPT, OTHER)
    async with pd.cluster(num_prefill=2) as cluster:
        changing, prefill = cluster.prefill
        async with pd.FakeRouter(cluster.decode.address) as router:
            answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, prefill=[changing]))
            assert answer.token_ids == want[0]
            assert answer.explanation.prefill == changing.worker_id
            incarnation = changing.incarnation

            assert await changing.set_role("decode") == "prefill"
            info = await pd.get_info(changing)
            assert (info.role, info.incarnation) == (worker_pb2.WORKER_ROLE_DECODE, incarnation)
            assert list(info.services) == ["diptych.rpc.v1.Decode", "diptych.rpc.v1.Source"]
            # Its blocks are still there, and it decodes with another worker's KV, too.
            async with pd.FakeRouter(changing.address) as to_changed:
                cached = await to_changed.run(
                    pd.submit_message(changing, [prefill], attempt="c", prompt=PROMPT, local=True, local_max=100)
                )
                remote = await to_changed.run(pd.submit_message(changing, [prefill], attempt="d", prompt=OTHER))
            assert [cached.token_ids, remote.token_ids] == want
            assert cached.explanation.cached_tokens_decode == 96
            assert remote.explanation.prefill == prefill.worker_id
            assert remote.explanation.kv_bytes > 0

            # A request that was placed on it as a prefill worker is computed by the next one.
            late = await router.run(cluster.submit_message(attempt="e", prompt=OTHER[:90], prefill=[changing, prefill]))
            assert late.explanation.prefill == prefill.worker_id

            assert await changing.set_role("prefill") == "decode"
            again = await router.run(cluster.submit_message(attempt="f", prompt=OTHER, prefill=[changing]))
            assert again.token_ids == want[1]
            assert again.explanation.prefill == changing.worker_id
            await cluster.nothing_left()


async def test_the_change_waits_for_a_hand_off_that_is_under_way(pd: ModuleType) -> None:
    [want] = await expected(pd, PROMPT)
    gate = pd.Gate(after=1)
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        changing = cluster.prefill[0]
        router_sees = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        change = asyncio.create_task(changing.set_role("decode"))
        await waiting.until(lambda: changing.record().state == "draining", "it drains")
        refused = await router.run(cluster.submit_message(attempt="b", prompt=OTHER, local_max=0))
        assert any("draining" in note for note in refused.explanation.notes)
        with pytest.raises(NoWorkerError, match="becoming a decode worker"):
            await changing.set_role("prefill")
        assert not change.done()
        assert changing.record().role == "prefill"
        gate.open()
        await router.ended("a")
        assert router_sees.token_ids == want
        assert router_sees.explanation.prefill == changing.worker_id
        assert await change == "prefill"
        assert (changing.record().role, changing.record().state) == ("decode", "ready")
        assert changing.health.serving
        await cluster.nothing_left()


async def test_what_does_not_end_is_handed_on_and_nothing_leaks(pd: ModuleType) -> None:
    [want] = await expected(pd, PROMPT)
    gate = pd.Gate(after=1)
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate), prefill_config={"drain_s": 0.05}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        changing = cluster.prefill[0]
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        assert await changing.set_role("decode") == "prefill"
        await router.ended("a")
        gate.open()
        assert answer.token_ids == want
        assert answer.explanation.local_prefill
        assert any("becomes a decode worker" in note for note in answer.explanation.notes)
        await cluster.nothing_left()


async def test_a_decode_worker_that_changes_ends_its_requests_with_a_typed_error(pd: ModuleType) -> None:
    gate = pd.Gate(after=1)
    async with (
        pd.cluster(
            num_prefill=0, decode=lambda: pd.fake_model(before_execute=gate), decode_config={"drain_s": 0.05}
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        intake = cluster.decode.role.services["decode"].intake  # type: ignore[attr-defined]
        change = asyncio.create_task(cluster.decode.set_role("prefill"))
        await waiting.until(lambda: not intake._sessions, "the drain's time is over")
        gate.open()
        assert await change == "decode"
        await router.ended("a")
        assert isinstance(answer.error, WorkerDrainedError)
        assert answer.error.retryable
        await cluster.nothing_left()


async def test_a_further_role_is_a_line(pd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of services that exist: here of both pools' at once. Its requests come, its peers take KV from it, and it changes."""
    [want] = await expected(pd, PROMPT)
    spec = RoleSpec("mixed", 9, (PREFILL, DECODE, SOURCE), publishes=True)
    assert all(worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{one.name.upper()}") == one.number for one in ROLES.values())
    monkeypatch.setitem(ROLES, "mixed", spec)  # type: ignore[arg-type]
    async with pd.cluster() as cluster:
        mixed = cluster.prefill[0]
        assert await mixed.set_role("mixed") == "prefill"
        async with pd.FakeRouter(cluster.decode.address) as router, pd.FakeRouter(mixed.address) as to_mixed:
            there = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
            assert (there.token_ids, there.explanation.prefill) == (want, mixed.worker_id)
            here = await to_mixed.run(pd.submit_message(mixed, [], attempt="b", prompt=PROMPT))
            assert here.token_ids == want
        assert await mixed.set_role("decode") == "mixed"
        await cluster.nothing_left()


async def test_the_rpc_names_the_worker_and_the_role(pd: ModuleType) -> None:
    async with pd.cluster() as cluster:
        worker = cluster.prefill[0]

        async def ask(**fields: Any) -> worker_pb2.SetRoleResponse:
            async with pd.worker_channel(worker.address) as channel:
                try:
                    return await WorkerStub(channel).SetRole(worker_pb2.SetRoleRequest(**fields), timeout=pd.DEADLINE_S)
                except grpc.RpcError as error:
                    raise from_rpc_error(error) from None

        to_decode = {"role": worker_pb2.WORKER_ROLE_DECODE}
        with pytest.raises(StaleReferenceError, match="prefill-9"):
            await ask(worker_id="prefill-9", **to_decode)
        with pytest.raises(StaleReferenceError, match="old"):
            await ask(worker_id=worker.worker_id, incarnation="old", **to_decode)
        with pytest.raises(InvalidRequestError, match="role"):
            await ask(worker_id=worker.worker_id)
        with pytest.raises(InvalidRequestError, match="role"):
            await worker.set_role("router")
        answer = await ask(worker_id=worker.worker_id, incarnation=worker.incarnation, **to_decode)
        assert answer.previous == worker_pb2.WORKER_ROLE_PREFILL
        assert worker.role.name == "decode"
        assert (await ask(worker_id=worker.worker_id, **to_decode)).previous == worker_pb2.WORKER_ROLE_DECODE


async def test_the_store_has_the_new_role_under_the_same_incarnation(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    worker = WorkerRuntime(
        pd.worker_config("prefill", "w0"),
        pd.fake_model(),
        make_transfer=make_transfer,
        make_services=services_of,
        store=store,
    )

    async def role_is(wanted: str) -> bool:
        return [(r.role, r.state, r.incarnation) for r in await store.list_workers()] == [
            (wanted, "ready", worker.incarnation)
        ]

    await worker.start()
    try:
        await waiting.until(lambda: role_is("prefill"))
        await worker.set_role("decode", force=True)
        await waiting.until(lambda: role_is("decode"))
    finally:
        await worker.close()


@asynccontextmanager
async def prefill_pool(pd: ModuleType, store: MemoryStore, size: int) -> AsyncIterator[list[WorkerRuntime]]:
    workers = [
        WorkerRuntime(
            pd.worker_config("prefill", f"w{i}"), pd.fake_model(), make_transfer=make_transfer, make_services=services_of,
            store=store,
        )
        for i in range(size)
    ]  # fmt: skip
    try:
        for worker in workers:
            await worker.start()
        await waiting.until(lambda: ready_prefill(store, size))
        yield workers
    finally:
        for worker in workers:
            await worker.close()


async def ready_prefill(store: MemoryStore, size: int) -> bool:
    return [(r.role, r.state) for r in await store.list_workers()].count(("prefill", "ready")) == size


async def test_the_last_worker_of_a_pool_keeps_its_role_unless_forced(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    async with prefill_pool(pd, store, 2) as (one, other):
        assert await one.set_role("decode") == "prefill"
        with pytest.raises(InvalidRequestError, match="w1 .* pool of prefill workers of") as caught:
            await other.set_role("decode")
        assert caught.value.param == "role"
        assert (other.role.name, other.record().state, other.health.serving) == ("prefill", "ready", True)
        store.available = False
        with pytest.raises(NoWorkerError, match="unknown"):
            await other.set_role("decode")
        store.available = True
        assert await other.set_role("decode", force=True) == "prefill"


async def test_two_that_change_at_once_do_not_leave_the_pool_empty(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    async with prefill_pool(pd, store, 2) as workers:
        ended = await asyncio.gather(*(worker.set_role("decode") for worker in workers), return_exceptions=True)
        assert any(isinstance(one, InvalidRequestError) for one in ended)
        left = [worker for worker in workers if worker.role.name == "prefill"]
        assert left
        assert all((worker.record().state, worker.health.serving) == ("ready", True) for worker in left)


async def test_logs_and_traces_name_the_present_role(pd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(logging, "_process", {})
    logging.bind_process(worker="w", role="prefill")
    assert tracing.configure("prefill", "w", exporter=exporter, environ={})
    try:
        before = tracing.start("before")
        async with pd.cluster() as cluster:
            await cluster.prefill[0].set_role("decode")
        tracing.start("after").end()
        before.end()
    finally:
        tracing.close()
    assert logging._process == {"worker": "w", "role": "decode"}
    roles = {span.name: span.resource.attributes["diptych.role"] for span in exporter.get_finished_spans()}
    assert roles == {"before": "prefill", "after": "decode"}
    assert {span.resource.attributes["service.instance.id"] for span in exporter.get_finished_spans()} == {"w"}


async def cached_blocks(worker: WorkerRuntime, keys: list[bytes]) -> list[int]:
    return await worker.engine._query(lambda core: core.scheduler.kv.pool.find(keys), 60.0)


@pytest.mark.parametrize("held", [0, 32])
async def test_a_decode_worker_publishes_cached_blocks_to_a_prefill_worker(pd: ModuleType, held: int) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        source, reader = cluster.decode, cluster.prefill[0]
        await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, local=True, local_max=200))
        keys = block_keys(source.model.identity, PROMPT)
        assert len(keys) == 6
        blocks = await cached_blocks(source, keys)
        right = bytearray(96 * source.model.runner.kv_bytes_per_token)
        source.model.runner.pack(blocks, 96, memoryview(right))
        request = prefill_pb2.FetchRequest(
            attempt="f",
            block_keys=b"".join([*keys, bytes(16)]),  # the last is cached nowhere
            cached_tokens=held,
            source=wire.ref_to_proto(source.ref),
            reader=wire.ref_to_proto(reader.ref),
            remaining_s=pd.DEADLINE_S,
        )
        peer = PeerRef(source.worker_id, source.incarnation, source.transfer.address)
        got, started, finished = bytearray(), None, None
        async with pd.worker_channel(source.address) as channel:
            async for event in SourceStub(channel).Fetch(request, timeout=pd.DEADLINE_S):
                match event.WhichOneof("event"):
                    case "started":
                        started = event.started.cached_tokens
                    case "computed":
                        for message in event.computed.handles:
                            handle = wire.handle_from_proto(message)
                            assert handle.attempt == "source/f"
                            assert handle.first_token == held + len(got) // source.model.runner.kv_bytes_per_token
                            slab = await reader.transfer.read(peer, handle, deadline_s=pd.DEADLINE_S)
                            got += bytes(slab.payload)
                            reader.transfer.finish(slab)
                    case "finished":
                        finished = event.finished.num_ranges
        assert started == 96
        assert finished == 1
        assert got == right[held * source.model.runner.kv_bytes_per_token :]
        await cluster.nothing_left()


async def test_a_fetch_of_nothing_cached_ends_and_a_bad_one_is_refused(pd: ModuleType) -> None:
    async with pd.cluster(num_prefill=0) as cluster:
        source = cluster.decode

        async def fetch(**fields: Any) -> list[str]:
            given = {"attempt": "f", "block_keys": bytes(32), "remaining_s": pd.DEADLINE_S} | fields
            request = prefill_pb2.FetchRequest(
                source=wire.ref_to_proto(source.ref), reader=wire.ref_to_proto(source.ref), **given
            )
            async with pd.worker_channel(source.address) as channel:
                try:
                    events = SourceStub(channel).Fetch(request, timeout=pd.DEADLINE_S)
                    return [event.WhichOneof("event") async for event in events]
                except grpc.RpcError as error:
                    raise from_rpc_error(error) from None

        assert await fetch() == ["started", "finished"]
        for field, value in (
            ("block_keys", bytes(17)),
            ("block_keys", b""),
            ("cached_tokens", 15),
            ("cached_tokens", 32),
        ):
            with pytest.raises(InvalidRequestError, match=field):
                await fetch(**{field: value})
        await cluster.nothing_left()


async def test_a_role_that_cannot_be_opened_leaves_the_one_before(pd: ModuleType) -> None:
    """Its slabs cannot hold a block: it decodes, and can publish nothing."""
    async with pd.cluster(num_prefill=0, decode=lambda: pd.fake_model(head_dim=1024)) as cluster:
        with pytest.raises(Exception, match="slab_bytes"):
            await cluster.decode.set_role("prefill")
        assert cluster.decode.role.name == "decode"
        await cluster.nothing_left()
