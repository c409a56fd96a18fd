"""Bad input is refused at the edge, names the parameter, and never reaches an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from diptych.rpc.v1 import router_pb2, types_pb2

pytestmark = pytest.mark.multiproc

HI = [{"role": "user", "content": "Hi"}]
CHAT: list[tuple[str, object, int, str | None]] = [
    ("unknown-model", {"model": "nobody", "messages": HI}, 404, "model"),
    ("no-messages", {}, 400, "messages"),
    ("empty-messages", {"messages": []}, 400, "messages"),
    ("messages-wrong-type", {"messages": "Hi"}, 400, "messages"),
    ("temperature-text", {"messages": HI, "temperature": "hot"}, 400, "temperature"),
    ("temperature-high", {"messages": HI, "temperature": 2.5}, 400, "temperature"),
    ("top-p-zero", {"messages": HI, "top_p": 0}, 400, "top_p"),
    ("max-tokens-negative", {"messages": HI, "max_tokens": -1}, 400, "max_tokens"),
    ("max-tokens-text", {"messages": HI, "max_tokens": "ten"}, 400, "max_tokens"),
    ("seed-text", {"messages": HI, "seed": "x"}, 400, "seed"),
    (
        "no-tools-in-this-template",
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "tools",
    ),
    ("too-many-choices", {"messages": HI, "n": 17}, 400, "n"),
    ("broken-schema", {"messages": HI, "guided_json": {"type": "nothing"}}, 400, "guided_json"),
    ("stream-wrong-type", {"messages": HI, "stream": "maybe"}, 400, "stream"),
]
COMPLETIONS: list[tuple[str, object, int, str | None]] = [
    ("empty-prompt", {"prompt": ""}, 400, "prompt"),
    ("empty-ids", {"prompt": []}, 400, "prompt"),
    ("id-too-large", {"prompt": [10**6]}, 400, "prompt"),
    ("id-negative", {"prompt": [-1]}, 400, "prompt"),
    ("too-long", {"prompt": [1000] * 9000}, 400, "prompt"),
    ("prompt-wrong-type", {"prompt": {"a": 1}}, 400, "prompt"),
]
RAW: list[tuple[str, bytes, str | None]] = [
    ("nan-temperature", b'{"prompt": "Hi", "temperature": NaN}', None),
    ("infinity", b'{"prompt": "Hi", "temperature": Infinity}', None),
    ("huge-number", b'{"prompt": "Hi", "temperature": 1e999}', "temperature"),
    ("invalid-utf8", b'{"prompt": "\xff\xfe"}', None),
    ("lone-surrogate", b'{"prompt": "\\ud800"}', "prompt"),
    ("no-json", b"prompt=Hi", None),
    ("list", b"[1, 2]", None),
    ("empty", b"", None),
]


@pytest.fixture(autouse=True)
def nothing_reaches_the_engines(cluster) -> Iterator[None]:
    cluster.wait_idle()
    before = cluster.steps()
    yield
    assert cluster.steps() == before
    cluster.wait_idle()


def check_error(response: httpx.Response, status: int, param: str | None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] is not None, error
        assert error["param"].split("[")[0].split(".")[0] == param, error
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(("body", "status", "param"), [pytest.param(*case[1:], id=case[0]) for case in CHAT])
def test_chat(cluster, body, status, param):
    check_error(httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body, timeout=300.0), status, param)


@pytest.mark.parametrize(("body", "status", "param"), [pytest.param(*case[1:], id=case[0]) for case in COMPLETIONS])
def test_completions(cluster, body, status, param):
    check_error(httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=300.0), status, param)


@pytest.mark.parametrize(("content", "param"), [pytest.param(*case[1:], id=case[0]) for case in RAW])
def test_raw_bodies(cluster, content, param):
    headers = {"content-type": "application/json"}
    check_error(
        httpx.post(f"{cluster.http_url}/v1/completions", content=content, headers=headers, timeout=300.0), 400, param
    )


def rpc(**sampling: object) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(prompt="Hi", sampling=types_pb2.SamplingParams(**sampling))


GRPC = [
    ("unknown-model", router_pb2.GenerateRequest(model="nobody", prompt="Hi"), grpc.StatusCode.NOT_FOUND, "model"),
    ("no-input", router_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, None),
    ("empty-prompt", router_pb2.GenerateRequest(prompt=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ("nan-temperature", rpc(temperature=math.nan), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ("inf-temperature", rpc(temperature=math.inf), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ("negative-max-tokens", rpc(max_tokens=-1), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ("zero-max-tokens", rpc(max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ("top-p", rpc(top_p=1.5), grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
    ("top-k", rpc(top_k=-7), grpc.StatusCode.INVALID_ARGUMENT, "top_k"),
    (
        "too-long",
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIdsInput(token_ids=[1000] * 9000)),
        grpc.StatusCode.INVALID_ARGUMENT,
        None,
    ),
    (
        "id-too-large",
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIdsInput(token_ids=[10**6])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "token_ids",
    ),
    ("undecodable", b"\xff\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "request body"),
    ("invalid-utf8", b"\x12\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT, "request body"),
]


@pytest.mark.parametrize(("request_", "code", "param"), [pytest.param(*case[1:], id=case[0]) for case in GRPC])
def test_grpc(cluster, request_, code, param):
    raw = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = channel.unary_stream("/diptych.rpc.v1.Router/Generate")  # bytes in, bytes out
        with pytest.raises(grpc.RpcError) as failure:
            list(call(raw, timeout=120))
    assert failure.value.code() == code, failure.value.details()
    status = rpc_status.from_call(failure.value)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.domain == "diptych"
    if param is not None:
        bad = error_details_pb2.BadRequest()
        fields = [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations]
        assert param in [*fields, info.metadata.get("param")] or param in failure.value.details()
