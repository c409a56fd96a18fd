"""`diptych router --router-processes 2`: real processes behind one address, before decode workers without an engine."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio
from redis import asyncio as aioredis

from diptych.cli.operator_calls import ask
from diptych.cli.router_access import RouterAccess
from diptych.cli.up.processes import free_port
from diptych.cli.up.supervisor import exit_reason
from diptych.common import child
from diptych.common.request import ADAPTER, ADAPTER_FOLDER
from diptych.common.store.redis_store import RedisStore
from diptych.router.api.auth.keys import add_key
from diptych.rpc.v1 import router_pb2, worker_pb2
from diptych_tests import router_fleet, waiting

pytestmark = [pytest.mark.multiproc, pytest.mark.asyncio(loop_scope="module")]
fixture = pytest_asyncio.fixture(scope="module", loop_scope="module")
TIMEOUT_S = 300.0
N = 2


class Router:
    """The parent, and clients of its address."""

    def __init__(self, process, port, grpc_port, log, key):
        self.process, self.port, self.grpc_port, self.log = process, port, grpc_port, log
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = f"http://127.0.0.1:{port}"

    @property
    def children(self):
        """The processes that serve, by number."""
        found = {}
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "diptych.router.processes.child" in line:
                    found[int(line[-1])] = process
        return found

    async def ask(self, client, max_tokens=2, headers=None, **more):
        body = {"prompt": [1] * 20, "max_tokens": max_tokens, **more}
        return await client.post("/v1/completions", json=body, headers=headers or {})

    def client(self):
        """One connection, kept open."""
        limits = httpx.Limits(max_connections=1)
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=TIMEOUT_S, limits=limits)

    async def once(self, **more):
        """A request over a connection of its own."""
        async with self.client() as client:
            return await self.ask(client, **more)

    async def requests(self):
        """Counted requests by process, as /metrics shows them."""
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        return requests_of(text)

    def ended(self):
        """The processes that the parent found ended, and why."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if "a router process ended" in line]
        return [(line["child"], line["why"]) for line in lines]

    async def kill(self, number):
        """Returns when its parent has been told. Until then its sockets may be open, which are closed with the last of its
        threads: a connection could still be put into the queue of a listener that nobody reads."""
        before = len(self.ended())
        self.children[number].send_signal(signal.SIGKILL)
        await waiting.until(lambda: len(self.ended()) > before)

    @contextlib.asynccontextmanager
    async def client_of_each(self):
        """A kept connection to each process, by its number."""
        async with contextlib.AsyncExitStack() as stack:
            found = {}
            while len(found) < N:
                client = await stack.enter_async_context(self.client())
                before = await self.requests()
                assert (await self.ask(client)).status_code == 200

                async def counted(before=before, client=client):  # which may be a moment behind the answer
                    after = await self.requests()
                    risen = [n for n in after if after[n] > before.get(n, 0)]
                    found.update(dict.fromkeys(risen, client))
                    return risen

                await waiting.until(counted)
            yield found


def requests_of(text):
    lines = [line for line in text.splitlines() if line.startswith("diptych_requests_total{")]
    return {line.partition('process="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.asynccontextmanager
async def running_router(fleet, tmp_path, valkey_url, *flags, key=""):
    """`key`: of its clients."""
    port, grpc_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [
        sys.executable, "-P", "-m", "diptych.cli", "router", "--model", str(fleet.folder), "--secret-file",
        fleet.frontend._config.secret_file, "--redis-url", valkey_url, "--http-port", str(port), "--grpc-port", str(grpc_port),
        "--router-processes", str(N), "--local-prefill-max-tokens", "0", *flags,
    ]  # fmt: skip
    log = tmp_path / "router.log"
    with log.open("wb") as output:
        process = child.start(command, stdout=output, stderr=output, new_session=True)
    router = Router(process, port, grpc_port, log, key)
    try:
        await waiting.until(lambda: "router processes serve" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield router
    finally:
        left = router.children.values() if process.poll() is None else []
        for _ in range(2):  # the second ends the drain
            process.terminate()
        await waiting.until(lambda: process.poll() is not None, "the router ends")
        await waiting.until(lambda: not any(one.is_running() for one in left), "its processes end with it")


@fixture
async def workers(model_folder, tmp_path_factory, valkey_url):
    """A fleet whose records are in a real store; its own frontend does not run."""
    async with aioredis.Redis.from_url(valkey_url, protocol=2) as client:
        await client.flushall()
    fleet = router_fleet.Fleet(model_folder, tmp_path_factory.mktemp("fleet"))
    fleet.store = RedisStore(valkey_url, cluster="diptych")
    takes = {"max_loras": 2, "max_lora_rank": 16, "request_fields": (ADAPTER, ADAPTER_FOLDER)}
    await fleet.add("p0", "prefill", **takes)
    fleet.decode = await fleet.add("d0", **takes)
    for worker in fleet.workers:
        worker.adapters = {f"/lora/{name}": worker_pb2.LoadAdapterResponse(id=name * 32, rank=8) for name in "ab"}
    yield fleet
    for worker in fleet.workers:
        await worker.kill()
    await fleet.store.close()


@fixture
async def router(workers, tmp_path_factory, valkey_url):
    """For all tests but those of its start and its end. The last one kills it."""
    async with running_router(workers, tmp_path_factory.mktemp("router"), valkey_url) as router:
        yield router


async def test_each_process_takes_connections_and_any_answers_for_all(router):
    async with router.client_of_each() as each:
        ids = [(await router.ask(each[n])).json()["id"] for n in each for _ in range(3)]
        answers = [(await client.get("/status.json")).json() for client in each.values()]
        counted = await router.requests()
        metrics = (await next(iter(each.values())).get("/metrics")).text
    total = sum(counted.values())
    assert set(counted) == {"0", "1"}
    assert all(count >= 4 for count in counted.values())
    for status in answers:
        assert status["processes"] == {"number": N, "answering": N}
        assert status["ready"]
        assert status["reasons"] == []
        assert sum(status["counters"]["requests"].values()) == total
        assert {one["request_id"] for one in status["cluster"]["placements"]} >= {one[5:] for one in ids}
        assert sum(point["finished"] for point in status["series"]) == total
    assert metrics.count("# TYPE diptych_requests_total counter") == 1
    assert metrics.count("\ndiptych_router_processes{") == N
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}") as channel:
        explain = channel.unary_unary(
            "/diptych.rpc.v1.Router/Explain",
            request_serializer=router_pb2.ExplainRequest.SerializeToString,
            response_deserializer=router_pb2.ExplainResponse.FromString,
        )
        for name in ids:  # one connection is of one process
            found = await explain(router_pb2.ExplainRequest(request_id=name), timeout=TIMEOUT_S)
            assert (found.outcome, found.explanation.request_id) == ("finished", name[5:])
        with pytest.raises(grpc.aio.AioRpcError, match="no recent request"):
            await explain(router_pb2.ExplainRequest(request_id="req-00"), timeout=TIMEOUT_S)


async def test_an_idempotency_key_is_one_for_all_processes_and_outlives_them(router, workers):
    decode, held = workers.decode, {"headers": {"idempotency-key": "k"}}
    async with router.client_of_each() as each:
        decode.go.clear()
        asked = len(decode.submits)
        first = asyncio.create_task(router.ask(each["0"], **held))
        await waiting.until(lambda: len(decode.submits) > asked)
        assert [(await router.ask(each["1"], **held)).status_code for _ in range(2)] == [409, 409]
        first.cancel()
        await waiting.until(lambda: decode.cancels)
        decode.go.set()

        async def succeeds():
            return (await router.once(**held)).status_code == 200

        await waiting.until(succeeds)  # the key of a request that was left is given back
        refused = await router.ask(each["1"], **held)
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict_error")
    async with router.client_of_each() as each:  # a process dies that holds a key
        decode.go.clear()
        asked = len(decode.submits)
        holder = asyncio.create_task(router.ask(each["0"], headers={"idempotency-key": "other"}))
        await waiting.until(lambda: len(decode.submits) > asked)
        await router.kill(0)
        with pytest.raises(httpx.HTTPError):
            await holder
        decode.go.set()

        async def given_back():  # once the parent sees that the call ended which held it
            return (await router.ask(each["1"], headers={"idempotency-key": "other"})).status_code == 200

        await waiting.until(given_back)
        assert (await router.ask(each["1"], **held)).status_code == 409


async def test_an_adapter_is_the_same_version_at_every_process(router, workers):
    """Loaded at one of them, by an operator; each counts its own requests, under one name."""
    access = RouterAccess(f"127.0.0.1:{router.grpc_port}")

    async def operate(method, request):
        await asyncio.to_thread(ask, access, workers.secret, method, request, router_pb2.Adapter)

    async def answered(each):
        begin = len(workers.decode.submits)
        found = [await router.ask(client, model="poems") for client in each.values()]
        assert [(one.status_code, one.json()["model"]) for one in found] == [(200, "poems")] * N
        return {submit.adapter for submit in workers.decode.submits[begin:]}

    async with router.client_of_each() as each:
        assert [(await router.ask(client, model="poems")).status_code for client in each.values()] == [404] * N
        await operate("AddAdapter", router_pb2.AddAdapterRequest(name="poems", folder="/lora/a"))
        assert await answered(each) == {"a" * 32}
        await operate("AddAdapter", router_pb2.AddAdapterRequest(name="poems", folder="/lora/b", in_place=True))
        assert await answered(each) == {"b" * 32}
        back = router_pb2.RouteAdapterRequest(name="poems", roll_back=router_pb2.AdapterRollback())
        await operate("RouteAdapter", back)
        assert await answered(each) == {"a" * 32}
        for client in each.values():
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(one["id"], one.get("root")) for one in listed[1:]] == [("poems", "/lora/a")]

        async def counted():
            text = (await next(iter(each.values())).get("/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith("diptych_adapter_requests_total{")]
            return [line.rpartition(" ")[2] for line in lines if 'adapter="poems"' in line] == ["3.0"] * N

        await waiting.until(counted)


async def test_a_process_that_dies_is_started_again_and_the_others_go_on(router, workers):
    async with router.client_of_each() as each:
        before, dead = len(router.ended()), router.children[0]
        workers.decode.go.clear()
        running = asyncio.create_task(router.ask(each["1"], max_tokens=5))
        await waiting.until(lambda: workers.decode.submits[-1].sampling.max_tokens == 5)
        await router.kill(0)
        workers.decode.go.set()
        assert (await running).json()["usage"]["completion_tokens"] == 5
        status = (await each["1"].get("/status.json")).json()
        assert (status["processes"]["answering"] == N) == (not status["reasons"])
        for _ in range(6):  # no connection reaches a process that does not serve
            assert (await router.once()).status_code == 200
        await waiting.until(lambda: 0 in router.children and router.children[0].pid != dead.pid)

        async def complete():
            return len(await router.requests()) == N

        await waiting.until(complete)
    async with router.client_of_each() as each:
        assert set(each) == {"0", "1"}
        answers = [await router.ask(client, model="poems") for client in each.values()]
        assert [one.status_code for one in answers] == [200] * N, "the new one knows what was loaded before"
    assert router.ended()[before:] == [("process 0", exit_reason(-9))]
    served = list(router.children.values())
    router.process.kill()
    router.process.wait()
    await waiting.until(lambda: not any(process.is_running() for process in served), "they end with their parent")


QUOTA = 6
"""Requests a minute, of the tenant acme."""


@fixture
async def router_with_keys(workers, tmp_path_factory, valkey_url):
    """A router whose clients have a key without a quota, and the key of acme. The last test ends it."""
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.json"
    acme, _ = add_key(keys, "acme", now=0.0, requests_per_minute=QUOTA)
    other, _ = add_key(keys, "other", now=0.0)
    async with running_router(workers, folder, valkey_url, "--keys-file", str(keys), key=other) as router:
        yield router, acme


async def test_a_tenants_quota_is_not_multiplied(router_with_keys):
    router, acme = router_with_keys
    headers = {"authorization": f"Bearer {acme}"}
    began = time.monotonic()
    codes = [(await router.once(headers=headers)).status_code for _ in range(8 * QUOTA)]
    assert set(codes) == {200, 429}
    # two slices, half a bucket where the processes hear of each other late, and what refills meanwhile
    most = QUOTA * (1.5 + (time.monotonic() - began) / 60) + N
    assert QUOTA / 2 <= codes.count(200) <= most
    async with httpx.AsyncClient(base_url=router.url, timeout=TIMEOUT_S) as client:
        assert (await client.get("/metrics")).status_code == 401


async def test_sigterm_drains_all_processes(router_with_keys, workers):
    router, _ = router_with_keys
    async with router.client_of_each() as each:
        workers.decode.go.clear()
        try:
            asked = len(workers.decode.submits)
            answers = [asyncio.create_task(router.ask(client, max_tokens=4)) for client in each.values()]
            await waiting.until(lambda: len(workers.decode.submits) == asked + N)
            children = router.children
            router.process.send_signal(signal.SIGTERM)

            async def refused():
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
                except ConnectionRefusedError:
                    return True
                except ConnectionResetError:  # it was in the queue of a listener that was closed
                    return False
                writer.close()  # a request on it might be taken, and would wait for the gate
                return False

            await waiting.until(refused)
        finally:
            workers.decode.go.set()  # the workers are those of other tests, too
        for answer in await asyncio.gather(*answers):
            assert answer.json()["usage"]["completion_tokens"] == 4
    await waiting.until(lambda: router.process.poll() is not None)
    assert router.process.returncode == 128 + signal.SIGTERM
    assert not any(process.is_running() for process in children.values())


@pytest.mark.parametrize("fault", ["a folder without a model", "a port in use"])
async def test_a_start_that_fails_says_so_and_leaves_nothing(workers, tmp_path, valkey_url, fault):
    port = free_port("127.0.0.1")
    folder = tmp_path / "empty" if "folder" in fault else workers.folder
    (tmp_path / "empty").mkdir()
    command = [
        sys.executable, "-P", "-m", "diptych.cli", "router", "--model", str(folder), "--secret-file",
        workers.frontend._config.secret_file, "--redis-url", valkey_url, "--http-port", str(port), "--grpc-port",
        workers.decode.address.rpartition(":")[2] if "port" in fault else "0", "--router-processes", str(N),
    ]  # fmt: skip
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=env)
    _, said = await ended.communicate()
    assert ended.returncode == 1
    assert ("grpc_port" if "port" in fault else "model") in said.decode()
    assert [path.name for path in tmp_path.glob("diptych-router-*")] == []
