"""The gRPC face on a real server: the SDK, raw calls, and what does not decode."""

# ruff: noqa: PT012, ASYNC110 - leaving a loop is what is tested, and health has no event to wait for

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from diptych.client import (
    AsyncClient,
    Client,
    Completion,
    Delta,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    RequestDeadlineError,
    RetryPolicy,
    StreamBrokenError,
    UnreachableError,
    WorkerLostError,
)
from diptych.router.api.fake import MODEL, REQUEST_ID, FakeRouterApi, Step, hello_script
from diptych.router.api.grpc.service import SERVICE
from diptych.router.requests.messages import TokenEvent
from diptych.rpc.channels import open_channel
from diptych.rpc.errors import from_rpc_error
from diptych.rpc.v1 import router_pb2
from diptych_tests.http_api import api_servers
from diptych_tests.waiting import until

WAIT_S = 60.0
ONCE = RetryPolicy(max_tries=1)

grpc.aio.init_grpc_aio()  # its poller thread runs as long as the process; it must not count as a leak of the first test


@asynccontextmanager
async def serving(router_api: FakeRouterApi) -> AsyncIterator[str]:
    """The gRPC address of a router whose frontend is `router_api`."""
    async with api_servers(router_api) as at:
        yield at.grpc


@asynccontextmanager
async def sdk(router_api: FakeRouterApi, **options: Any) -> AsyncIterator[AsyncClient]:
    # A deadline that no test reaches: a call that should be cancelled must not end by it.
    async with serving(router_api) as address, AsyncClient(address, timeout_s=10 * WAIT_S, **options) as client:
        yield client


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run a synchronous client beside the server's loop, in a thread that ends with it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return await asyncio.wait_for(done, 4 * WAIT_S)
    finally:
        await asyncio.to_thread(thread.join, WAIT_S)


async def test_async_whole_answer_and_models() -> None:
    router_api = FakeRouterApi(hello_script())
    async with sdk(router_api) as client:
        answer = await client.generate(prompt="Hi", max_tokens=7, stop="!", seed=3, explain=True, request_id="mine")
        models = await client.list_models()
    check_hello(answer)
    spec = router_api.specs[0]
    assert (spec.prompt, spec.request_id) == ("Hi", "mine")
    assert spec.sampling == {"max_tokens": 7, "stop": ("!",), "seed": 3}
    assert isinstance(spec.timeout_s, float)
    assert 0 < spec.timeout_s <= 10 * WAIT_S
    assert spec.local_prefill_max_tokens is None
    assert [model.id for model in models] == [MODEL]


def check_hello(answer: Completion) -> None:
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hello there", (10, 11, 12, 13), "stop")
    assert (answer.request_id, answer.model, answer.stop_string, answer.stop_token_id) == (REQUEST_ID, MODEL, "!", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 4, 2)
    assert answer.explanation is not None
    assert (answer.explanation.transport, answer.explanation.notes) == ("ucx:tcp", ("as planned",))
    assert answer.explanation.placement[0].chosen


async def test_sync_client() -> None:
    router_api = FakeRouterApi(hello_script())

    def work(address: str) -> tuple[Completion, list[Delta], Completion]:
        with Client(address, timeout_s=WAIT_S) as client:
            whole = client.generate(token_ids=[1, 2, 3], explain=True)
            stream = client.stream(messages=[{"role": "user", "content": "Hi"}], explain=True)
            return whole, list(stream), stream.result

    async with serving(router_api) as address:
        whole, deltas, result = await in_thread(lambda: work(address))
    check_hello(whole)
    assert whole == result
    assert deltas == [Delta(0, (10,), "Hello"), Delta(1, (11,), ""), Delta(2, (12, 13), " there")]
    assert (router_api.specs[0].token_ids, router_api.specs[1].messages) == (
        [1, 2, 3],
        [{"role": "user", "content": "Hi"}],
    )


async def test_errors_are_typed_and_carry_details() -> None:
    async with sdk(FakeRouterApi(hello_script())) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate(prompt="Hi", temperature=float("nan"))
        assert caught.value.param == "temperature"
        with pytest.raises(ModelNotFoundError):
            await client.generate(prompt="Hi", model="other")
    async with sdk(FakeRouterApi([], refuse=OverloadedError("full", retry_after_s=2.5))) as client:
        with pytest.raises(OverloadedError) as shed:
            await client.generate(prompt="Hi")
        assert shed.value.retry_after_s == 2.5
    async with sdk(FakeRouterApi([TokenEvent(0, (1,), "a"), WorkerLostError("d0 is gone")])) as client:
        stream = client.stream(prompt="Hi")
        with pytest.raises(WorkerLostError, match="d0"):
            _ = [delta async for delta in stream]
        with pytest.raises(StreamBrokenError):
            _ = stream.result
    async with sdk(FakeRouterApi([ValueError("secret")])) as client:
        with pytest.raises(DiptychError) as bug:
            await client.generate(prompt="Hi")
        assert "secret" not in bug.value.message


async def test_an_answer_that_just_ends_raises() -> None:
    async with sdk(FakeRouterApi([TokenEvent(0, (1,), "a")])) as client:
        with pytest.raises(DiptychError, match="without FinishedEvent"):
            await client.generate(prompt="Hi")


async def test_a_gap_raises_and_cancels() -> None:
    router_api = FakeRouterApi([TokenEvent(0, (1,), "a"), TokenEvent(5, (1,), "a"), None])
    async with sdk(router_api) as client:
        with pytest.raises(StreamBrokenError, match="a gap") as broken:
            await client.generate(prompt="Hi")
        await asyncio.wait_for(router_api.left.wait(), WAIT_S)
    del broken  # kept till here: its frames hold the call, so no collector cancels it for us


ENDLESS: list[Step] = [TokenEvent(0, (1,), "a"), None]


async def test_leaving_the_async_iterator_cancels() -> None:
    router_api = FakeRouterApi(ENDLESS)

    async def break_out(client: AsyncClient) -> None:
        async for _ in client.stream(prompt="Hi"):
            break

    async def raise_out(client: AsyncClient) -> None:
        with pytest.raises(KeyError):
            async for _ in client.stream(prompt="Hi"):
                raise KeyError

    async def close_inside(client: AsyncClient) -> None:
        stream = client.stream(prompt="Hi")
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                await stream.aclose()

    async def close_outside(client: AsyncClient) -> None:
        stream = client.stream(prompt="Hi")

        async def close_soon() -> None:
            await until(lambda: router_api.running == 1 and stream.request_id != "")
            await stream.aclose()

        closing = asyncio.create_task(close_soon())
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
        await closing

    async def leave_with(client: AsyncClient) -> None:
        async with client.stream(prompt="Hi") as stream:
            iterator = aiter(stream)
            await anext(iterator)

    async def cancel_task(client: AsyncClient) -> None:
        task = asyncio.ensure_future(client.generate(prompt="Hi"))
        await until(lambda: router_api.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def drop(client: AsyncClient) -> None:
        iterator = aiter(client.stream(prompt="Hi"))
        await anext(iterator)
        del iterator
        gc.collect()

    async with sdk(router_api) as client:
        for number, way in enumerate(
            [break_out, raise_out, close_inside, close_outside, leave_with, cancel_task, drop], start=1
        ):
            router_api.left.clear()
            await way(client)
            await asyncio.wait_for(router_api.left.wait(), WAIT_S)
            assert (router_api.running, router_api.cancelled) == (0, number), way.__name__


async def test_leaving_the_sync_iterator_cancels() -> None:
    router_api = FakeRouterApi(ENDLESS)

    def break_out(client: Client) -> None:
        for _ in client.stream(prompt="Hi"):
            break

    def raise_out(client: Client) -> None:
        with pytest.raises(KeyError):
            for _ in client.stream(prompt="Hi"):
                raise KeyError

    def close_from_a_thread(client: Client) -> None:
        stream = client.stream(prompt="Hi")
        timer = threading.Timer(0.05, stream.close)
        with pytest.raises(RequestCancelledError):
            for _ in stream:
                timer.start()
        timer.join()

    def leave_with(client: Client) -> None:
        with client.stream(prompt="Hi") as stream:
            next(iter(stream))

    async with serving(router_api) as address:
        client = Client(address, timeout_s=10 * WAIT_S)
        try:
            for number, way in enumerate([break_out, raise_out, close_from_a_thread, leave_with], start=1):
                router_api.left.clear()
                await in_thread(lambda way=way: way(client))
                await asyncio.wait_for(router_api.left.wait(), WAIT_S)
                assert (router_api.running, router_api.cancelled) == (0, number), way.__name__
        finally:
            client.close()


async def test_the_deadline_ends_the_call() -> None:
    router_api = FakeRouterApi(ENDLESS)
    async with sdk(router_api) as client:
        with pytest.raises(RequestDeadlineError):
            await client.generate(prompt="Hi", timeout_s=1.0)
        await until(lambda: router_api.running == 0 and router_api.cancelled == router_api.prepared)


async def test_unavailable_is_tried_again_before_the_first_message() -> None:
    router_api = FakeRouterApi(hello_script(), refuse=NoWorkerError("nobody yet"))
    async with sdk(router_api, retry=RetryPolicy(max_tries=10_000, budget_s=WAIT_S)) as client:
        task = asyncio.ensure_future(client.generate(prompt="Hi"))
        await until(lambda: len(router_api.specs) >= 2)
        router_api.refuse = None
        assert (await task).text == "Hello there"
    router_api = FakeRouterApi([], refuse=NoWorkerError("nobody"))
    async with sdk(router_api, retry=ONCE) as client:
        with pytest.raises(NoWorkerError):
            await client.generate(prompt="Hi")
        assert len(router_api.specs) == 1


async def test_an_address_without_a_router_is_unreachable() -> None:
    async with serving(FakeRouterApi([])) as address:
        pass
    async with AsyncClient(address, retry=ONCE) as client:
        with pytest.raises(UnreachableError, match=address):
            await client.generate(prompt="Hi")
        with pytest.raises(UnreachableError):
            await client.list_models()


def raw_generate(channel: grpc.aio.Channel) -> Callable[..., Any]:
    return channel.unary_stream(f"/{SERVICE}/Generate")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"\xff\xff\xff garbage", "request body"),
        (b"\x0a\x05ab", "request body"),
        (b"\x12\x02\xff\xfe", "request body"),  # prompt that is not UTF-8
        (b"", "input"),
        (router_pb2.GenerateRequest(model="m").SerializeToString(), "input"),
        (router_pb2.GenerateRequest(prompt="").SerializeToString(), "prompt"),
        (b"\x12\x01a\x48\x63", "failure_policy"),  # an unknown enum value
    ],
)
async def test_bytes_that_are_no_request_are_the_callers_error(body: bytes, param: str) -> None:
    router_api = FakeRouterApi(hello_script())
    async with serving(router_api) as address, open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in raw_generate(channel)(body, timeout=WAIT_S):
                pass
        error = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(error).param == param
        status = rpc_status.from_call(error)
        assert status is not None
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.domain, info.reason) == ("diptych", "INVALID_ARGUMENT")
        with pytest.raises(grpc.RpcError) as listed:
            await channel.unary_unary(f"/{SERVICE}/ListModels")(b"\xff\xff", timeout=WAIT_S)
        assert listed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert router_api.prepared == 0


async def test_health_follows_readiness() -> None:
    router_api = FakeRouterApi([])
    async with serving(router_api) as address, open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)).status

        async def reaches(wanted: int) -> None:
            async def reached() -> bool:
                return [await status(""), await status(SERVICE)] == [wanted, wanted]

            await until(reached)

        await reaches(health_pb2.HealthCheckResponse.SERVING)
        router_api.reasons = ["no prefill worker"]
        await reaches(health_pb2.HealthCheckResponse.NOT_SERVING)
