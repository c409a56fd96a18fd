"""A client that leaves in the middle of its body is no fault of the server's: nothing is raised, nothing is logged as one."""

import pytest

from diptych.common.observe.metrics import Metrics
from diptych.router.api.fake import FakeRouterApi
from diptych.router.api.http.app import create_app


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_half_a_body_and_then_gone(path):
    router_api = FakeRouterApi(())
    app = create_app(router_api, Metrics())
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [(b"content-length", b"200")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    messages = [{"type": "http.request", "body": b'{"messages": [', "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 499
