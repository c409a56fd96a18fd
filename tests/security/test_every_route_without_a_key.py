"""Every route without a key: whatever the tables of routes and methods hold, now or later, is refused before it is looked up."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.routing import BaseRoute, Mount, Route

from diptych.common.secret import call_key, call_token
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.http.app import create_app
from diptych.router.server import ApiServers
from diptych.rpc import v1
from diptych.rpc.call_token import HEADER
from diptych.rpc.channels import open_channel
from diptych.rpc.operator import METADATA, operator_key, proof_of
from diptych.rpc.operator import SERVICE as OPERATIONS
from diptych.rpc.v1 import decode_pb2, router_pb2
from diptych_tests.http_api import api_servers

WAIT_S = 60.0
OPEN = {"/live", "/health", "/status", "/status.css", "/status.js"}
"""Liveness, and files of the package that hold nothing of the cluster."""
HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
SPELLINGS = (
    "{}",
    "{}/",
    "/{}",
    "/.{}",
    "{}?key=1",
    "{}#x",
    "{}%00",
    "{}%2f",
    "/live/..{}",
    "/live%2f..{}",
    "//live{}",
    "{};/live",
)


def services() -> dict[str, list[str]]:
    """All services of the wire contract and those of gRPC beside them -> their methods."""
    found = {
        "grpc.health.v1.Health": ["Check", "Watch", "List"],
        "grpc.reflection.v1alpha.ServerReflection": ["ServerReflectionInfo"],
        "grpc.channelz.v1.Channelz": ["GetServers"],
        "no.such.Service": ["Method"],
    }
    for module in pkgutil.iter_modules(v1.__path__, f"{v1.__name__}."):
        descriptor = getattr(importlib.import_module(module.name), "DESCRIPTOR", None)
        for service in descriptor.services_by_name.values() if descriptor is not None else ():
            found[service.full_name] = [*(method.name for method in service.methods), "NoSuchMethod"]
    return found


HEALTH, TICKETS = "/grpc.health.v1.Health/", "/diptych.rpc.v1.Lookaside/Attach"
METHODS = [f"/{service}/{method}" for service, names in services().items() for method in names]


def flat(routes: list[BaseRoute], front: str = "") -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield front + route.path + "/x"
            yield from flat(list(route.routes or ()), front + route.path)
        elif isinstance(route, Route):
            yield front + route.path
        else:
            raise AssertionError(f"a kind of route that this test does not know: {route!r}")


def paths() -> set[str]:
    """Every route of the application as the router makes it, with something in place of its parameters."""
    api = FakeRouterApi(hello_script())
    app = create_app(api, api.metrics, status=lambda tenant: {})
    return {re.sub(r"\{\w+(:\w+)?\}", "tiny", path) for path in flat(list(app.routes))}


def test_the_tables_are_whole() -> None:
    assert {"/v1/chat/completions", "/v1/responses", "/metrics", "/ready", "/status.json", "/openapi.json"} <= paths()
    assert not any("{" in path for path in paths())
    assert {"/diptych.rpc.v1.Router/Generate", "/diptych.rpc.v1.Worker/SetRole"} <= set(METHODS)
    assert len(services()) >= 10


@pytest.fixture
def keys(tmp_path: Path) -> Authenticator:
    add_key(tmp_path / "keys.json", "acme", now=0.0)
    return Authenticator(tmp_path / "keys.json", now=lambda: 0.0)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer dpk-000000000000-" + "A" * 43, "Basic YTpi"])
async def test_every_route_of_http(keys: Authenticator, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    api = FakeRouterApi(hello_script())
    async with (
        api_servers(api, status=lambda tenant: {}, keys=keys) as at,
        httpx.AsyncClient(base_url=f"http://{at.http}", timeout=WAIT_S, headers=headers) as client,
    ):
        for path in sorted(paths()):
            for method in HTTP_METHODS:
                answer = await client.request(method, path)
                if path in OPEN:
                    assert answer.status_code in (200, 405), (method, path)
                    continue
                assert answer.status_code == 401, (method, path, answer.status_code)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["type"] == "authentication_error"
    assert not api.specs


async def test_no_spelling_gets_around_it(keys: Authenticator) -> None:
    """Only what is spelled exactly as an open path is open, and then it is answered by that path."""
    api = FakeRouterApi(hello_script())
    async with api_servers(api, status=lambda tenant: {}, keys=keys) as at:
        for path in sorted(paths() - OPEN):
            for spelling in SPELLINGS:
                target = spelling.format(path)
                assert await status_of(at.http, target) in (400, 401), target
    assert not api.specs


async def status_of(address: str, target: str) -> int:
    """Of a POST to exactly these bytes, which no client library would send."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
        writer.write(head.encode() + b"{}")
        line = await asyncio.wait_for(reader.readline(), WAIT_S)
        return int(line.split()[1])
    finally:
        writer.close()


async def test_every_method_of_the_routers_grpc(keys: Authenticator, tmp_path: Path) -> None:
    """Operators' calls need the cluster secret instead of a key: a key of a tenant is none, nor is a proof of other bytes."""
    api, moved = FakeRouterApi(hello_script()), []

    async def move(request_id: str, to: str) -> router_pb2.MoveResponse:
        moved.append(request_id)
        return router_pb2.MoveResponse()

    servers = ApiServers("127.0.0.1", 0, 0, keys=keys, reflection=True, operator_key=operator_key(b"s" * 32))
    at = await servers.start(api, api.metrics, move_request=move)
    key, _ = add_key(tmp_path / "other.json", "acme", now=0.0)
    ask = router_pb2.MoveRequest(request_id="r").SerializeToString()
    wrong: list[tuple[tuple[str, str], ...]] = [
        (),
        (("authorization", "Bearer x"),),
        (("authorization", f"Bearer {key}"),),
    ]
    proofs = [proof_of(operator_key(b"x" * 32), "Move", ask), proof_of(operator_key(b"s" * 32), "Move", b""), ""]
    wrong += [((METADATA, proof),) for proof in proofs]
    try:
        async with open_channel(at.grpc) as channel:
            for method in METHODS:
                for metadata in wrong:
                    code = await code_of(channel, method, metadata, [ask])
                    expected = grpc.StatusCode.UNAUTHENTICATED
                    if method == f"/{OPERATIONS}/NoSuchMethod":
                        expected = grpc.StatusCode.UNIMPLEMENTED
                    assert code is expected, (method, code)
            right = ((METADATA, proof_of(operator_key(b"s" * 32), "Move", ask)),)
            assert await code_of(channel, f"/{OPERATIONS}/Move", right, [ask]) is grpc.StatusCode.OK
    finally:
        await servers.stop(1.0)
    assert not api.specs
    assert moved == ["r"]


async def code_of(channel: Any, method: str, metadata: Any = (), messages: Iterable[bytes] = ()) -> grpc.StatusCode:
    """Of a call that sends these. A client that writes to a call just refused may tell INTERNAL of itself: asked once more."""
    found = await _code_of(channel, method, metadata, messages)
    return found if found is not grpc.StatusCode.INTERNAL else await _code_of(channel, method, metadata, messages)


async def _code_of(channel: Any, method: str, metadata: Any, messages: Iterable[bytes]) -> grpc.StatusCode:
    call = channel.stream_stream(method)(metadata=metadata, timeout=WAIT_S)
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    found: grpc.StatusCode = await call.code()
    return found


async def test_every_method_of_every_worker(pd: ModuleType) -> None:
    """With no token, another cluster's, and another worker's; only health is open."""
    async with pd.cluster(decode_config={"client_port": 0}) as cluster:
        for worker in cluster.workers:
            others = [one.address for one in cluster.workers if one is not worker]
            wrong = [(), ((HEADER, call_token(call_key(b"x" * 32), worker.address)),)]
            wrong += [((HEADER, call_token(pd.CALL_KEY, address)),) for address in others]
            async with open_channel(worker.address) as channel:
                for method in METHODS:
                    for metadata in wrong if not method.startswith(HEALTH) else ():
                        code = await code_of(channel, method, metadata)
                        assert code is grpc.StatusCode.UNAUTHENTICATED, (worker.worker_id, method, code)
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert (await worker.audit(full=True)).attempts == {}
        decode = cluster.decode.role.services["decode"]
        async with open_channel(decode.client_address) as channel:
            for method in METHODS:
                if method != TICKETS and not method.startswith(HEALTH):
                    assert await code_of(channel, method) is grpc.StatusCode.UNIMPLEMENTED, method
            call = channel.stream_stream(TICKETS)(timeout=WAIT_S)
            await call.write(decode_pb2.TicketCommands(redeem=[decode_pb2.Redeem(attempt="a")]).SerializeToString())
            (event,) = decode_pb2.StepBatch.FromString(await call.read()).events
            assert event.end.failure.reason == "TICKET_REFUSED"
            call.cancel()


async def test_the_metrics_port_of_a_worker_shows_metrics_and_nothing_else(pd: ModuleType) -> None:
    """It is open, as docs/deploy.md says: what it shows is a list of series, whatever is asked for."""
    async with (
        pd.cluster(num_prefill=0, decode_config={"metrics_port": 0}) as cluster,
        httpx.AsyncClient(timeout=WAIT_S) as client,
    ):
        at = f"http://127.0.0.1:{cluster.decode.metrics_port}"
        for path in ("/metrics", "/", "/../etc/passwd", "/debug/pprof", "/status.json", "/metrics?name[]=x"):
            answer = await client.get(at + path)
            lines = answer.text.splitlines()
            assert answer.status_code in (200, 404)
            assert all(line.startswith(("# HELP ", "# TYPE ", "# EOF", "diptych_")) for line in lines), path
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.request(method, f"{at}/metrics", content=b"x")).status_code in (200, 405, 501)
