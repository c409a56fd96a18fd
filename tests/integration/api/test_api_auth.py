"""Keys, quotas, TLS and header limits on real servers."""

# ruff: noqa: SIM117 - server, client and request read better one under the other

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import trustme
from starlette.routing import Route

from diptych.client import AsyncClient, AuthenticationError, QuotaExceededError, Tls
from diptych.common.errors import ConfigError
from diptych.common.tls import load_server_tls
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key, public_id, revoke_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.http.app import create_app
from diptych.rpc.channels import open_channel
from diptych_tests.http_api import api_servers

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
WAIT_S = 60.0

grpc.aio.init_grpc_aio()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def serving(router_api: FakeRouterApi, **options: Any) -> AsyncIterator[tuple[str, str]]:
    async with api_servers(router_api, **options) as addresses:
        yield addresses.http, addresses.grpc


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def test_metrics_and_readiness_are_open_where_that_was_said(file: Path) -> None:
    add_key(file, "acme", now=0.0)
    async with serving(FakeRouterApi(hello_script()), keys=Authenticator(file, now=Clock()), open_metrics=True) as (
        address,
        _,
    ):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as client:
            paths = ("/metrics", "/ready", "/metrics/", "/v1/models", "/status.json")
            assert [(await client.get(path)).status_code for path in paths] == [200, 200, 401, 401, 401]


async def test_every_route_but_liveness_needs_a_key(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0)
    router_api = FakeRouterApi(hello_script())
    routes = [route for route in create_app(router_api, router_api.metrics).routes if isinstance(route, Route)]
    paths = sorted({route.path for route in routes})
    assert {CHAT, "/metrics", "/ready", "/openapi.json", "/v1/models"} <= set(paths)
    odd = ["/nowhere", "//live", "/live/", "/LIVE", "/live%2f..%2fmetrics", "/health/../metrics", "/live?x=/metrics/"]
    async with serving(router_api, keys=Authenticator(file, now=Clock())) as (address, _):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as client:
            for path in [*paths, *odd]:
                for method in ("GET", "POST", "OPTIONS"):
                    answer = await client.request(method, path)
                    if path.split("?")[0] in ("/live", "/health"):
                        assert answer.status_code in (200, 405), (method, path)
                        continue
                    assert answer.status_code == 401, (method, path)
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.headers["x-request-id"]
            good = {"authorization": f"Bearer {key}"}
            assert (await client.post(CHAT, json=BODY, headers=good)).status_code == 200
            assert (await client.get("/nowhere", headers=good)).status_code == 404
            two = [("authorization", f"Bearer {key}"), ("authorization", "Bearer x")]
            assert (await client.get("/ready", headers=two)).status_code == 401
    assert [spec.tenant for spec in router_api.specs] == ["acme"]


async def test_the_openai_client_knows_the_error(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0)
    async with serving(FakeRouterApi(hello_script()), keys=Authenticator(file, now=Clock())) as (address, _):
        for api_key in (key, "wrong"):
            client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S)
            async with client:
                if api_key == key:
                    assert (await client.chat.completions.create(model="", messages=BODY["messages"])).choices
                    continue
                with pytest.raises(openai.AuthenticationError, match="not valid"):
                    await client.chat.completions.create(model="", messages=BODY["messages"])


async def test_every_grpc_method_needs_a_key(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0)
    router_api = FakeRouterApi(hello_script())
    names = ["/diptych.rpc.v1.Router/Generate", "/diptych.rpc.v1.Router/ListModels", "/grpc.health.v1.Health/Check"]
    names += ["/grpc.health.v1.Health/Watch", "/no.such.Service/Method", "/diptych.rpc.v1.Router/Nothing"]
    async with serving(router_api, keys=Authenticator(file, now=Clock())) as (_, address):
        async with open_channel(address) as channel:
            for name in names:
                call = channel.unary_stream(name)(b"", timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
                # a client that never sends its request is answered as well
                silent = channel.stream_stream(name)(timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await silent.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
        async with AsyncClient(address, api_key=key) as client:
            assert (await client.generate(prompt="a")).text == "Hello there"
            assert await client.list_models()
        for bad in ("", "wrong", "dpk-" + "0" * 12 + "-" + "A" * 43):
            async with AsyncClient(address, api_key=bad) as client:
                with pytest.raises(AuthenticationError):
                    await client.generate(prompt="a")
    assert [spec.tenant for spec in router_api.specs] == ["acme"]


async def test_concurrent_callers_keep_their_tenants_apart(file: Path) -> None:
    keys = {tenant: add_key(file, tenant, now=0.0)[0] for tenant in ("a", "b")}
    router_api = FakeRouterApi(hello_script())
    async with serving(router_api, keys=Authenticator(file, now=Clock())) as (http, address):

        async def by_grpc(tenant: str) -> None:
            async with AsyncClient(address, api_key=keys[tenant]) as client:
                await client.generate(prompt=tenant)

        async def by_http(tenant: str) -> None:
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            async with httpx.AsyncClient(base_url=f"http://{http}", timeout=WAIT_S) as client:
                await client.post("/v1/completions", json={"prompt": tenant}, headers=headers)

        await asyncio.gather(*(work(tenant) for tenant in "abab" for work in (by_grpc, by_http)))
    assert len(router_api.specs) == 8
    assert all(spec.tenant == spec.prompt for spec in router_api.specs)


async def test_a_revoked_key_stops_working_while_the_router_runs(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0)
    clock = Clock()
    async with serving(FakeRouterApi(hello_script()), keys=Authenticator(file, now=clock)) as (address, _):
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers, timeout=WAIT_S) as client:
            assert (await client.get("/v1/models")).status_code == 200
            revoke_key(file, public_id(key))
            clock.now_s = 1.0
            assert (await client.get("/v1/models")).status_code == 401


async def test_a_quota_is_429_on_both_apis(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0, tokens_per_minute=5)
    router_api = FakeRouterApi(hello_script())
    async with serving(router_api, keys=Authenticator(file, now=Clock())) as (address, grpc_address):
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers, timeout=WAIT_S) as client:
            first = await client.post(CHAT, json=BODY)
            assert first.status_code == 200
            assert first.headers["x-ratelimit-limit-tokens"] == "5"
            refused = await client.post(CHAT, json=BODY | {"stream": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
            assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
            assert int(refused.headers["retry-after"]) >= 1
        async with AsyncClient(grpc_address, api_key=key) as sdk:
            with pytest.raises(QuotaExceededError) as caught:
                await sdk.generate(prompt="a")
        assert caught.value.retry_after_s
    assert len(router_api.specs) == 1


async def test_requests_a_minute_are_a_quota_of_their_own(file: Path) -> None:
    """Whatever becomes of them: one that cannot be used counts, too."""
    key, _ = add_key(file, "acme", now=0.0, requests_per_minute=2)
    router_api = FakeRouterApi(hello_script())
    async with serving(router_api, keys=Authenticator(file, now=Clock())) as (address, grpc_address):
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers, timeout=WAIT_S) as client:
            first = await client.post(CHAT, json=BODY)
            assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) > 0
            assert "x-ratelimit-limit-tokens" not in first.headers
            assert (await client.post(CHAT, json=BODY | {"temperature": 9})).status_code == 400
            refused = await client.post(CHAT, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
            assert "2 requests a minute" in refused.json()["error"]["message"]
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        async with AsyncClient(grpc_address, api_key=key) as sdk:
            with pytest.raises(QuotaExceededError):
                await sdk.generate(prompt="a")


async def test_headers_over_the_cap_are_431() -> None:
    async with serving(FakeRouterApi(hello_script())) as (address, _):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as client:
            fits = await client.get("/live", headers={"x-a": "b" * 30_000})
            assert fits.status_code == 200
            over = await client.get("/live", headers={"x-a": "b" * 33_000})
            assert (over.status_code, over.json()["error"]["type"]) == (431, "invalid_request_error")
        host, port = address.rsplit(":", 1)
        for request in (b"GET /live HTTP/1.1\r\nHost: a\r\nX-A: " + b"b" * 70_000, b"GET /" + b"a" * 70_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"nonsense\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"error"' in answer
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("label", [b"caf\xe9", b"x" * 129, b"a\tb"])
async def test_a_label_that_is_no_label_is_400(label: bytes) -> None:
    async with serving(FakeRouterApi(hello_script())) as (address, _):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as client:
            answer = await client.post(CHAT, json=BODY, headers=[(b"x-request-id", label)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")


async def test_tls_on_both_apis(tmp_path: Path, file: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "router.test")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    for i, blob in enumerate(server.cert_chain_pems):
        blob.write_to_path(tmp_path / "cert.pem", append=i > 0)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    key, _ = add_key(file, "acme", now=0.0)
    tls = load_server_tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    keys = Authenticator(file, now=Clock())
    async with serving(FakeRouterApi(hello_script()), tls=tls, keys=keys) as (http, address):
        headers = {"authorization": f"Bearer {key}"}
        url = f"https://{http}"
        async with httpx.AsyncClient(base_url=url, verify=trust, headers=headers, timeout=WAIT_S) as client:
            streamed = await client.post(CHAT, json=BODY | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://{http}/live")
        ca_file = str(tmp_path / "ca.pem")
        for good in (Tls(ca_file), Tls(ca_file, server_name="router.test")):
            async with AsyncClient(address, api_key=key, tls=good) as sdk:
                assert (await sdk.generate(prompt="a")).text == "Hello there"


def test_a_certificate_needs_its_own_key(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("a.test").cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.issue_cert("b.test").private_key_pem.write_to_path(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="tls_cert"):
        load_server_tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="tls_key"):
        load_server_tls(tmp_path / "cert.pem", tmp_path / "none.pem")
