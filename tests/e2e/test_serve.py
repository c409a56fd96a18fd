"""`diptych serve`: one process answers like a cluster does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from diptych.cli.processes import free_port
from diptych.client import Client

pytestmark = pytest.mark.multiproc

START_S = 120.0


def test_one_process_serves_both_faces_and_ends_on_sigterm(cluster, tmp_path):
    http_port, grpc_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [sys.executable, "-P", "-m", "diptych.cli", "serve", "--http-port", str(http_port)]
    command += ["--grpc-port", str(grpc_port), "--num-blocks", "64", "--max-model-len", "512"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        url = f"http://127.0.0.1:{http_port}"
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            try:
                if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        here = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()["choices"][0]
        there = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=60.0).json()["choices"][0]
        assert here == there
        with Client(f"127.0.0.1:{grpc_port}", timeout_s=60.0) as client:
            answer = client.generate(prompt=body["prompt"], max_tokens=8, temperature=0, explain=True)
            guided = client.generate(prompt="A or b?", choice=["größer", "no"], max_tokens=16)
        assert list(answer.token_ids) == here["token_ids"]
        assert guided.text in ("größer", "no")
        assert answer.explanation is not None
        assert answer.explanation.local_prefill
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 143, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
