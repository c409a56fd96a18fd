"""Issue 15, 4.12: a cluster on a host that has nothing but IPv6."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from diptych.client import AsyncClient
from diptych_tests import waiting
from diptych_tests.machine import NEEDS_IPV6

pytestmark = [pytest.mark.multiproc, NEEDS_IPV6]

TICKETS = 'diptych_placement_tickets_total{outcome="finished"'
FORCED = {"local_prefill_max_tokens": 0}


def test_what_is_printed_can_be_used(detached_cluster, cluster_module) -> None:
    assert detached_cluster.http_url.startswith("http://[::1]:")
    assert detached_cluster.grpc_address.startswith("[::1]:")
    words = (detached_cluster.http_url, detached_cluster.grpc_address, "KV bytes over ucx")
    # The greeting is printed after the state that the fixture waits for.
    cluster_module.wait_until(
        lambda: all(word in detached_cluster.log() for word in words), what="the greeting is printed"
    )
    with OpenAI(base_url=f"{detached_cluster.http_url}/v1", api_key="none", max_retries=0, timeout=300.0) as client:
        answer = client.chat.completions.create(
            model=detached_cluster.model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
            extra_body=FORCED,
            extra_headers={"x-diptych-explain": "1"},
        )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.model_extra["diptych"]["kv_bytes"] > 0
    for child in detached_cluster.state.children:
        if child.metrics:
            assert child.metrics.startswith("[::1]:")
            assert "diptych_engine_steps_total" in httpx.get(f"http://{child.metrics}/metrics", timeout=120.0).text


async def test_the_sdk_goes_to_decode_directly(detached_cluster) -> None:
    async with AsyncClient(detached_cluster.grpc_address, lookaside=True, timeout_s=300.0) as client:
        whole = await client.generate(prompt="The capital of France is", max_tokens=8, temperature=0.0, explain=True)
    assert "Paris" in whole.text
    async with httpx.AsyncClient(timeout=120.0) as http:

        async def told() -> bool:
            text = (await http.get(f"{detached_cluster.http_url}/metrics")).text
            (line,) = [one for one in text.splitlines() if one.startswith(TICKETS)]
            return float(line.split()[-1]) >= 1

        await waiting.until(told, "decode has told the router of the answer's end", every_s=0.05)


def test_no_process_has_an_ipv4_socket(detached_cluster) -> None:
    seen = set()
    for child in detached_cluster.state.children:
        for connection in psutil.Process(child.pid).net_connections("tcp"):
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED):
                seen.add(connection.laddr.ip)
    assert seen == {"::1"}


def test_the_doctor_finds_it_well(detached_cluster, cluster_module) -> None:
    command = [sys.executable, "-P", "-m", "diptych.cli", "doctor", "--url", detached_cluster.http_url]
    env = cluster_module.environment(detached_cluster.folder.root)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=Path.home())
    assert done.returncode == 0, done.stdout + done.stderr
