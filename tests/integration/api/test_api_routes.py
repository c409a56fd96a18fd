"""Existing and missing routes, and CORS."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from diptych.common.errors import ConfigError
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.http.options import HttpOptions
from diptych.router.api.http.routes import add_index, routes_of
from diptych.router.config import RouterConfig
from diptych.router.observe.status_page import add_status
from diptych_tests.http_api import http

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://app.example:8443"


async def test_head_answers_as_get_without_a_body() -> None:
    async with http(FakeRouterApi([])) as client:
        for path in ("/live", "/health", "/ready", "/v1/models", "/metrics", "/version", "/openapi.json", "/", "/docs"):
            get, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            for name in ("content-type", "content-length"):
                assert head.headers[name] == get.headers[name], path
        assert (await client.head(CHAT)).status_code == 405
        assert (await client.head("/nowhere")).status_code == 404


async def test_a_slash_too_many_is_no_redirect() -> None:
    """It was one to the client's own Host header over http://, also behind a proxy that ends TLS."""
    async with http(FakeRouterApi([])) as client:
        for method, path, meant in (
            ("POST", f"{CHAT}/", CHAT), ("GET", "/live/", "/live"), ("DELETE", "/v1/sessions", "GET /"),
        ):  # fmt: skip
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers.get("location")) == (404, None)
            assert f"{method} {path}" in answer.json()["error"]["message"]
            assert meant in answer.json()["error"]["message"]


async def test_the_root_and_docs_say_where_things_are() -> None:
    async with http(FakeRouterApi([])) as client:
        for path in ("/", "/docs"):
            reported = (await client.get(path)).json()
            assert reported["openapi"] == "/openapi.json"
            assert {f"POST {CHAT}", "POST /v1/responses", "GET /v1/models", "GET /metrics"} <= set(reported["routes"])
            page = await client.get(path, headers={"accept": "text/html,*/*"})
            assert page.headers["content-type"].startswith("text/html")
            assert f"<code>{CHAT}</code>" in page.text
            assert "http://" not in page.text
            assert "https://" not in page.text


def test_the_index_names_the_status_page_without_its_parts() -> None:
    app = FastAPI()
    add_index(app, "1")
    add_status(app, lambda _: {}, "1")
    assert routes_of(app) == [("GET", "/status"), ("GET", "/status.json")]


async def test_cors_by_a_flag() -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with http(FakeRouterApi(hello_script())) as client:
        assert (await client.options(CHAT, headers=asks)).status_code == 405
        answer = await client.post(CHAT, json=ASK, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
    async with http(FakeRouterApi(hello_script()), HttpOptions(cors_origins=(PAGE,))) as client:
        may = await client.options(CHAT, headers=asks)
        assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "POST" in may.headers["access-control-allow-methods"]
        assert may.headers["access-control-allow-headers"] == "authorization"
        for stream in (False, True):
            answer = await client.post(CHAT, json=ASK | {"stream": stream}, headers={"origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        failed = await client.post(CHAT, json={}, headers={"origin": PAGE})
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (400, PAGE)
        other = {"origin": "https://evil.example"}
        assert (await client.options(CHAT, headers=asks | other)).status_code == 400
        assert "access-control-allow-origin" not in (await client.post(CHAT, json=ASK, headers=other)).headers
    async with http(FakeRouterApi(hello_script()), HttpOptions(cors_origins=("*",))) as client:
        answer = await client.post(CHAT, json=ASK, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cors_origins", ("app.example",)),
        ("cors_origins", ("https://app.example/",)),
        ("cors_origins", ("https://*.example",)),
        ("unknown_fields", "warn"),
        ("http_head_timeout_s", 0.0),
        ("http_idle_timeout_s", float("nan")),
    ],
)
def test_http_settings_that_cannot_be_used_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(model="m", **{field: value})
    assert field in str(caught.value)


MISSPELT = ASK | {"max_token": 5, "frobnicate": {"deep": [1]}, "line\nbreak": 1}


async def test_unknown_fields_are_named_in_a_header() -> None:
    async with http(FakeRouterApi(hello_script())) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, json=MISSPELT | {"stream": stream})
            assert answer.status_code == 200
            assert answer.headers["x-diptych-warning"] == (
                "unknown field 'max_token' is ignored (did you mean max_tokens?); "
                "unknown field 'frobnicate' is ignored; unknown field 'line\\nbreak' is ignored"
            )
        for path, body in (
            ("/v1/completions", {"prompt": "a", "temprature": 0}),
            ("/v1/responses", {"input": "a", "temprature": 0}),
            ("/tokenize", {"prompt": "a", "temprature": 0}),
            ("/detokenize", {"tokens": [], "temprature": 0}),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, "'temprature' is ignored" in answer.headers["x-diptych-warning"]) == (200, True)
        many = ASK | {f"{'x' * 100}{number}": 1 for number in range(100)}
        long = (await client.post(CHAT, json=many)).headers["x-diptych-warning"]
        assert 64 < len(long) <= 1024
        clean = await client.post(
            CHAT, json=ASK | {"user": "me", "store": True, "metadata": {}, "service_tier": "auto"}
        )
        assert "x-diptych-warning" not in clean.headers
    router_api = FakeRouterApi([], before_start=[ConfigError("a", "b", "c")])
    async with http(router_api) as client:
        failed = await client.post(CHAT, json=MISSPELT)
        assert failed.status_code >= 500
        assert "max_token" in failed.headers["x-diptych-warning"]


async def test_unknown_fields_are_refused_by_a_flag() -> None:
    router_api = FakeRouterApi(hello_script())
    async with http(router_api, HttpOptions(unknown_fields="refuse")) as client:
        for path, body in (
            (CHAT, ASK),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": []}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
            answer = await client.post(path, json=body | {"modell": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "modell")
            assert error["message"] == "there is no field 'modell' (did you mean model?)"
    assert router_api.prepared == 3


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "has no embeddings"),
        ("POST", "/v1/audio/speech", "has no speech and transcription"),
        ("POST", "/v1/audio/transcriptions", "has no speech"),
        ("POST", "/v1/images/generations", "has no images"),
        ("POST", "/v1/moderations", "has no moderations"),
        ("GET", "/v1/files", "has no files"),
        ("POST", "/v1/batches", "has no batches"),
        ("GET", "/v1/fine_tuning/jobs/ft-1/events", "has no fine-tuning"),
        ("POST", "/v1/assistants", "has no assistants"),
        ("POST", "/v1/threads/t/runs", "has no threads"),
        ("GET", "/v1/vector_stores", "has no vector stores"),
        ("POST", "/v1/messages", "has no Anthropic messages"),
        ("POST", "/v1/rerank", "has no reranking"),
        ("POST", "/rerank", "has no reranking"),
        ("GET", "/v1/responses/resp_1", "no responses are stored here"),
        ("POST", "/v1/responses/resp_1/cancel", "no responses are stored here"),
        ("GET", "/v1/chat/completions/c", "no chat completions are stored here"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/tokenize", "did you mean /tokenize?"),
        ("GET", "/v1", "did you mean /?"),
        ("GET", "/nowhere/" + "x" * 3000, "GET / lists the routes"),
    ],
)
async def test_routes_that_are_not_had_are_404_with_words(method: str, path: str, words: str) -> None:
    async with http(FakeRouterApi([])) as client:
        answer = await client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "unknown_url")
    assert error["message"].startswith(f"there is no {method} {path[:128]}")
    assert words in error["message"]
    assert len(error["message"]) < 400


async def test_a_method_that_a_route_does_not_take_is_405_with_words() -> None:
    async with http(FakeRouterApi([])) as client:
        for method, path, takes in (
            ("GET", CHAT, "POST"),
            ("DELETE", "/v1/models/m", "GET"),
            ("POST", "/v1/models", "GET"),
            ("PUT", "/v1/responses", "POST"),
            ("POST", "/", "GET"),
        ):
            answer = await client.request(method, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (405, "invalid_request_error")
            assert error["message"] == f"{path} takes {takes}, not {method}"
            assert answer.headers["allow"] == takes
