"""`diptych serve`: one process answers like a cluster does."""

from __future__ import annotations

import signal

import httpx
import pytest

from diptych.client import Client
from diptych_tests import golden_adapters

pytestmark = pytest.mark.multiproc


def test_one_process_serves_both_apis_and_adapters_and_ends_on_sigterm(cluster, colocated_to_end):
    serving = colocated_to_end
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    here, there = (
        httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=300.0).json()["choices"][0]
        for server in (serving, cluster)
    )
    assert here == there  # slots for adapters change nothing for the base model
    one, two, *_ = golden_adapters.names()
    answers = {}
    for name in (one, two, one):  # with one slot, in turns
        asked = httpx.post(f"{serving.http_url}/v1/completions", json={**body, "model": name}, timeout=300.0).json()
        tokens = tuple(asked["choices"][0]["token_ids"])
        assert answers.setdefault(name, tokens) == tokens
    assert len({*answers.values(), tuple(here["token_ids"])}) == 3
    series = httpx.get(serving.metrics_url, timeout=30.0).text
    assert f'diptych_lora_resident{{role="decode",worker="local"}} {len(golden_adapters.names())}.0' in series
    with Client(serving.grpc_address, timeout_s=300.0) as client:
        answer = client.generate(prompt=body["prompt"], max_tokens=8, temperature=0, explain=True)
        guided = client.generate(prompt="A or b?", choice=["größer", "no"], max_tokens=16)
    assert list(answer.token_ids) == here["token_ids"]
    assert guided.text in ("größer", "no")
    assert answer.explanation is not None
    assert answer.explanation.local_prefill
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(300) == 143, serving.log()
