"""`diptych serve`: one process answers like a cluster does."""

from __future__ import annotations

import signal

import httpx
import pytest

from diptych.client import Client

pytestmark = pytest.mark.multiproc


def test_one_process_serves_both_apis_and_ends_on_sigterm(cluster, cluster_module, tmp_path):
    with cluster_module.running_serve(tmp_path, "--num-blocks", "64", "--max-model-len", "512") as serving:
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        here, there = (
            httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=300.0).json()["choices"][0]
            for server in (serving, cluster)
        )
        assert here == there
        with Client(serving.grpc_address, timeout_s=300.0) as client:
            answer = client.generate(prompt=body["prompt"], max_tokens=8, temperature=0, explain=True)
            guided = client.generate(prompt="A or b?", choice=["größer", "no"], max_tokens=16)
        assert list(answer.token_ids) == here["token_ids"]
        assert guided.text in ("größer", "no")
        assert answer.explanation is not None
        assert answer.explanation.local_prefill
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(300) == 143, serving.log()
