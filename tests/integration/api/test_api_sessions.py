"""Sessions and hints over HTTP and with both SDK clients, on real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from diptych.client import AsyncClient, Client, ClosedSession
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych_tests.http_api import WAIT_S, api_servers, http

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_a_session_is_closed_by_delete() -> None:
    router_api = FakeRouterApi([])
    async with http(router_api) as client:
        answer = await client.delete("/v1/sessions/chat%2F1%20%C3%A9")
        assert answer.status_code == 200
        assert answer.json() == {
            "id": "chat/1 é", "object": "session", "closed": False, "freed_tokens": 32, "unreached": ["decode-1"],
        }  # fmt: skip
        assert router_api.closed == [("", "chat/1 é")]
        for escaped, name in (("a%0Ab", "a\nb"), ("a%0A", "a\n")):
            assert (await client.delete(f"/v1/sessions/{escaped}")).json()["id"] == name, "a body may name it"
        assert router_api.closed[-2:] == [("", "a\nb"), ("", "a\n")]
        refused = await client.delete("/v1/sessions/" + "x" * 513)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
        wrong = await client.post("/v1/sessions/chat", json={})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "DELETE")
        assert (await client.delete("/v1/models")).status_code == 405


async def test_a_tenant_closes_its_own_session(tmp_path: Path) -> None:
    keys = {tenant: add_key(tmp_path / "keys.json", tenant, now=0.0, max_cache_ttl_s=60)[0] for tenant in ("a", "b")}
    router_api = FakeRouterApi([])
    authenticator = Authenticator(tmp_path / "keys.json", now=lambda: 0.0)
    assert (authenticator.cache_ttl("a"), authenticator.cache_ttl("c")) == (60.0, 0.0)
    async with (
        api_servers(router_api, keys=authenticator) as at,
        httpx.AsyncClient(base_url=f"http://{at.http}", timeout=WAIT_S) as client,
    ):
        assert (await client.delete("/v1/sessions/s")).status_code == 401
        for tenant, key in keys.items():
            answer = await client.delete("/v1/sessions/s", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            assert router_api.closed[-1] == (tenant, "s")
        async with AsyncClient(at.grpc, api_key=keys["b"]) as sdk:
            assert await sdk.close_session("t") == ClosedSession(32, ("decode-1",))
    assert router_api.closed[-1] == ("b", "t")


async def test_a_hint_may_be_the_next_requests_body() -> None:
    router_api = FakeRouterApi(hello_script())
    more = {"prefetch": True, "session_id": "s", "temperature": 0.5}
    async with http(router_api) as client:
        for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
            answer = await client.post(path, json=body | more)
            assert answer.status_code == 200
            assert "x-diptych-warning" not in answer.headers
            assert (router_api.specs[-1].prefetch, router_api.specs[-1].session_id) == (True, "s")


async def test_the_synchronous_clients_session() -> None:
    router_api = FakeRouterApi(hello_script())

    def work(address: str) -> str:
        with Client(address, timeout_s=WAIT_S) as client, client.session(cache_ttl_s=9.0, cache_priority=7) as session:
            session.prefetch(prompt="a", max_tokens=4)
            session.generate(prompt="a", cache_ttl_s=5.0)
            with session.stream(prompt="a") as stream:
                list(stream)
            return session.id

    async with api_servers(router_api) as at:
        name = await asyncio.to_thread(work, at.grpc)
    asked = [(spec.session_id, spec.prefetch, spec.cache_ttl_s, spec.cache_priority) for spec in router_api.specs]
    assert asked == [(name, True, 9.0, 7), (name, False, 5.0, 7), (name, False, 9.0, 7)]
    assert router_api.closed == [("", name)]
    assert len(name) == 32
