"""Structured output over the real cluster: answers match, alone and concurrently, whole and streamed, and other
requests are not affected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import pytest

pytestmark = pytest.mark.multiproc

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["big", "old", "空"]}, "maxItems": 2},
    },
    "required": ["city", "population", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a city that you like, in a few words."}]


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}


def is_json(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, dict)


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("schema", format_of(SCHEMA), lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    ("guided_json", {"guided_json": {"const": {"a": 1}}}, lambda text: json.loads(text) == {"a": 1}),
    ("llguidance", {"guided_json": {"allOf": [{"type": "integer"}, {"minimum": 5, "maximum": 7}]}},
     lambda text: 5 <= json.loads(text) <= 7),
    ("regex", {"guided_regex": r"[A-Z]{2}-[0-9]{3}"}, lambda text: re.fullmatch(r"[A-Z]{2}-[0-9]{3}", text)),
    ("choice", {"guided_choice": ["größer", "\U0001f600 ja", "nein"]},
     lambda text: text in ("größer", "\U0001f600 ja", "nein")),
    ("ebnf", {"structured_outputs": {"grammar": 'root ::= "<" [0-9] ("," [0-9])? ">"'}},
     lambda text: re.fullmatch(r"<\d(,\d)?>", text)),
]  # fmt: skip


@pytest.fixture(scope="module")
def http(cluster):
    with httpx.Client(base_url=cluster.http_url, timeout=300.0, headers={"x-diptych-explain": "1"}) as client:
        yield client


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(
        "/v1/chat/completions", json={"messages": ASK, "max_tokens": 64, "return_token_ids": True} | body
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, fields: dict[str, Any]) -> str:
    """The text of a greedy answer."""
    body = {"messages": ASK, "max_tokens": 64, "temperature": 0, "stream": True, "local_prefill_max_tokens": 0}
    with http.stream("POST", "/v1/chat/completions", json=body | fields) as answer:
        parts = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])


@pytest.fixture(scope="module")
def asked(http) -> Iterator[Callable[[str], list[Future[Any]]]]:
    """Of a case: whole answers, apart and together in turn, and a streamed text. All cases are asked at once: a step of
    several is hardly dearer than that of one."""
    futures: dict[str, list[Future[Any]]] = {}
    with ThreadPoolExecutor(12) as threads:
        for name, fields, _ in CASES:
            bodies = [
                fields | drawing | {"local_prefill_max_tokens": local}
                for drawing in ({"temperature": 0}, {"temperature": 1.0, "seed": 5, "n": 2})
                for local in (0, 4000)
            ]
            futures[name] = [threads.submit(ask, http, body) for body in bodies]
            futures[name].append(threads.submit(streamed, http, fields))
        yield futures.__getitem__


@pytest.mark.parametrize(("name", "fits"), [case[::2] for case in CASES], ids=[case[0] for case in CASES])
def test_answers_fit_apart_as_together(asked, name, fits) -> None:
    *whole, joined = [future.result() for future in asked(name)]
    for apart, together in zip(whole[::2], whole[1::2], strict=True):
        assert apart["diptych"]["local_prefill"] is False
        for one, other in zip(apart["choices"], together["choices"], strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["finish_reason"] == "stop", one
            assert fits(one["message"]["content"]), one
    assert fits(joined), joined


def test_min_tokens_and_ignore_eos_give_way_to_the_end_of_a_grammar(http) -> None:
    body = {"guided_choice": ["yes", "no"], "min_tokens": 20, "ignore_eos": True}
    choice = ask(http, body)["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format"),
    ({"guided_json": {"$ref": "#/$defs/nowhere"}}, "guided_json"),
    ({"guided_json": {"not": {"type": "integer"}}}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_grammar": 'root ::= "a" nowhere'}, "guided_grammar"),
    ({"structured_outputs": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}}, "structured_outputs"),
]


def test_what_cannot_be_compiled_is_a_400_that_names_the_field_and_harms_no_other(http, cluster) -> None:
    plain = {"temperature": 0, "max_tokens": 24}
    alone = ask(http, plain)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(4) as threads:
        neighbours = [threads.submit(ask, http, plain) for _ in range(2)]
        fitting = threads.submit(ask, http, plain | {"guided_regex": "[a-c]{30}"})
        for fields, param in BROKEN:
            for stream in (False, True):
                body = {"messages": ASK, "stream": stream} | fields
                answer = http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400, (fields, answer.text)
                assert answer.json()["error"]["param"] == param, answer.text
        assert all(one.result()["choices"][0]["token_ids"] == alone for one in neighbours)
        assert re.fullmatch("[a-c]+", fitting.result()["choices"][0]["message"]["content"])
    cluster.wait_idle()
