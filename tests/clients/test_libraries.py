"""Issue 15: libraries of applications, unmodified. The cluster's counters match what they received."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.multiproc]

ANSWER = "The capital of France is Paris."


def test_openai(clients, cluster, counted) -> None:
    reported = clients.script("use_openai.py", f"{cluster.http_url}/v1", cluster.model)
    assert reported["models"] == [cluster.model]
    assert {reported["texts"][name] for name in ("chat", "stream", "response")} == {ANSWER}
    assert reported["texts"]["completion"].startswith("The capital of France is Paris")
    assert json.loads(reported["texts"]["formed"])["city"] in ("Paris", "Rome")
    assert len(reported["choices"]) == 3
    assert reported["requests"] == 10
    router, _, _ = counted(requests=reported["requests"], more_choices=2)
    assert router.total("generation_tokens_total") == reported["tokens"]
    assert router.total("prompt_tokens_total") == reported["prompt_tokens"]


@pytest.mark.parametrize("name", ["litellm", "langchain"])
def test_libraries_on_top_of_it(name, clients, cluster, counted) -> None:
    reported = clients.script(f"use_{name}.py", f"{cluster.http_url}/v1", cluster.model)
    assert reported["texts"]["chat"] == reported["texts"]["stream"] == ANSWER
    assert reported["texts"]["completion"].startswith(" Paris")
    router, _, _ = counted(requests=reported["requests"])
    assert router.total("generation_tokens_total") == reported["tokens"]
