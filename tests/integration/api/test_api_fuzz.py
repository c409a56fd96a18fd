"""Bodies that a schema allows and bytes that no schema allows: every answer is typed, none is a 500, none hangs.

FUZZ_EXAMPLES=1000 makes it longer, and random.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.requests.messages import ModelFeatures
from diptych.router.server import ApiServers
from diptych.rpc.v1 import router_pb2, types_pb2
from diptych_tests import waiting

WAIT_S = 60.0
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
FEW = settings(
    max_examples=EXAMPLES or 25,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck),
    database=None,
)
ALLOWED = {200, 400, 404, 405, 408, 413, 431}


class Router:
    """ApiServers on a loop of their own, for tests that are not async."""

    def __init__(self) -> None:
        self.router_api = FakeRouterApi(hello_script())
        self.router_api.model_features = ModelFeatures("hermes", reasoning=True, takes_tools=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router under test")
        self._thread.start()
        self._servers, self.addresses = self._call(self._start())

    async def _start(self) -> Any:
        servers = ApiServers("127.0.0.1", 0, 0)
        return servers, await servers.start(self.router_api, self.router_api.metrics)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def nothing_runs(self) -> None:
        """An answer's end is sent before its request is."""
        waiting.wait_until(lambda: self.router_api.running == 0, what="no request runs")

    def close(self) -> None:
        self._call(self._servers.stop(1.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    running = Router()
    yield running
    running.close()


@pytest.fixture(scope="module")
def operations(router: Router) -> list[Any]:
    import schemathesis  # two seconds, which no other test needs

    url = f"http://{router.addresses.http}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", wait_for_schema=WAIT_S)
    return [result.ok() for result in schema.get_all_operations()]


def test_the_schema_lists_every_route(operations: list[Any]) -> None:
    paths = {operation.path for operation in operations}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"} <= paths
    assert {"/v1/models", "/health", "/live", "/ready", "/metrics", "/version"} <= paths


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/models/{name}"]


@pytest.mark.parametrize("path", PATHS)
def test_what_the_schema_allows(router: Router, operations: list[Any], path: str) -> None:
    found = [operation for operation in operations if operation.path.replace(":path", "") == path]
    assert found, sorted(operation.path for operation in operations)

    @FEW
    @given(case=found[0].as_strategy())
    def check(case: Any) -> None:
        answer = case.call(timeout=WAIT_S)
        assert answer.status_code in ALLOWED, (case.body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    check()
    router.nothing_runs()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "input", "tools", "tool_choice", "stop", "n", "seed", "logit_bias", "stream_options", "text"]
    + ["chat_template_kwargs", "bad_words", "top_logprobs", "logprobs", "min_tokens", "max_tokens", "response_format"]
    + ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "parallel_tool_calls"]
)
SCHEMAS = st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["object", "integer", "nothing"]) | JSON, "$ref": st.text(max_size=4), "enum": JSON,
    "properties": st.dictionaries(st.text(max_size=4), JSON, max_size=2), "pattern": st.text(max_size=6),
})  # fmt: skip
FORMATS = st.sampled_from(["text", "json_object", "json_schema", "xml"]) | JSON
SHAPED = st.one_of(
    st.fixed_dictionaries(
        {
            "response_format": st.fixed_dictionaries(
                {"type": FORMATS, "json_schema": st.fixed_dictionaries({"schema": SCHEMAS})}
            )
        }
    ),
    st.fixed_dictionaries(
        {"text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": FORMATS, "schema": SCHEMAS})})}
    ),
    st.fixed_dictionaries(
        {"structured_outputs": st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar"]), JSON | SCHEMAS)}
    ),
    st.fixed_dictionaries({"guided_json": SCHEMAS}),
    st.fixed_dictionaries(
        {
            "tools": st.lists(
                st.fixed_dictionaries(
                    {"type": st.just("function"), "name": st.just("f")},
                    optional={"function": st.fixed_dictionaries({"name": st.text(max_size=3), "parameters": SCHEMAS})},
                ),
                max_size=2,
            ),
            "tool_choice": st.sampled_from(["none", "auto", "required"]) | JSON,
        }
    ),
)


@pytest.mark.parametrize("path", PATHS[:5])
def test_what_no_schema_allows(router: Router, path: str) -> None:
    import httpx

    base: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "tokens": [1]}
    with httpx.Client(base_url=f"http://{router.addresses.http}", timeout=WAIT_S) as client:

        @FEW
        @given(fields=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3) | SHAPED)
        def check(fields: dict[str, Any]) -> None:
            import json

            answer = client.post(path, content=json.dumps(base | fields).encode())
            assert answer.status_code in ALLOWED, (fields, answer.text)

        check()


def call_generate(address: str, body: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_stream("/diptych.rpc.v1.Router/Generate")
        try:
            for _ in method(body, timeout=WAIT_S):
                pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


TYPED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
U32, F64 = st.integers(0, 2**32 - 1), st.floats()
SAMPLING = st.builds(
    types_pb2.SamplingParams,
    temperature=st.none() | F64,
    top_p=st.none() | F64,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(U32, max_size=3),
    stop=st.lists(st.text(max_size=4), max_size=3),
    min_p=st.none() | F64,
    repetition_penalty=st.none() | F64,
    presence_penalty=st.none() | F64,
    logit_bias=st.dictionaries(U32, F64, max_size=3),
    bad_words=st.lists(st.text(max_size=4), max_size=2),
    n=st.none() | U32,
    best_of=st.none() | U32,
    beam_width=st.none() | U32,
    length_penalty=st.none() | F64,
    early_stopping=st.integers(0, 4),
    logprobs=st.none() | U32,
    prompt_logprobs=st.none() | U32,
    min_tokens=st.none() | U32,
    grammar=st.none()
    | st.builds(
        types_pb2.Grammar,
        kind=st.integers(0, 7),
        source=st.text(max_size=8) | SCHEMAS.map(str) | st.sampled_from(['{"type": "object"}', '["a"]', "{}"]),
        free_until=st.text(max_size=2),
    ),
)
TEXT = st.text(max_size=4)
TOOLS = st.builds(
    router_pb2.Tool, name=st.just("f") | TEXT, parameters=st.sampled_from(["", "{}", "["]) | TEXT, strict=st.booleans()
)
CALLS = st.builds(router_pb2.ToolCall, id=TEXT, name=TEXT, arguments=st.just("{}") | TEXT)
MESSAGES = st.builds(
    router_pb2.ChatMessage,
    role=st.sampled_from(["user", "assistant", "tool", "x"]),
    content=TEXT,
    tool_calls=st.lists(CALLS, max_size=1),
    tool_call_id=TEXT,
)
REQUESTS = st.builds(
    router_pb2.GenerateRequest,
    model=st.sampled_from(["", "fake-model", "other"]),
    prompt=st.none() | st.text(max_size=8),
    sampling=st.none() | SAMPLING,
    request_id=st.text(max_size=8),
    explain=st.booleans(),
    failure_policy=st.integers(0, 5),
    chat=st.none() | st.builds(router_pb2.ChatInput, messages=st.lists(MESSAGES, max_size=2)),
    tools=st.lists(TOOLS, max_size=2),
    tool_choice=st.integers(0, 4),
    tool_name=st.sampled_from(["", "f"]),
    split=st.booleans(),
    idempotency_key=st.text(max_size=3),
    resume_after=st.none() | st.builds(router_pb2.TokenIdsInput, token_ids=st.lists(U32, max_size=3)),
)


@FEW
@given(request_=REQUESTS)
def test_messages_that_can_be_written(router: Router, request_: router_pb2.GenerateRequest) -> None:
    assert call_generate(router.addresses.grpc, request_.SerializeToString()) in TYPED


@FEW
@given(body=st.binary(max_size=64))
def test_bytes(router: Router, body: bytes) -> None:
    assert call_generate(router.addresses.grpc, body) in TYPED


def test_nothing_is_left_running(router: Router) -> None:
    router.nothing_runs()
