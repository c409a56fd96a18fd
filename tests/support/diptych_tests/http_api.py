"""The APIs on real sockets, over a scripted frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import openai

from diptych.router.api.fake import FakeRouterApi
from diptych.router.api.http.options import HttpOptions
from diptych.router.server import ApiServers, RouterAddresses

WAIT_S = 60.0

grpc.aio.init_grpc_aio()  # its poller thread runs as long as the process; it must not count as a leak of the first test


@asynccontextmanager
async def api_servers(router_api: Any, status: Any = None, **options: Any) -> AsyncIterator[RouterAddresses]:
    """Both APIs of a router whose frontend is `router_api`; `options`: of ApiServers."""
    servers = ApiServers("127.0.0.1", 0, 0, **options)
    try:
        yield await servers.start(router_api, router_api.metrics, status)
    finally:
        await servers.stop(1.0)


@asynccontextmanager
async def serving(router_api: FakeRouterApi, options: HttpOptions | None = None) -> AsyncIterator[str]:
    """The base URL of a router whose frontend is `router_api`."""
    async with api_servers(router_api, options=options) as at:
        yield f"http://{at.http}"


@asynccontextmanager
async def http(router_api: FakeRouterApi, options: HttpOptions | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(router_api, options) as url, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        yield client


@asynccontextmanager
async def openai_client(router_api: FakeRouterApi) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(router_api) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client


def events(text: str) -> list[str]:
    """The data of a stream's events."""
    return [part.removeprefix(": ping\n").removeprefix("data: ") for part in text.split("\n\n") if part]
