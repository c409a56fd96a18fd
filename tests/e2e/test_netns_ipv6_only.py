"""`diptych up --host ::1` on a host whose loopback has no IPv4 address: Redis, workers, KV over UCX and the router's HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.up.processes import spawn

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
START_S = 240.0
# In the namespace: the test's own process has IPv4.
REQUEST = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
data = sys.argv[2].encode() if len(sys.argv) > 2 else None
headers = {"content-type": "application/json", "x-diptych-explain": "1"}
print(opener.open(urllib.request.Request(sys.argv[1], data, headers), timeout=120).read().decode())
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"dpv6x{os.getpid():x}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True, capture_output=True)
        subprocess.run(["ip", "-n", name, "-4", "addr", "flush", "dev", "lo"], check=True, capture_output=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)


def test_4_12_a_host_without_an_ipv4_address_serves(namespace: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    env |= {"DIPTYCH_RUN_DIR": str(tmp_path / "run"), "PYTHONSAFEPATH": "1"}
    inside = ["ip", "netns", "exec", namespace, sys.executable, "-P"]
    log = tmp_path / "up.log"
    up = spawn([*inside, "-m", "diptych.cli", "up", "--host", "::1"], log=log, env=env, cwd=tmp_path)

    def request(path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        words = [f"http://[::1]:8000{path}", *([] if body is None else [json.dumps(body)])]
        done = subprocess.run([*inside, "-c", REQUEST, *words], env=env, capture_output=True, text=True, timeout=180)
        assert up.poll() is None, log.read_text(errors="replace")[-3000:]
        return None if done.returncode else json.loads(done.stdout)

    try:
        until = time.monotonic() + START_S
        while request("/ready") is None:
            assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        prompt = list(range(1000, 1200))
        answer = request("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        assert answer is not None
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["diptych"]["transport"].startswith("ucx"), answer["diptych"]
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(timeout=300.0)
        finally:
            up.kill()
