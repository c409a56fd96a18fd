"""Adapters at the router, over real gRPC against workers without an engine: names become one version each, by which everything
behind the router goes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from diptych.cli.adapters import app as adapters_command
from diptych.cli.adapters import lines_of
from diptych.cli.operator_calls import ask
from diptych.cli.router_access import RouterAccess
from diptych.cli.serve.config import ServeConfig
from diptych.cli.settings.merge import split_list
from diptych.cli.up.config import UpConfig
from diptych.client import AdapterReport, AsyncClient
from diptych.common.block_identity import block_keys, header_of_request
from diptych.common.clock import MonotonicClock
from diptych.common.errors import (
    AdapterError,
    AuthenticationError,
    ConfigError,
    DiptychError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    PermissionDeniedError,
)
from diptych.common.request import ADAPTER, ADAPTER_FOLDER, RESUME
from diptych.common.secret import derive_key
from diptych.common.store.adapters import AdapterEntry, lost_versions
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad
from diptych.common.ticket import PURPOSE
from diptych.router.adapters.operations import LoadRequest
from diptych.router.adapters.resolution import unknown_model
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.grpc.operations import OperationsService
from diptych.router.api.grpc.service import RouterService
from diptych.router.api.packed_ids import PackedIds
from diptych.router.config import RouterConfig, absolute_modules, lora_modules
from diptych.router.frontend import Frontend
from diptych.router.observe.access_log import Access, logged
from diptych.router.placement.placer import PromptBlocks
from diptych.router.requests.messages import FinishedEvent, StartedEvent, TokenEvent, UncheckedRequest
from diptych.router.requests.resume import Seen, SeenChoice, checksum
from diptych.router.requests.submission import adapter_need
from diptych.router.server import ApiServers
from diptych.rpc.channels import bind, new_server
from diptych.rpc.convert import prompt_fields, prompt_from_proto
from diptych.rpc.operator import operator_key
from diptych.rpc.v1 import decode_pb2, router_pb2, worker_pb2
from diptych_tests.router_fleet import Fleet, other_router, running

ONE, TWO, BIG = (f"{i:032x}" for i in (1, 2, 3))
FOLDERS = {"/lora/one": (ONE, 8), "/lora/two": (TWO, 16), "/lora/big": (BIG, 32)}
TAKES: dict[str, Any] = {
    "max_loras": 2, "max_lora_rank": 16, "request_fields": (ADAPTER, ADAPTER_FOLDER, RESUME),
}  # fmt: skip


@pytest.fixture
async def fleet(model_folder: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Its workers are not given up on a machine where this process gets hardly anywhere: a load would find none."""
    async with running(model_folder, tmp_path, dead_s=60.0) as fleet:
        yield fleet


async def add(fleet: Fleet, worker_id: str, role: str = "decode", **changes: Any) -> Any:
    worker = await fleet.add(worker_id, role, **(TAKES | changes))
    worker.adapters = {
        folder: worker_pb2.LoadAdapterResponse(id=name, rank=rank, num_bytes=1000)
        for folder, (name, rank) in FOLDERS.items()
    }
    return worker


@pytest.fixture
async def pair(fleet: Fleet) -> AsyncIterator[tuple[Fleet, Any, Any]]:
    """A fleet with one worker of each role; both take adapters."""
    prefill, decode = await add(fleet, "p0", "prefill"), await add(fleet, "d0")
    await fleet.until_ready()
    yield fleet, prefill, decode
    assert fleet.no_reservations()
    assert not fleet.frontend._cluster.adapter_turns._entering


async def load(fleet: Fleet, name: str = "poems", folder: str = "/lora/one", **more: Any) -> AdapterEntry:
    return await fleet.frontend.adapters.load(LoadRequest(name, folder, **more))


async def test_a_name_becomes_one_version_on_every_hop(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, prefill, decode = pair
    entry = await load(fleet)
    assert prefill.loaded == decode.loaded == ["/lora/one"]
    for number, fields in enumerate(({"model": "poems"}, {"adapter": "poems"}, {"model": "tiny", "adapter": "poems"})):
        started, *_, finished = await fleet.ask(**fields)
        submit = decode.submits[number]
        assert (submit.adapter, submit.adapter_folder) == (ONE, "/lora/one")
        assert isinstance(started, StartedEvent)
        assert (started.model, started.adapter and started.adapter.version) == ("tiny", entry.versions[0])
        assert isinstance(finished, FinishedEvent)
        assert finished.explanation is not None
        report = finished.explanation.adapter
        assert (report.name, report.version, report.id) == ("poems", 1, ONE)
    with capture_logs() as lines:
        for name in ("tiny", "poems"):
            with logged(Access("test", "")):
                await fleet.ask(model=name)
    assert [(submit.adapter, submit.adapter_folder) for submit in decode.submits[-2:]] == [("", ""), (ONE, "/lora/one")]
    logged_names = [(line["model"], line.get("adapter_version")) for line in lines if line["event"] == "request"]
    assert logged_names == [("tiny", None), ("poems", 1)]
    counters = fleet.frontend.metrics.totals()
    assert counters["adapter_requests"] == {"poems,finished": 4.0}
    assert counters["adapter_generation_tokens"] == {"poems": 12.0}
    shown = [(model.id, model.parent, model.root) for model in fleet.frontend.models()]
    assert shown == [("tiny", "", ""), ("poems", "tiny", "/lora/one")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "prose"}, "model"),
        ({"adapter": "prose"}, "adapter"),
        ({"model": "other", "adapter": "other"}, "adapter"),
    ],
)
async def test_an_unknown_adapter_is_not_found(
    pair: tuple[Fleet, Any, Any], fields: dict[str, str], param: str
) -> None:
    fleet, _, _ = pair
    await load(fleet)
    with pytest.raises(ModelNotFoundError) as caught:
        await fleet.ask(**fields)
    assert caught.value.param == param


async def test_names_that_contradict_each_other_are_refused(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, _ = pair
    await load(fleet)
    for fields in (
        {"model": "poems", "adapter": "prose"},
        {"adapter": 3},
        {"adapter": "poems", "adapter_version": "x"},
    ):
        with pytest.raises(InvalidRequestError):
            await fleet.ask(**fields)
    with pytest.raises(InvalidRequestError) as caught:
        await fleet.ask(adapter="poems", adapter_version=7)
    assert caught.value.param == "adapter_version"


async def test_a_tenant_sees_and_uses_its_own_adapters_only(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, _ = pair
    await load(fleet)
    fleet.frontend.use_adapter_limits(lambda tenant, name: tenant == "poet")
    await fleet.ask(model="poems", tenant="poet")
    texts = []
    for name in ("poems", "never"):
        with pytest.raises(ModelNotFoundError) as caught:
            await fleet.ask(model=name, tenant="clerk")
        texts.append(caught.value.message.replace(name, "NAME"))
    assert texts[0] == texts[1], "it cannot be seen that one exists"
    assert [model.id for model in fleet.frontend.models("clerk")] == ["tiny"]
    assert [model.id for model in fleet.frontend.models("poet")] == ["tiny", "poems"]


async def test_token_routes_know_no_adapter_that_the_tenant_may_not_use(pair: tuple[Fleet, Any, Any]) -> None:
    """detokenize asked the view for the name, and never whether the tenant may use it."""
    fleet, _, _ = pair
    await load(fleet)
    frontend = fleet.frontend
    frontend.use_adapter_limits(lambda tenant, name: tenant == "poet")
    assert await frontend.detokenize("poems", [1, 2], "poet") == "w1 w2"
    assert await frontend.tokenize(UncheckedRequest(prompt="w1 w2", model="poems", tenant="poet")) == [1, 2]
    assert frontend._base("poems", "poet") == "tiny"
    assert frontend._base("poems", "clerk") == "poems", "as a name that is not known"
    for name in ("poems", "never"):
        with pytest.raises(ModelNotFoundError, match=name):
            await frontend.detokenize(name, [1, 2], "clerk")
        with pytest.raises(ModelNotFoundError, match=name):
            await frontend.tokenize(UncheckedRequest(prompt="w1 w2", model=name, tenant="clerk"))


async def test_reload_canary_promotion_and_rollback_are_followed_by_the_next_request(
    pair: tuple[Fleet, Any, Any],
) -> None:
    fleet, _, decode = pair

    async def answered() -> set[str]:
        begin = len(decode.submits)
        for _ in range(6):
            await fleet.ask(model="poems", max_tokens=1)
        return {submit.adapter for submit in decode.submits[begin:]}

    adapters = fleet.frontend.adapters
    await load(fleet)
    assert await answered() == {ONE}
    with pytest.raises(InvalidRequestError, match="load_inplace"):
        await load(fleet, folder="/lora/two")
    await load(fleet, folder="/lora/two", load_inplace=True)
    assert await answered() == {TWO}
    await adapters.roll_back("poems")
    assert await answered() == {ONE}
    await adapters.set_canary("poems", 2, 1.0)
    assert await answered() == {TWO}
    await fleet.ask(model="poems", adapter_version=1)
    assert decode.submits[-1].adapter == ONE
    await adapters.roll_back("poems")
    assert await answered() == {ONE}
    await adapters.set_canary("poems", 2, 0.5)
    await adapters.promote("poems")
    assert await answered() == {TWO}
    await adapters.unload("poems")
    assert sorted(decode.unloaded) == [ONE, TWO]
    with pytest.raises(ModelNotFoundError):
        await fleet.ask(model="poems")
    with pytest.raises(ModelNotFoundError, match="cannot be found"):
        await adapters.unload("poems")


async def test_a_pinned_version_of_a_name_that_was_unloaded_is_never_other_weights(
    pair: tuple[Fleet, Any, Any],
) -> None:
    """The numbers began at 1 again: a pin was answered with what had been loaded since."""
    fleet, _, decode = pair
    await load(fleet)
    await fleet.ask(model="poems", adapter_version=1)
    await fleet.frontend.adapters.unload("poems")
    again = await load(fleet, folder="/lora/two")
    assert (again.stable, [version.number for version in again.versions]) == (2, [2])
    with pytest.raises(InvalidRequestError, match="no version 1"):
        await fleet.ask(model="poems", adapter_version=1)
    await fleet.ask(model="poems", adapter_version=2)
    assert [submit.adapter for submit in decode.submits] == [ONE, TWO]


async def test_a_repeated_request_of_a_stream_follows_the_registry(pair: tuple[Fleet, Any, Any]) -> None:
    """prepare_again kept the adapter of the request before."""
    fleet, _, _ = pair
    await load(fleet)
    frontend, ids = fleet.frontend, PackedIds.of(router_pb2.TokenIdsInput(token_ids=[3] * 40))
    before = await frontend.prepare(UncheckedRequest(token_ids=[1] * 40, adapter="poems", sampling={"max_tokens": 3}))
    pinned = await frontend.prepare(
        UncheckedRequest(token_ids=[1] * 40, adapter="poems", adapter_version=1, sampling={"max_tokens": 3})
    )
    await load(fleet, folder="/lora/two", load_inplace=True)
    again = [frontend.prepare_again(one, ids, None, draws_seed=True) for one in (before, pinned)]
    assert [one.prompt.adapter for one in again] == [TWO, ONE]
    await frontend.adapters.unload("poems")
    with pytest.raises(ModelNotFoundError):
        frontend.prepare_again(before, ids, None, draws_seed=True)


@pytest.mark.parametrize("by", ["kill", "operator"])
async def test_a_retry_and_a_move_keep_the_version_that_the_request_began_with(
    pair: tuple[Fleet, Any, Any], by: str
) -> None:
    fleet, _, decode = pair
    await load(fleet)
    decode.hold_from = 2
    spec = UncheckedRequest(token_ids=[1] * 40, model="poems", sampling={"max_tokens": 5}, explain=True)
    request = await fleet.frontend.prepare(spec)
    events = fleet.frontend.generate(request)
    seen = [await anext(events), await anext(events)]
    await load(fleet, folder="/lora/two", load_inplace=True)
    other = await add(fleet, "d1")
    await fleet.until_ready(decode=2)
    rest = asyncio.create_task(drained(events))
    if by == "kill":
        await decode.kill()
    else:
        await fleet.frontend.move_request(request.request_id, "")
    seen += await rest
    assert [submit.adapter for submit in (*decode.submits, *other.submits)] == [ONE, ONE]
    finished = seen[-1]
    assert isinstance(finished, FinishedEvent)
    assert finished.explanation is not None
    assert finished.explanation.adapter.version == 1
    assert [attempt.decode for attempt in finished.explanation.attempts] == ["d0", "d1"]


async def test_a_decode_worker_that_is_killed_while_it_loads_the_adapter_leaves_the_stream_as_it_is(
    pair: tuple[Fleet, Any, Any],
) -> None:
    """The answer's first worker is lost, the second one in the middle of its load: the third goes on where the first was."""
    fleet, _, decode = pair
    await load(fleet)
    decode.hold_from = 2
    spec = UncheckedRequest(token_ids=[1] * 40, model="poems", sampling={"max_tokens": 5}, explain=True)
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    seen = [await anext(events), await anext(events)]
    loading, third = await add(fleet, "d1"), await add(fleet, "d2")
    await fleet.until_ready(decode=3)
    for worker in (loading, third):
        worker.accept.clear()  # it reads the adapter's files
    rest = asyncio.create_task(drained(events))
    await decode.kill()
    await fleet.until(lambda: loading.submits or third.submits)
    if not loading.submits:
        loading, third = third, loading
    third.accept.set()
    await loading.kill()
    seen += await rest
    assert [(one.adapter, one.adapter_folder) for one in third.submits] == [(ONE, "/lora/one")]
    tokens = [token for event in seen if isinstance(event, TokenEvent) for token in event.token_ids]
    assert tokens == [0, 1, 2, 3, 4]
    assert isinstance(seen[-1], FinishedEvent)


async def drained(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def test_an_answer_that_goes_on_at_another_router_has_its_first_version(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    await load(fleet)
    async with other_router(fleet) as second:
        await second._started_registry().refresh()
        spec = UncheckedRequest(token_ids=[1] * 40, model="poems", sampling={"max_tokens": 4}, resumable=True)
        decode.hold_from = 1
        events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
        started = await anext(events)
        assert isinstance(started, StartedEvent)
        await anext(events)
        await load(fleet, folder="/lora/two", load_inplace=True)
        await second._started_registry().refresh()
        seen = Seen((SeenChoice(1, 3, checksum([0])),))
        spec.resume_id = f"{started.resume_ref}.{seen.text()}"
        resumed = await second.prepare(spec)
        assert resumed.adapter is not None
        assert (resumed.adapter.adapter_id, resumed.request_id) == (ONE, started.request_id)
        spec.model = "tiny"
        with pytest.raises(InvalidRequestError, match="resume_id"):
            await second.prepare(spec)
        decode.go.set()
        decode.hold_from = -1
        assert isinstance([event async for event in events][-1], FinishedEvent)


async def test_two_routers_choose_alike_and_see_a_change_at_once(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, _ = pair
    async with other_router(fleet) as second:
        await load(fleet)
        spec = UncheckedRequest(token_ids=[1] * 40, model="poems", sampling={"max_tokens": 3})
        assert (await second.prepare(spec)).prompt.adapter == ONE, "a name that it did not know is looked for"
        await second.adapters.load(LoadRequest("poems", "/lora/two", canary_share=0.5))
        await fleet.frontend._started_registry().refresh()
        table = fleet.frontend._started_registry().table
        assert table == second._started_registry().table


async def test_a_load_that_a_worker_refuses_or_reads_differently_changes_nothing(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    with pytest.raises(InvalidRequestError, match="worker d0: no adapter in /lora/none"):
        await load(fleet, folder="/lora/none")
    decode.adapters["/lora/one"] = worker_pb2.LoadAdapterResponse(id=TWO, rank=8)
    with pytest.raises(InvalidRequestError, match="different files at d0 and at p0"):
        await load(fleet)
    for request in (
        LoadRequest("", "/lora/one"), LoadRequest("poems", ""), LoadRequest("../x", "/lora/two"),
        LoadRequest("tiny", "/lora/two"), LoadRequest("poems", 3), LoadRequest("poems", "/lora/two", load_inplace=1),
        LoadRequest("poems", "/lora/two", canary_share=2), LoadRequest("poems", "/lora/two", canary_share=0.5),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            await fleet.frontend.adapters.load(request)
    with pytest.raises(ModelNotFoundError):
        await load(fleet, folder="/lora/two", model="other")
    assert fleet.frontend.adapters.entries() == []


async def test_a_version_whose_folder_holds_other_content_does_not_become_an_answer(
    pair: tuple[Fleet, Any, Any],
) -> None:
    """The pointer moved, and every request was 503 from then on."""
    fleet, prefill, decode = pair
    adapters = fleet.frontend.adapters
    await load(fleet)
    entry = await load(fleet, folder="/lora/two", load_inplace=True)
    facts = [(one.number, one.adapter_id, one.folder) for one in entry.versions]
    assert lost_versions(facts) == ""
    assert "folder of version 1," in lost_versions([*facts, (3, BIG, "/lora/one")])
    for worker in (prefill, decode):
        worker.adapters["/lora/one"] = worker.adapters["/lora/big"]
    for change in (adapters.roll_back("poems"), adapters.roll_back("poems", 1), adapters.set_canary("poems", 1, 0.5)):
        with pytest.raises(InvalidRequestError, match=f"1 of poems .*/lora/one any more: worker d0 .*{BIG}") as caught:
            await change
        assert caught.value.param == "version"
    await adapters.set_canary("poems", 1, 0.0)
    assert adapters.entries() == [entry]
    decode.adapters["/lora/one"] = prefill.adapters["/lora/one"] = NoWorkerError("busy")
    with pytest.raises(NoWorkerError, match="worker d0: busy"):
        await adapters.roll_back("poems")
    decode.adapters["/lora/one"] = worker_pb2.LoadAdapterResponse(id=ONE, rank=8, num_bytes=1000)
    assert (await adapters.roll_back("poems")).stable == 1, "a worker that does not answer holds up no rollback"
    for worker in (prefill, decode):
        worker.adapters["/lora/two"] = InvalidRequestError("no such file")
    with pytest.raises(InvalidRequestError, match="2 of poems .*: worker d0: no such file"):
        await adapters.roll_back("poems", 2)


async def test_a_tenant_reads_no_path_or_worker_of_an_adapter_that_cannot_be_loaded(
    pair: tuple[Fleet, Any, Any],
) -> None:
    fleet, _, decode = pair
    await load(fleet)
    decode.refuse = NoWorkerError(f"worker d0 cannot load the adapter {ONE}: /lora/one: No such file", param="adapter")
    with pytest.raises(NoWorkerError) as caught:
        await fleet.ask(model="poems", timeout_s=600.0)
    assert "adapter 'poems' version 1 cannot be loaded" in caught.value.message
    for hidden in (ONE, "/lora", "d0"):
        assert hidden not in caught.value.message


def test_an_error_names_a_few_adapters() -> None:
    error = unknown_model("x", ["a", "b"], [f"n{i}" for i in range(6)])
    assert error.message.endswith("there are 'a', 'b', with adapters 'n0', 'n1', 'n2', 'n3' and 2 more")


async def end(fleet: Fleet, worker: Any) -> None:
    """The worker's incarnation ends for the router, which closes its channel."""
    await fleet.store.put_worker(fleet.record(worker, incarnation="i2", **TAKES), ttl_s=1000)


async def test_a_load_goes_on_without_a_worker_that_is_lost_meanwhile(pair: tuple[Fleet, Any, Any]) -> None:
    """The closed channel cancelled the call, and with it the load: a bare 500, and no answer at all over gRPC."""
    fleet, _, decode = pair
    lost = await add(fleet, "d1")
    await fleet.until_ready(decode=2)
    lost.answer_gate.clear()
    loading = asyncio.create_task(load(fleet))
    await fleet.until(lambda: lost.loaded)
    await end(fleet, lost)
    assert (await loading).versions[0].adapter_id == ONE
    assert decode.loaded == ["/lora/one"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_load_whose_only_worker_is_lost_names_it(fleet: Fleet, killed: bool) -> None:
    decode = await add(fleet, "d0")
    await fleet.until_ready(prefill=0)
    decode.answer_gate.clear()
    async with served(fleet) as address:
        request = router_pb2.AddAdapterRequest(name="poems", folder="/lora/one")
        asked = asyncio.to_thread(ask, RouterAccess(address), fleet.secret, "AddAdapter", request, router_pb2.Adapter)
        loading = asyncio.create_task(asked)
        await fleet.until(lambda: decode.loaded)
        await (decode.kill() if killed else end(fleet, decode))
        with pytest.raises(NoWorkerError, match="worker d0: "):
            await loading
    assert fleet.frontend.adapters.entries() == []


async def test_a_load_does_not_wait_for_a_worker_that_has_become_silent(model_folder: Path, tmp_path: Path) -> None:
    """It waited for 40 s: the bound of a call, though requests were not given to that worker any more."""
    async with running(model_folder, tmp_path, dead_s=60.0) as fleet:
        decode, hung = await add(fleet, "d0"), await add(fleet, "d1")
        await fleet.until_ready(decode=2, prefill=0)
        hung.answer_gate.clear()
        loading = asyncio.create_task(load(fleet))
        await fleet.until(lambda: hung.loaded)
        cluster = fleet.frontend._cluster
        assert cluster is not None
        member = cluster._members.get("d1")
        assert member is not None
        member.link._dead_s = -1.0
        assert (await loading).versions[0].adapter_id == ONE
        assert decode.loaded == ["/lora/one"]
        for one in cluster._members.all():
            one.link._dead_s = -1.0
        with pytest.raises(NoWorkerError, match="no worker that takes adapters is usable now: d0 does not answer"):
            await cluster.load_adapter("/lora/one")


async def test_a_change_has_a_bound_that_holds_for_those_that_wait_for_it(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    decode.answer_gate.clear()
    fleet.frontend.adapters._timeout_s = 0.05
    found = await asyncio.gather(load(fleet), fleet.frontend.adapters.unload("poems"), return_exceptions=True)
    assert [type(error) for error in found] == [NoWorkerError] * 2
    assert "poems: not done within" in str(found[0])


async def test_a_call_that_ends_with_its_channel_is_an_answer(pair: tuple[Fleet, Any, Any]) -> None:
    """All calls of a link to its worker, while the channel is closed."""
    fleet, _, decode = pair
    cluster = fleet.frontend._cluster
    assert cluster is not None
    link = next(member.link for member in cluster._members.all() if member.record.worker_id == "d0")
    decode.answer_gate.clear()
    num_dumps = decode.num_dumps
    calls = (link.load_adapter("/lora/one"), link.unload_adapter(ONE), link.release_session(b"s"), link.dump_blocks())
    running = [asyncio.create_task(call) for call in calls]
    await fleet.until(lambda: decode.loaded and decode.unloaded and decode.released and decode.num_dumps > num_dumps)
    await end(fleet, decode)
    loaded, unloaded, released, dump = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(loaded, NoWorkerError)
    assert (unloaded, released) == (None, None)
    assert isinstance(dump, InternalError)


async def test_a_cluster_without_adapters_says_so(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    with pytest.raises(InvalidRequestError, match="--enable-lora"):
        await load(fleet)


async def test_a_store_that_is_away_keeps_the_names_and_takes_no_changes(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    await load(fleet)
    fleet.store.available = False
    await fleet.ask(model="poems")
    assert decode.submits[-1].adapter == ONE
    for fields in ({"model": "prose"}, {"adapter": "prose"}):
        with pytest.raises(NoWorkerError, match="prose is not known here"):
            await fleet.ask(**fields)
    for change in (
        load(fleet, folder="/lora/two", load_inplace=True),
        fleet.frontend.adapters.roll_back("prose"),
        fleet.frontend.adapters.unload("prose"),
    ):
        with pytest.raises(NoWorkerError, match="registry"):
            await change
    fleet.store.available = True
    fleet.store.flush()
    await fleet.frontend._started_registry().refresh()
    assert list((await fleet.store.read_adapters(0)).entries) == ["poems"]  # type: ignore[union-attr]


async def test_hits_are_of_the_same_adapter_and_the_same_salt_only(fleet: Fleet) -> None:
    """Adapters a, b, none with salts s, t, none, twice each: the second time all is cached, and never before."""
    await add(fleet, "d0")
    await fleet.until_ready(prefill=0)
    await load(fleet, "a", "/lora/one")
    await load(fleet, "b", "/lora/two")
    frontend, sequence = fleet.frontend, 0
    cluster = frontend._cluster
    assert cluster is not None
    header = fleet.header
    for adapter in ("a", "b", ""):
        for salt in ("s", "t", None):
            spec = UncheckedRequest(token_ids=[1] * 40, adapter=adapter, cache_salt=salt, sampling={"max_tokens": 1})
            for expected in (0, 32):
                prepared = await frontend.prepare(spec)
                hits = cluster.snapshot(PromptBlocks(prepared.prompt)).decode[0].hit_tokens
                assert hits == expected, (adapter, salt)
                if not expected:  # as the worker names what it has computed
                    keys = tuple(worker_keys(header, prepared))
                    sequence += 1
                    event = KvEvent("i1", 0, sequence, "stored", keys)
                    await fleet.store.append_events("d0", [event])
                    await fleet.until(lambda count=2 * sequence: cluster._index.num_blocks("d0") == count)


def worker_keys(header: Any, prepared: Any) -> list[bytes]:
    """The identities of a prompt's full blocks, by the engine's way from the message."""
    assert (adapter_need(prepared) is None) == (not prepared.prompt.adapter)
    submit = decode_pb2.Submit.FromString(decode_pb2.Submit(**prompt_fields(prepared.prompt)).SerializeToString())
    prompt = prompt_from_proto(submit, vocab_size=64)
    return block_keys(header_of_request(header, prompt), prompt.token_ids)


async def test_requests_stay_with_the_worker_that_has_the_adapter_and_spread_when_it_is_busy(fleet: Fleet) -> None:
    load_of = WorkerLoad(prefill_tokens_per_s=1000.0, decode_step_s=0.03)
    await add(fleet, "d0", load=load_of)
    await add(fleet, "d1", load=WorkerLoad(prefill_tokens_per_s=1000.0, decode_step_s=0.03, adapters={ONE: 0}))
    await fleet.add("d2", load=load_of)
    await fleet.until_ready(decode=3, prefill=0)
    await load(fleet)
    cluster = fleet.frontend._cluster
    assert cluster is not None
    chosen = set()
    for _ in range(8):
        *_, finished = await fleet.ask(model="poems")
        assert isinstance(finished, FinishedEvent)
        assert finished.explanation is not None
        costs = {c.decode_worker_id: c.adapter_ms for c in finished.explanation.candidates}
        chosen |= {c.decode_worker_id for c in finished.explanation.candidates if c.chosen}
        assert costs.keys() == {"d0", "d1"}, "d2 takes no adapters"
        assert costs["d1"] == 0.0
        assert costs["d0"] > 0.0
    assert chosen == {"d1"}
    record = fleet.record(
        fleet.workers[1], **TAKES, load=WorkerLoad(num_running=40, decode_step_s=0.03, adapters={ONE: 40})
    )
    await fleet.store.put_worker(record, ttl_s=1000)
    await fleet.until(lambda: any(view.record.load.num_running for view in cluster.snapshot().decode))
    *_, finished = await fleet.ask(model="poems")
    assert isinstance(finished, FinishedEvent)
    assert finished.explanation is not None
    assert [c.decode_worker_id for c in finished.explanation.candidates if c.chosen] == ["d0"]


async def test_the_affinity_of_a_session_is_of_its_adapter_by_content(model_folder: Path, tmp_path: Path) -> None:
    """As its blocks: another name of the same weights has it, too, and other weights under the name have another one."""
    settings: dict[str, Any] = {"dead_s": 60.0, "placement_policy": "session-affinity"}
    async with running(model_folder, tmp_path, **settings) as fleet:
        for number in range(3):
            await add(fleet, f"d{number}")
        await fleet.until_ready(decode=3, prefill=0)
        for name, folder in (("a", "/lora/one"), ("same", "/lora/one"), ("b", "/lora/two")):
            await load(fleet, name, folder)
        cluster = fleet.frontend._cluster
        assert cluster is not None
        policy, seen = cluster.placer.policy, []
        pick = policy.pick

        def watched(costs: Any, rng: random.Random) -> Any:
            seen.append(costs.request.affinity)
            return pick(costs, rng)

        policy.pick = watched  # type: ignore[method-assign]
        for name in ("tiny", "a", "b", "same", "a"):
            await fleet.ask(model=name)
        await load(fleet, "a", "/lora/two", load_inplace=True)
        await fleet.ask(model="a")
        base, a, b, same, again, replaced = seen
        assert len({base, a, b}) == 3
        assert all(seen)
        assert (a, same, b) == (again, a, replaced)


async def test_tickets_are_of_one_version_by_content(fleet: Fleet) -> None:
    """The client goes to decode by itself: the version is in the signed ticket, and the router counts what it had."""
    decode = await add(fleet, "d0", ticket_key=derive_key(fleet.secret, PURPOSE))
    await fleet.until_ready(prefill=0)
    cluster = fleet.frontend._cluster
    assert cluster is not None
    await fleet.until(lambda: cluster.direct_endpoint(("d0", "i1")) is not None)
    await load(fleet)
    metrics = fleet.frontend.metrics
    async with fleet.served() as address, AsyncClient(address, lookaside=True, timeout_s=600.0) as client:
        answers = [
            await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="poems", explain=True) for _ in range(2)
        ]
        await load(fleet, folder="/lora/two", load_inplace=True)
        answers.append(await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="poems", explain=True))
        pinned = {"adapter": "poems", "adapter_version": 1}
        answers.append(await client.generate(token_ids=[1] * 40, max_tokens=3, explain=True, **pinned))
        assert metrics.tickets.labels("granted").value == 4, "the router relayed none"
        with pytest.raises(ModelNotFoundError):
            await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="prose")
        await fleet.until(lambda: metrics.tickets.labels("finished").value == 4)
    ids, folders = (ONE, ONE, TWO, ONE), ("/lora/one", "/lora/one", "/lora/two", "/lora/one")
    assert [(one.adapter, one.adapter_folder) for one in decode.submits] == list(zip(ids, folders, strict=True))
    assert [(one.adapter, one.adapter_version) for one in answers] == [("poems", n) for n in (1, 1, 2, 1)]
    assert [one.explanation and one.explanation.adapter for one in answers] == [
        AdapterReport("poems", version, name) for version, name in zip((1, 1, 2, 1), ids, strict=True)
    ]
    assert metrics.totals()["adapter_requests"] == {"poems,finished": 4.0}
    await fleet.until(fleet.no_reservations)


async def test_prefill_workers_without_adapters_are_not_chosen(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    await add(fleet, "p1", "prefill")
    decode = await add(fleet, "d0")
    await fleet.until_ready(prefill=2)
    await load(fleet)
    for _ in range(4):
        await fleet.ask(model="poems")
    assert {ref.worker_id for submit in decode.submits for ref in submit.placement.prefill} == {"p1"}


async def test_what_if_charges_a_load_and_shows_a_pool_that_takes_the_adapter(fleet: Fleet) -> None:
    """The pool was made of the first worker, which may be one without slots."""
    await fleet.add("d0")
    await add(fleet, "d1")
    await fleet.until_ready(decode=2, prefill=0)
    await load(fleet)
    prepared = await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 40, model="poems"))
    for pool, workers in (("", {"d1"}), ("0P2D", {"decode-0", "decode-1"}), ("2P1D", {"decode-0"})):
        answer = fleet.frontend.what_if(prepared, pool).explanation
        assert {candidate.decode_worker_id for candidate in answer.candidates} == workers
        assert all(candidate.adapter_ms > 0.0 for candidate in answer.candidates)
        assert (answer.adapter.name, answer.adapter.version) == ("poems", 1)
    base = await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 40))
    assert not any(one.adapter_ms for one in fleet.frontend.what_if(base, "0P2D").explanation.candidates)


async def test_a_rank_above_the_workers_is_refused_with_the_numbers(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, _ = pair
    await load(fleet, folder="/lora/big")  # workers of another size were there
    with pytest.raises(NoWorkerError, match="rank 16 at most .* this one has 32"):
        await fleet.ask(model="poems")


async def test_workers_of_a_small_rank_hold_up_no_load_that_a_large_one_takes(fleet: Fleet) -> None:
    """Their requests are not given to them; but a load of a larger rank was refused as long as one of them was there."""
    too_large = AdapterError("rank 32 of q_proj is above the maximum of 16", param="r")
    small, prefill = await add(fleet, "d0"), await add(fleet, "p0", "prefill", max_lora_rank=64)
    small.adapters["/lora/big"] = too_large
    await fleet.until_ready()
    with pytest.raises(InvalidRequestError, match="worker d0: rank 32 of q_proj is above the maximum of 16"):
        await load(fleet, folder="/lora/big")
    prefill.adapters["/lora/big"] = AdapterError("no such file", param="lora_path")
    large = await add(fleet, "d1", max_lora_rank=64)
    await fleet.until_ready(decode=2)
    with pytest.raises(InvalidRequestError, match="worker p0: no such file"):
        await load(fleet, folder="/lora/big")
    prefill.adapters["/lora/big"] = large.adapters["/lora/big"]
    assert (await load(fleet, folder="/lora/big")).versions[0].rank == 32
    for _ in range(3):
        await fleet.ask(model="poems")
    assert (len(small.submits), len(large.submits)) == (0, 3)
    assert (await fleet.frontend.adapters.set_canary("poems", 1, 0.0)).stable == 1


async def test_where_no_prefill_worker_takes_adapters_decode_computes_the_prompt(fleet: Fleet) -> None:
    await fleet.add("p0", "prefill")
    decode = await add(fleet, "d0")
    await fleet.until_ready()
    await load(fleet)
    await fleet.ask(model="poems")
    assert decode.submits[0].placement.local_prefill
    await fleet.ask(model="tiny")
    assert not decode.submits[1].placement.local_prefill


async def test_more_adapters_than_slots_take_turns_and_the_base_model_does_not_wait(
    pair: tuple[Fleet, Any, Any],
) -> None:
    fleet, _, decode = pair
    for name, folder in (("a", "/lora/one"), ("b", "/lora/two")):
        await load(fleet, name, folder)
    decode.adapters["/lora/c"] = fleet.workers[0].adapters["/lora/c"] = worker_pb2.LoadAdapterResponse(
        id="c" * 32, rank=4
    )
    await load(fleet, "c", "/lora/c")
    decode.go.clear()
    cluster = fleet.frontend._cluster
    assert cluster is not None
    running = [asyncio.create_task(fleet.ask(model=name)) for name in ("a", "b", "a")]
    await fleet.until(lambda: len(decode.submits) == 3)
    running += [asyncio.create_task(fleet.ask(model="c")) for _ in range(2)]
    await fleet.until(lambda: len(cluster.adapter_turns) == 2)
    running.append(asyncio.create_task(fleet.ask(model="tiny")))
    await fleet.until(lambda: len(decode.submits) == 4)
    assert decode.submits[-1].adapter == ""
    decode.go.set()
    answers = await asyncio.gather(*running)
    assert [submit.adapter for submit in decode.submits[4:]] == ["c" * 32] * 2
    waited = answers[3][-1]
    assert isinstance(waited, FinishedEvent)
    assert waited.explanation is not None
    assert any("until a slot was free" in note for note in waited.explanation.notes)


@asynccontextmanager
async def served(fleet: Fleet) -> AsyncIterator[str]:
    """Both services over gRPC, at the address."""
    server, key = new_server(), operator_key(fleet.secret)
    port = bind(server, "127.0.0.1", 0)
    operations = OperationsService(key, fleet.frontend.move_request, fleet.frontend.adapters)
    server.add_generic_rpc_handlers((RouterService(fleet.frontend).handler(), operations.handler()))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_operators_and_the_sdk_load_route_and_use_adapters(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    async with served(fleet) as address, AsyncClient(address) as client:

        async def operate(method: str, request: Any, answer: Any = router_pb2.Adapter, secret: bytes = b"") -> Any:
            access = RouterAccess(address)
            return await asyncio.to_thread(ask, access, secret or fleet.secret, method, request, answer)

        with pytest.raises(PermissionDeniedError, match="admin key"):
            await client.load_adapter("poems", "/lora/one")
        with pytest.raises(PermissionDeniedError):
            await client.roll_back_adapter("poems")
        add = router_pb2.AddAdapterRequest(name="poems", folder="/lora/one")
        with pytest.raises(AuthenticationError):
            await operate("AddAdapter", add, secret=b"x" * 32)
        assert decode.loaded == []
        await operate("AddAdapter", add)
        again = router_pb2.AddAdapterRequest(name="poems", folder="/lora/two", canary_share=0.25)
        added = await operate("AddAdapter", again)
        assert lines_of(added) == [
            f"poems  tiny  1  stable 75%  {ONE}  rank 8  0.0 MB  {day(added, 0)}  /lora/one",
            f"poems  tiny  2  canary 25%  {TWO}  rank 16  0.0 MB  {day(added, 1)}  /lora/two",
        ]
        promote = router_pb2.RouteAdapterRequest(name="poems", promote=router_pb2.AdapterPromotion())
        assert (await operate("RouteAdapter", promote)).stable == 2
        (adapter,) = await client.list_adapters()
        assert (adapter.stable, adapter.previous, [version.id for version in adapter.versions]) == (2, 1, [ONE, TWO])
        answer = await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="poems", explain=True)
        assert (answer.model, answer.adapter, answer.adapter_version) == ("tiny", "poems", 2)
        assert answer.explanation is not None
        assert answer.explanation.adapter == AdapterReport("poems", 2, TWO)
        old = await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="poems", adapter_version=1)
        assert (old.adapter_version, decode.submits[-1].adapter) == (1, ONE)
        assert [(model.id, model.parent) for model in await client.list_models()] == [("tiny", ""), ("poems", "tiny")]
        with pytest.raises(InvalidRequestError, match="change"):
            await operate("RouteAdapter", router_pb2.RouteAdapterRequest(name="poems"))
        await operate("RemoveAdapter", router_pb2.RemoveAdapterRequest(name="poems"))
        with pytest.raises(ModelNotFoundError):
            await client.generate(token_ids=[1] * 40, max_tokens=3, adapter="poems")


def day(adapter: Any, index: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(adapter.versions[index].created))


async def test_the_sdk_with_an_admin_key_does_all_that_operators_do(
    pair: tuple[Fleet, Any, Any], tmp_path: Path
) -> None:
    fleet, _, decode = pair
    keys = tmp_path / "keys.json"
    admin, _ = add_key(keys, "ops", now=1.0, admin=True)
    poet, _ = add_key(keys, "poet", now=1.0, adapters=["poems"])
    clerk, _ = add_key(keys, "clerk", now=1.0, adapters=["letters"])
    authenticator = Authenticator(keys, now=time.monotonic)
    fleet.frontend.use_adapter_limits(authenticator.may_use_adapter)
    servers = ApiServers("127.0.0.1", 0, 0, keys=authenticator)
    at = await servers.start(fleet.frontend, fleet.frontend.metrics, status=fleet.frontend.status)
    try:
        async with AsyncClient(at.grpc, api_key=admin) as client:
            assert (await client.load_adapter("poems", "/lora/one")).stable == 1
            await client.load_adapter("poems", "/lora/two", canary_share=0.5)
            assert (await client.promote_adapter("poems")).stable == 2
            assert (await client.set_adapter_canary("poems", 1, 0.5)).canary == 1
            assert (await client.roll_back_adapter("poems")).canary == 0
            assert (await client.roll_back_adapter("poems", 1)).stable == 1
        async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as http:

            async def post(path: str, body: Any, key: str) -> tuple[int, str]:
                answer = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                return answer.status_code, answer.text

            two = {"lora_name": "poems", "lora_path": "/lora/two"}
            assert (await post("/v1/load_lora_adapter", two, poet))[0] == 403
            assert (await post("/v1/load_lora_adapter", two, "nonsense"))[0] == 401
            status, text = await post("/v1/load_lora_adapter", two, admin)
            assert (status, "already been loaded" in text) == (400, True)
            assert await post("/v1/load_lora_adapter", two | {"load_inplace": True}, admin) == (
                200, "Success: LoRA adapter 'poems' added successfully.",
            )  # fmt: skip
            for body in (
                {},
                {"lora_name": "x"},
                {"lora_path": "/x"},
                two | {"load_inplace": "x"},
                two | {"lora_path": "/lora/no"},
            ):
                assert (await post("/v1/load_lora_adapter", body, admin))[0] == 400
            for route, field in (
                ("load", "load_in_place"), ("canary", "share"), ("promote", "version"), ("unload", "model"),
            ):  # fmt: skip
                status, text = await post(f"/v1/{route}_lora_adapter", {"lora_name": "poems", field: 1}, admin)
                assert (status, json.loads(text)["error"]["param"] in (field, "canary_share")) == (400, True), text
            status, text = await post("/v1/canary_lora_adapter", {"lora_name": "poems", "version": 2}, admin)
            assert (status, json.loads(text)["error"]["param"]) == (400, "canary_share"), "not a share of 0"
            ask_model = {"model": "poems", "prompt": [[1] * 20, [2] * 20], "max_tokens": 2}
            status, text = await post("/v1/completions", ask_model, poet)
            assert (status, json.loads(text)["model"]) == (200, "poems")
            assert [submit.adapter for submit in decode.submits] == [TWO] * 2
            assert (await post("/v1/completions", ask_model, clerk))[0] == 404
            headers = {"authorization": f"Bearer {poet}", "x-diptych-explain": "1"}
            for model, report in (("poems", {"name": "poems", "version": 3, "id": TWO}), ("tiny", None)):
                body = {"model": model, "prompt": [1] * 20, "max_tokens": 2}
                explained = (await http.post("/v1/completions", json=body, headers=headers)).json()
                assert (explained["model"], explained["diptych"]["adapter"]) == (model, report)
            listed = (await http.get("/v1/models", headers={"authorization": f"Bearer {poet}"})).json()["data"]
            assert [(model["id"], model.get("parent"), model.get("root")) for model in listed] == [
                ("tiny", None, None), ("poems", "tiny", "/lora/two"),
            ]  # fmt: skip
            own = (await http.get("/v1/models/poems", headers={"authorization": f"Bearer {poet}"})).json()
            assert (own["id"], own["parent"], own["root"]) == ("poems", "tiny", "/lora/two")
            hidden = await http.get("/v1/models/poems", headers={"authorization": f"Bearer {clerk}"})
            assert (hidden.status_code, "with adapters" in hidden.text) == (404, False)
            for path in ("/v1/models/nope", "/v1/completions"):
                own = {"authorization": f"Bearer {poet}"}
                ask_nope = ask_model | {"model": "nope"}
                answer = await (
                    http.post(path, json=ask_nope, headers=own) if "comp" in path else http.get(path, headers=own)
                )
                text = "the model 'nope' does not exist; there is 'tiny', with adapters 'poems'"
                assert (answer.status_code, answer.json()["error"]["message"]) == (404, text)
            num_before = len(decode.submits)
            by_field = {"model": "tiny", "prompt": [1] * 20, "max_tokens": 2, "adapter": "poems", "adapter_version": 1}
            assert (await post("/v1/completions", by_field, poet))[0] == 200
            chat = {
                "model": "poems",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 2,
                "adapter": "poems",
            }
            assert (await post("/v1/chat/completions", chat, poet))[0] == 200
            assert [submit.adapter for submit in decode.submits[num_before:]] == [ONE, TWO]
            for wrong, code, param in (
                ({"adapter": "letters", "model": "poems"}, 400, "adapter"), ({"adapter": "letters"}, 404, "adapter"),
                ({"adapter_version": 9}, 400, "adapter_version"), ({"adapter": None}, 400, "adapter_version"),
                ({"adapter": 3}, 400, "adapter"),
            ):  # fmt: skip
                status, text = await post("/v1/completions", by_field | wrong, poet)
                assert (status, json.loads(text)["error"]["param"]) == (code, param)
            for path, body in (
                ("/tokenize", {"prompt": "w1 w2"}),
                ("/detokenize", {"tokens": [1, 2]}),
                ("/v1/completions", {"prompt": [1] * 20, "max_tokens": 2}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}),
                ("/v1/responses", {"input": "w1", "max_output_tokens": 2}),
            ):
                assert (await post(path, body | {"model": "poems"}, poet))[0] == 200, path
                refused = [await post(path, body | {"model": name}, clerk) for name in ("poems", "never")]
                assert [status for status, _ in refused] == [404, 404], path
                texts = {re.sub("poems|never", "NAME", text) for _, text in refused}
                assert len(texts) == 1, "it cannot be seen that one exists"
            for key, named in ((admin, True), (poet, True), (clerk, False)):
                headers = {"authorization": f"Bearer {key}"}
                for path in ("/metrics", "/status.json"):
                    assert ("poems" in (await http.get(path, headers=headers)).text) is named, (path, named)
            await check_routes_of_versions(http, admin, poet, clerk)
            assert await post("/v1/unload_lora_adapter", {"lora_name": "poems"}, admin) == (
                200, "Success: LoRA adapter 'poems' removed successfully.",
            )  # fmt: skip
            assert (await post("/v1/unload_lora_adapter", {"lora_name": "poems"}, admin))[0] == 404
            assert (await post("/v1/unload_lora_adapter", {}, admin))[0] == 400
            assert (await post("/v1/completions", ask_model, poet))[0] == 404
    finally:
        await servers.stop(1.0)


async def check_routes_of_versions(http: httpx.AsyncClient, admin: str, poet: str, clerk: str) -> None:
    """Over HTTP an admin's key does all that the command does. poems has versions 1 to 3, and 3 is stable."""

    async def post(path: str, key: str = admin, **body: Any) -> tuple[int, Any]:
        answer = await http.post(f"/v1/{path}_lora_adapter", json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code, answer.json()

    async def listed(key: str) -> list[Any]:
        answer = await http.get("/v1/lora_adapters", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        return list(answer.json()["data"])

    (before,) = await listed(poet)
    assert (before["name"], before["stable"], before["canary"]) == ("poems", 3, 0)
    assert [(one["number"], one["id"]) for one in before["versions"]] == [(1, ONE), (2, TWO), (3, TWO)]
    assert await listed(clerk) == []
    for path, body in (("canary", {"version": 1, "canary_share": 0.5}), ("promote", {}), ("rollback", {})):
        assert (await post(path, poet, lora_name="poems", **body))[0] == 403
        assert (await post(path, lora_name="never", **body))[0] == 404
    assert await listed(admin) == [before]
    status, entry = await post("canary", lora_name="poems", version=1, canary_share=0.25)
    assert (status, entry["stable"], entry["canary"], entry["canary_share"]) == (200, 3, 1, 0.25)
    assert await listed(poet) == [entry]
    assert (await post("canary", lora_name="poems", canary_share=0.5))[1]["canary_share"] == 0.5, "the present canary"
    assert (await post("promote", lora_name="poems"))[1]["stable"] == 1
    assert (await post("rollback", lora_name="poems"))[1]["stable"] == 3
    assert (await post("rollback", lora_name="poems", version=2))[1]["stable"] == 2
    for path, body, param in (
        ("promote", {}, "lora_name"), ("canary", {"version": 9, "canary_share": 0.5}, "version"),
        ("canary", {"version": 1, "canary_share": 2.0}, "canary_share"), ("rollback", {"version": 9}, "version"),
        ("rollback", {"version": "x"}, "version"), ("rollback", {"version": -1}, "version"),
    ):  # fmt: skip
        status, refused = await post(path, lora_name="poems", **body)
        assert (status, refused["error"]["param"]) == (400, param), (path, body)


async def test_an_adapter_of_another_base_model_loads_with_a_warning(
    pair: tuple[Fleet, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the answer of a load over HTTP and by the command, and in the list."""
    fleet, prefill, decode = pair
    for worker in (prefill, decode):
        for folder, base_model in (("/lora/one", "acme/large"), ("/lora/two", f"acme/{fleet.folder.name}")):
            worker.adapters[folder].base_model = base_model
    keys = tmp_path / "keys.json"
    admin, _ = add_key(keys, "ops", now=1.0, admin=True)
    servers = ApiServers("127.0.0.1", 0, 0, keys=Authenticator(keys, now=time.monotonic))
    at = await servers.start(fleet.frontend, fleet.frontend.metrics)
    monkeypatch.delenv("DIPTYCH_SECRET_FILE", raising=False)
    monkeypatch.setenv("DIPTYCH_API_KEY", admin)

    async def command(*arguments: str) -> str:
        return (
            await asyncio.to_thread(CliRunner().invoke, adapters_command, [*arguments, "--address", at.grpc])
        ).stderr

    try:
        async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as http:
            texts = []
            for name, folder in (("large", "/lora/one"), ("own", "/lora/two")):
                body = {"lora_name": name, "lora_path": folder}
                answer = await http.post(
                    "/v1/load_lora_adapter", json=body, headers={"authorization": f"Bearer {admin}"}
                )
                assert answer.status_code == 200
                texts.append(answer.text)
        assert "Warning: version 1 was trained for acme/large" in texts[0]
        assert "Warning" not in texts[1]
        assert "warning: large: version 1 was trained for acme/large" in await command("list")
        assert "warning: version 1 was trained for acme/large" in await command("load", "again", "/lora/one")
    finally:
        await servers.stop(1.0)


async def test_an_open_metrics_page_names_no_adapter_where_keys_are_required(
    pair: tuple[Fleet, Any, Any], tmp_path: Path
) -> None:
    fleet, _, _ = pair
    await load(fleet)
    await fleet.ask(model="poems")
    key, _ = add_key(tmp_path / "keys.json", "acme", now=1.0)
    for keys, named in ((Authenticator(tmp_path / "keys.json", now=time.monotonic), False), (None, True)):
        servers = ApiServers("127.0.0.1", 0, 0, keys=keys, open_metrics=True)
        at = await servers.start(fleet.frontend, fleet.frontend.metrics)
        try:
            async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as http:
                answer = await http.get("/metrics")
                assert (answer.status_code, 'adapter="poems"' in answer.text) == (200, named)
                assert "diptych_adapters_registered" in answer.text
        finally:
            await servers.stop(1.0)


async def test_the_command_takes_an_admins_key_where_it_has_no_cluster_secret(
    pair: tuple[Fleet, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `diptych serve`, whose secret nobody has."""
    fleet, _, _ = pair
    keys = tmp_path / "keys.json"
    admin, _ = add_key(keys, "ops", now=1.0, admin=True)
    poet, _ = add_key(keys, "poet", now=1.0)
    servers = ApiServers("127.0.0.1", 0, 0, keys=Authenticator(keys, now=time.monotonic))
    at = await servers.start(fleet.frontend, fleet.frontend.metrics)
    monkeypatch.delenv("DIPTYCH_SECRET_FILE", raising=False)

    async def command(key: str, *arguments: str) -> Any:
        environment = {"DIPTYCH_API_KEY": key}
        return await asyncio.to_thread(
            CliRunner().invoke, adapters_command, [*arguments, "--address", at.grpc], env=environment
        )

    try:
        refused = await command("", "load", "poems", "/lora/one")
        assert isinstance(refused.exception, ConfigError)
        assert all(words in str(refused.exception) for words in ("DIPTYCH_API_KEY", "--admin", "--secret-file"))
        assert isinstance((await command("", "list")).exception, AuthenticationError)
        denied = await command(poet, "load", "poems", "/lora/one")
        assert isinstance(denied.exception, PermissionDeniedError)
        assert "DIPTYCH_API_KEY" in denied.exception.message
        assert (await command(admin, "load", "poems", "/lora/one")).exit_code == 0
        for arguments, words in (
            (("load", "../x", "/lora/one"), "NAME must be"),
            (("load", "prose", "/lora/one", "--canary-share", "2"), "--canary-share must be"),
            (("load", "prose", "/lora/one", "--model", "other"), "the model 'other'"),
            (("canary", "poems", "7", "0.5"), "VERSION: poems has no version 7"),
            (("promote", "poems"), "NAME: poems has no canary"),
            (("rollback", "poems", "--to", "7"), "--to: poems has no version 7"),
        ):
            failed = (await command(admin, *arguments)).exception
            assert isinstance(failed, DiptychError)
            assert failed.message.startswith(words), failed.message
        listed = (await command(poet, "list")).stdout  # the router's log may be in it
        assert "name  model  version  answers" in listed
        assert "\npoems  tiny  1  stable 100%" in listed
        assert "poems is unloaded; it had version 1\n" in (await command(admin, "unload", "poems")).stdout
    finally:
        await servers.stop(1.0)


async def test_without_keys_nobody_changes_adapters_over_http(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    servers = ApiServers("127.0.0.1", 0, 0)
    at = await servers.start(fleet.frontend, fleet.frontend.metrics)
    try:
        async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as http:
            answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/lora/one"})
            assert (answer.status_code, "admin key" in answer.text) == (403, True)
            assert decode.loaded == []
    finally:
        await servers.stop(1.0)


async def test_one_answer_to_several_prompts_has_one_version(pair: tuple[Fleet, Any, Any]) -> None:
    fleet, _, decode = pair
    await load(fleet)
    await load(fleet, folder="/lora/two", canary_share=0.5)
    servers = ApiServers("127.0.0.1", 0, 0)
    at = await servers.start(fleet.frontend, fleet.frontend.metrics)
    try:
        async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as http:
            for number in range(6):
                body = {"model": "poems", "prompt": [[i] * 20 for i in range(1, 9)], "max_tokens": 1, "n": 1}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                assert len({submit.adapter for submit in decode.submits[8 * number :]}) == 1
    finally:
        await servers.stop(1.0)


async def test_adapters_of_the_settings_are_loaded_at_the_start_and_a_restart_undoes_no_rollback(
    model_folder: Path, tmp_path: Path
) -> None:
    modules = ("poems=/lora/one", "prose=/lora/none")
    async with running(model_folder, tmp_path, require_prefill=False, lora_modules=modules) as fleet:
        assert not fleet.frontend.ready()[0]
        decode = await add(fleet, "d0")
        await fleet.until(lambda: fleet.frontend.ready()[0])
        assert fleet.frontend.ready()[1] == ["adapter prose: worker d0: no adapter in /lora/none"]
        await check_who_reads_what_is_missing(fleet, tmp_path)
        await fleet.ask(model="poems")
        assert decode.submits[0].adapter == ONE
        await load(fleet, folder="/lora/two", load_inplace=True)
        config = fleet.frontend._config
        again = Frontend(config, store=fleet.store, clock=MonotonicClock(), rng=random.Random(2))
        await again.start()
        try:
            await fleet.until(lambda: again.ready()[0])
            spec = UncheckedRequest(token_ids=[1] * 40, model="poems", sampling={"max_tokens": 3})
            assert (await again.prepare(spec)).prompt.adapter == TWO
        finally:
            again._store = None  # it is the fleet's
            await again.close()


async def check_who_reads_what_is_missing(fleet: Fleet, folder: Path) -> None:
    """Names, paths and workers are for an admin's key, and for all where no keys are required."""
    path = folder / "keys.json"
    admin, plain = (add_key(path, name, now=1.0, admin=name == "ops")[0] for name in ("ops", "poet"))
    keys = Authenticator(path, now=time.monotonic)
    for authenticator, key, named in ((keys, admin, True), (keys, plain, False), (keys, "", False), (None, "", True)):
        servers = ApiServers("127.0.0.1", 0, 0, keys=authenticator, open_metrics=not key)
        at = await servers.start(fleet.frontend, fleet.frontend.metrics, status=fleet.frontend.status)
        try:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with httpx.AsyncClient(base_url=f"http://{at.http}", headers=headers, timeout=60) as http:
                (reason,) = (await http.get("/ready")).json()["reasons"]
                assert all((word in reason) is named for word in ("prose", "d0", "/lora/none")), reason
                assert "adapter " in reason
                if key or named:
                    assert "prose" not in " ".join((await http.get("/status.json")).json()["reasons"])
        finally:
            await servers.stop(1.0)


@pytest.mark.parametrize("entry", ["poems", "=/x", "poems=", "../x=/lora", "tiny=/lora"])
def test_an_entry_of_lora_modules_names_what_is_wrong(entry: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(model="/models/tiny", lora_modules=(entry,))
    assert caught.value.field == "lora_modules"
    for kind in (ServeConfig, UpConfig):
        with pytest.raises(ConfigError, match="needs enable_lora"):
            kind(lora_modules=("poems=/lora",))
        assert kind(lora_modules=("poems=/lora",), enable_lora=True, lora_dir=(str(tmp_path),)).lora_modules


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('{"name": "poems"', "must be a JSON object"),
        ('{"name": "poems"}', "must be a JSON object"),
        ('{"name": "poems", "path": 3}', "must be a JSON object"),
        ('{"name": "poems", "path": "/x", "rank": 3}', "without 'rank'"),
        ('{"name": "../x", "path": "/x"}', "must be NAME=FOLDER"),
        ("poems=/x prose=/y", "repeat the flag"),
    ],
)
def test_other_forms_of_lora_modules_are_refused_with_what_is_wrong(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        RouterConfig(model="/models/tiny", lora_modules=(entry,))
    assert caught.value.field == "lora_modules"


def test_lora_modules_as_json_as_vllm_has_them() -> None:
    entries = ('{"name": "poems", "path": "/x, y=z", "base_model_name": "tiny"}', "prose=/y")
    assert lora_modules(entries) == {"poems": "/x, y=z", "prose": "/y"}
    passed = absolute_modules(entries)
    assert lora_modules(passed) == lora_modules(entries)
    assert split_list(",".join(passed)) == list(passed), "each is one value of the router's flag"


def test_serve_and_up_pass_absolute_folders_to_the_router() -> None:
    assert absolute_modules(("a=/x/y", "b=z")) == ("a=/x/y", f"b={Path('z').absolute()}")
