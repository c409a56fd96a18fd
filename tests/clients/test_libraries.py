"""Issue 15: libraries of applications, unmodified. The cluster's counters match what they received."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.multiproc]

ANSWER = "The capital of France is Paris."


def test_openai(clients, cluster, counted) -> None:
    told = clients.script("use_openai.py", f"{cluster.http_url}/v1", cluster.model)
    assert told["models"] == [cluster.model]
    assert {told["texts"][name] for name in ("chat", "stream", "response")} == {ANSWER}
    assert told["texts"]["completion"].startswith("The capital of France is Paris")
    assert json.loads(told["texts"]["formed"])["city"] in ("Paris", "Rome")
    assert len(told["choices"]) == 3
    assert told["requests"] == 10
    router, _, _ = counted(requests=told["requests"], more_choices=2)
    assert router.total("generation_tokens_total") == told["tokens"]
    assert router.total("prompt_tokens_total") == told["prompt_tokens"]


@pytest.mark.parametrize("name", ["litellm", "langchain"])
def test_libraries_on_top_of_it(name, clients, cluster, counted) -> None:
    told = clients.script(f"use_{name}.py", f"{cluster.http_url}/v1", cluster.model)
    assert told["texts"]["chat"] == told["texts"]["stream"] == ANSWER
    assert told["texts"]["completion"].startswith(" Paris")
    router, _, _ = counted(requests=told["requests"])
    assert router.total("generation_tokens_total") == told["tokens"]
