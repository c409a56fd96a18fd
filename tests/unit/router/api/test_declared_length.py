"""A body with too large a declared length is rejected before it is read, for any number of digits."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.common.observe.metrics import Metrics
from diptych.router.api.fake import FakeRouterApi
from diptych.router.api.http.app import create_app


async def status_of(length: bytes) -> int:
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "headers": [(b"content-length", length), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"{}", "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await create_app(FakeRouterApi(()), Metrics())(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize("length", [b"99999999999", b"9" * 19, b"9" * 20, b"0" * 30 + b"9" * 11, b"9" * 4000])
async def test_too_large_whatever_the_digits(length: bytes) -> None:
    assert await status_of(length) == 413


@pytest.mark.parametrize("length", [b"2", b"0" * 25 + b"2"])
async def test_leading_zeros_make_nothing_large(length: bytes) -> None:
    assert await status_of(length) == 400  # the body {} has no prompt
