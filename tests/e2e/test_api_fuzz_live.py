"""Random valid and invalid requests to the real cluster: every answer is typed, no worker dies, nothing is leaked.

FUZZ_EXAMPLES=1000 makes it (and tests/integration/api/test_api_fuzz.py) longer, and random.
"""

from __future__ import annotations

import os
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.rpc.v1 import router_pb2, router_pb2_grpc, types_pb2

pytestmark = pytest.mark.multiproc

WAIT_S = 300.0
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SOME = settings(
    max_examples=EXAMPLES or 8,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck),
    database=None,
)
MORE = settings(SOME, max_examples=EXAMPLES or 60)
"""With -m slow."""
RUNS = pytest.mark.parametrize(
    "run", [pytest.param(SOME, id="some"), pytest.param(MORE, id="more", marks=pytest.mark.slow)]
)
TEXT = st.text(max_size=6) | st.sampled_from(["<|im_end|>", "\U0001f469\u200d\U0001f680", "\u202e", "\x00", "空"])
EDGES = st.sampled_from(
    [0, 1, -1, 2, 16, 17, 20, 21, 49_151, 49_152, 2**31, 2**63, 2**64, 1e308, 0.5, 1e-9, True, None]
)
SMALL = st.integers(-2, 3) | EDGES
REAL = st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 2) | EDGES
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": REAL, "top_p": REAL, "min_p": REAL, "presence_penalty": REAL, "repetition_penalty": REAL,
    "top_k": SMALL, "seed": SMALL, "n": SMALL, "best_of": SMALL, "logprobs": SMALL, "prompt_logprobs": SMALL,
    "min_tokens": SMALL, "max_tokens": st.integers(1, 3), "beam_width": SMALL, "truncate_prompt_tokens": SMALL,
    "stop": st.lists(TEXT, max_size=3), "stop_token_ids": st.lists(SMALL, max_size=3), "bad_words": st.lists(TEXT, max_size=2),
    "allowed_token_ids": st.lists(SMALL, max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 50_000).map(str), REAL, max_size=3),
    "guided_regex": st.text("ab()[]*+?{}|\\^", max_size=6), "guided_choice": st.lists(TEXT, max_size=3),
    "guided_grammar": st.text('root:= "ab|', max_size=12), "echo": st.booleans(), "stream": st.booleans(),
    "ignore_eos": st.booleans(), "use_beam_search": st.booleans(), "cache_salt": TEXT, "local_prefill_max_tokens": SMALL,
    "failure_policy": st.sampled_from(["fail", "recompute", "retry", "pray"]), "return_token_ids": st.booleans(),
}  # fmt: skip
PROMPTS = TEXT | st.lists(SMALL, min_size=1, max_size=40) | st.lists(TEXT, min_size=1, max_size=3)
BODIES = st.builds(
    lambda prompt, fields: {"max_tokens": 2, "prompt": prompt} | fields,
    PROMPTS,
    st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
)


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 7).flatmap(lambda i: odd if i == 7 else usual)


UNSIGNED = mostly(st.integers(0, 20), st.integers(0, 2**32 - 1))
REQUESTS = st.builds(
    router_pb2.GenerateRequest,
    prompt=mostly(st.just("Once upon"), TEXT),
    local_prefill_max_tokens=st.none() | st.integers(0, 100),
    failure_policy=mostly(st.integers(0, 3), st.integers(4, 9)),
    sampling=st.builds(
        types_pb2.SamplingParams,
        max_tokens=mostly(st.integers(1, 3), st.integers(-1, 2**60)),
        temperature=mostly(st.none() | st.floats(0, 2), st.floats()),
        top_p=mostly(st.none() | st.floats(0.1, 1), st.floats()),
        top_k=mostly(st.none() | st.integers(0, 50), st.integers(-2, 2**31 - 1)),
        n=mostly(st.none() | st.integers(1, 3), st.integers(0, 99)),
        logprobs=mostly(st.none() | st.integers(0, 5), UNSIGNED),
        prompt_logprobs=mostly(st.none(), UNSIGNED),
        min_tokens=mostly(st.none(), st.integers(0, 4)),
        stop=mostly(st.lists(st.text(min_size=1, max_size=3), max_size=2), st.lists(TEXT, max_size=20)),
        stop_token_ids=st.lists(UNSIGNED, max_size=3),
        logit_bias=mostly(
            st.dictionaries(st.integers(0, 49_000), st.floats(-100, 100), max_size=3), st.just({2**31: 1.0})
        ),
        grammar=mostly(
            st.none(), st.builds(types_pb2.Grammar, kind=st.integers(0, 7), source=st.text('{}"[]a:,', max_size=8))
        ),
    ),
)


@pytest.fixture
def nothing_dies(cluster):
    pids = {child.name: child.pid for child in cluster.state.children}
    yield
    assert {child.name: child.pid for child in cluster.state.children} == pids
    cluster.wait_idle()
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=WAIT_S)
    assert "Paris" in answer.json()["choices"][0]["text"]


@RUNS
def test_bodies(cluster, nothing_dies, run) -> None:
    statuses: list[int] = []
    with httpx.Client(base_url=cluster.http_url, timeout=WAIT_S) as client:

        @run
        @given(body=BODIES)
        def check(body: dict[str, Any]) -> None:
            answer = client.post("/v1/completions", json=body)
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400), (body, answer.text)
            assert '"error"' not in answer.text or answer.status_code == 400, (body, answer.text)

        check()
    assert set(statuses) == {200, 400}


@RUNS
def test_messages(cluster, nothing_dies, run) -> None:
    codes: list[grpc.StatusCode] = []
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)

        @run
        @given(request_=REQUESTS)
        def check(request_: router_pb2.GenerateRequest) -> None:
            try:
                codes.append(
                    grpc.StatusCode.OK if list(stub.Generate(request_, timeout=WAIT_S)) else grpc.StatusCode.UNKNOWN
                )
            except grpc.RpcError as error:
                codes.append(error.code())
            assert codes[-1] in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (request_, codes[-1])

        check()
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
