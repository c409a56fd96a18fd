"""Every field beside every other: disaggregated answers equal those of a colocated process, streams equal whole answers, and
the counters of all parties show that the prompts were computed on the prefill worker and that their KV crossed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import pytest

from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.multiproc

PROMPT = "Explain in one paragraph why the sky is blue, with an emoji like \U0001f30d and the word \u7a7a."
TIMEOUT_S = 300.0
AT_ONCE = 12
"""Requests to a server: a step of several is hardly dearer than that of one."""


@pytest.fixture(scope="module")
def http(cluster):
    with httpx.Client(base_url=cluster.http_url, timeout=TIMEOUT_S, headers={"x-diptych-explain": "1"}) as client:
        yield client


@pytest.fixture(scope="module")
def alone(colocated):
    with httpx.Client(base_url=colocated.http_url, timeout=TIMEOUT_S, headers={"x-diptych-explain": "1"}) as client:
        yield client


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool


def ask(http: httpx.Client, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(choices, whole body) of a chat answer, put together from chunks if it is streamed."""
    answer = http.post("/v1/chat/completions", json=body | {"local_prefill_max_tokens": 0})
    assert answer.status_code == 200, (body, answer.text)
    if not body.get("stream"):
        whole = answer.json()
        return [shown(choice, choice["message"]["content"]) for choice in whole["choices"]], whole
    parts = [part.split("data: ", 1)[1] for part in answer.text.split("\n\n") if part]
    assert parts[-1] == "[DONE]", parts[-1]
    chunks = [json.loads(part) for part in parts[:-1]]
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    ends: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for chunk in chunks:
        last = chunk if "diptych" in chunk else last
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            ids.setdefault(index, []).extend(choice.get("token_ids", ()))
            logprobs.setdefault(index, []).extend((choice.get("logprobs") or {"content": ()})["content"])
            if choice["finish_reason"] is not None:
                ends[index] = choice
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    wanted = (body.get("stream_options") or {}).get("include_usage")
    assert bool(usage) == bool(wanted)
    choices = []
    for index in sorted(texts):
        entry = {"content": logprobs[index]} if body.get("logprobs") else None
        choices.append(shown(ends[index] | {"token_ids": ids[index], "logprobs": entry}, texts[index]))
    return choices, last


def shown(choice: dict[str, Any], text: str) -> dict[str, Any]:
    entries = (choice["logprobs"] or {"content": None})["content"]
    return {
        "text": text,
        "ids": choice["token_ids"],
        "finish": (choice["finish_reason"], choice["stop_reason"]),
        "logprobs": entries and [(e["token"], e["bytes"], len(e["top_logprobs"]), e["logprob"]) for e in entries],
    }


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        first, second = one.pop("logprobs"), other.pop("logprobs")
        assert one == other
        assert (first is None) == (second is None)
        for x, y in zip(first or (), second or (), strict=True):
            assert x[:3] == y[:3]
            assert x[3] == pytest.approx(y[3], abs=1e-4)  # without a compiler: torch adds up by the shape of a step
        one["logprobs"], other["logprobs"] = first, second


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 8}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}

GRID = [
    {"stream": stream, **usage, **most, **least, **logprobs, **n, **stop, **form}
    for stream, usage, most, least, logprobs, n, stop, form in itertools.product(
        (False, True),
        ({}, {"stream_options": {"include_usage": True}}),
        ({"max_completion_tokens": 8}, {"max_tokens": 6}),
        ({}, {"min_tokens": 5}),
        ({}, {"logprobs": True, "top_logprobs": 2}),
        ({}, {"n": 2}),
        ({}, {"stop": ["the", "."]}),
        ({}, {"response_format": {"type": "json_object"}}, {"response_format": FORMAT}),
    )
    if stream or not usage
]


def pairs(fields: dict[str, Any]) -> set[Any]:
    """Every two fields with their values."""
    names = ("stream", "stream_options", "max_tokens", "min_tokens", "logprobs", "n", "stop", "response_format")
    return set(itertools.combinations([(name, json.dumps(fields.get(name))) for name in names], 2))


def cover(grid: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A part of the grid in which each pair of values of two fields stands: always the one with the most new pairs."""
    chosen, left = [], set().union(*map(pairs, grid))
    while left:
        chosen.append(max(grid, key=lambda fields: len(left & pairs(fields))))
        left -= pairs(chosen[-1])
    return chosen


FEW = cover(GRID)


def test_the_few_hold_every_pair_of_values() -> None:
    assert len(FEW) < len(GRID) / 20
    assert set().union(*map(pairs, FEW)) == set().union(*map(pairs, GRID))


def counters(cluster) -> dict[str, float]:
    """Counters of router and workers: where prompts are computed, and what is transferred."""
    found = {"sent": 0.0, "received": 0.0, "computed by prefill": 0.0, "computed by decode": 0.0}
    for name in cluster.workers():
        role = cluster.child(name).role
        audit = cluster.audit(name, full=False)
        found["sent"] += audit.kv_bytes_sent
        found["received"] += audit.kv_bytes_received
        with cluster.worker_channel(name) as channel:
            stats = worker_pb2_grpc.WorkerStub(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=300.0)
        found[f"computed by {role}"] += stats.engine["computed_tokens_total"]
    for line in httpx.get(f"{cluster.http_url}/metrics", timeout=TIMEOUT_S).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("diptych_kv_transfer_bytes_total", "diptych_prompt_tokens_")):
            found[name.partition("{")[0].removeprefix("diptych_")] = float(value)
    return found


@pytest.mark.parametrize("grid", [pytest.param(FEW, id="few"), pytest.param(GRID, id="all", marks=pytest.mark.slow)])
def test_the_grid(http, alone, cluster, threads, grid) -> None:
    # All chats begin alike. After this one both pools have that block, whichever tests used the cluster before: where only
    # decode has it, prefill computes a block more than the answer calls uncached.
    first = [{"role": "user", "content": f"{len(grid)}: {PROMPT}"}]
    ask(http, {"messages": first, "return_token_ids": True, "max_completion_tokens": 2})
    cluster.wait_idle()
    before, asked, moved = counters(cluster), 0, 0
    prompts = [[{"role": "user", "content": f"{len(grid)} {i}: {PROMPT}"}] for i in range(len(grid))]  # in no cache
    bodies = [
        {"messages": prompt, "seed": i, "return_token_ids": True, **fields}
        for i, (prompt, fields) in enumerate(zip(prompts, grid, strict=True))
    ]
    answers = [list(threads.map(lambda body, server=server: ask(server, body), bodies)) for server in (http, alone)]
    for fields, (apart, whole), (together, alike) in zip(grid, *answers, strict=True):
        same(apart, together)
        assert len(apart) == fields.get("n", 1)
        assert whole["diptych"]["local_prefill"] is False
        assert whole["diptych"]["kv_bytes"] > 0
        assert alike["diptych"]["local_prefill"] is True
        asked, moved = asked + 1, moved + whole["diptych"]["kv_bytes"]
        for choice in apart:
            if choice["finish"] == ("stop", None) and "response_format" in fields:
                value = json.loads(choice["text"])
                assert jsonschema_rs.is_valid(SCHEMA, value) or fields["response_format"] is not FORMAT
        if fields.get("min_tokens") and "response_format" not in fields:  # the end of a grammar takes precedence
            assert all(len(choice["ids"]) >= 5 for choice in apart)
    cluster.wait_idle()
    gained = {name: value - before[name] for name, value in counters(cluster).items()}
    assert gained["sent"] == gained["received"] == gained["kv_transfer_bytes_total"] == moved
    uncached = gained["prompt_tokens_total"] - gained["prompt_tokens_cached_total"]
    assert (gained["computed by prefill"], gained["computed by decode"]) == (uncached, 0)
    assert uncached >= 20 * asked  # each prompt's own tail
    # A stream is what a whole answer is.
    streams = [(body, apart) for body, (apart, _) in zip(bodies, answers[0], strict=True) if body["stream"]]
    plain = [{key: body[key] for key in body if key != "stream_options"} | {"stream": False} for body, _ in streams]
    for (_, apart), (whole, _) in zip(streams, threads.map(lambda body: ask(http, body), plain), strict=True):
        same(apart, whole)


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "min_p": 0.2, "seed": 4},
    {"temperature": 0, "logit_bias": {"28": -100, "260": 5}},
    {"temperature": 0.8, "allowed_token_ids": [28, 29, 30, 260, 253], "seed": 9},
    {"temperature": 0, "bad_words": ["sky", "blue", "the"]},
    {"temperature": 0, "stop": ["sky"], "include_stop_str_in_output": True},
    {"temperature": 1.0, "seed": 3, "n": 2, "best_of": 3},
    {"use_beam_search": True, "beam_width": 3, "n": 2, "length_penalty": 0.6, "logprobs": True},
    {"temperature": 0, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0, "max_completion_tokens": 1, "n": 2},
]


@pytest.fixture(scope="module")
def asked(http, alone, threads) -> Callable[[dict[str, Any]], list[Future[Any]]]:
    """The answers (of the cluster, of one process) to these fields, all of which are asked at once."""
    futures = []
    for fields in FIELDS:
        prompt = [{"role": "user", "content": f"{sorted(fields)} {PROMPT}"}]
        body = {"messages": prompt, "max_completion_tokens": 8, "return_token_ids": True} | fields
        futures.append([threads.submit(ask, server, body) for server in (http, alone)])
    return lambda fields: futures[FIELDS.index(fields)]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_fields_are_the_same_apart_and_together(asked, fields) -> None:
    (apart, whole), (together, _) = (future.result() for future in asked(fields))
    same(apart, together)
    assert whole["diptych"]["local_prefill"] is False
    text, ids = apart[0]["text"], apart[0]["ids"]
    if "allowed_token_ids" in fields:
        assert set(ids) <= set(fields["allowed_token_ids"])
    if "logit_bias" in fields:
        assert 28 not in ids
    if "bad_words" in fields:
        assert "sky" not in text
    if "include_stop_str_in_output" in fields and apart[0]["finish"][1] == "sky":
        assert text.endswith("sky")


def test_prompt_logprobs_and_echo(http, alone) -> None:
    body = {
        "prompt": "The sky is blue because of the air.",
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    answers = []
    for server in (http, alone):
        answer = server.post("/v1/completions", json=body | {"local_prefill_max_tokens": 0})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0])
    apart, together = answers
    assert apart["text"].startswith(body["prompt"])
    assert apart["text"] == together["text"]
    assert "".join(apart["logprobs"]["tokens"]) == apart["text"]
    assert apart["logprobs"]["tokens"] == together["logprobs"]["tokens"]
    first, *rest = apart["logprobs"]["token_logprobs"]
    assert first is None
    assert rest == pytest.approx(together["logprobs"]["token_logprobs"][1:], abs=1e-4)
