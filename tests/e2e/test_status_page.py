"""The status page of a real cluster: what it is made of, and (slow) how a browser draws it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def get(url: str) -> tuple[bytes, str, str]:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return answer.read(), answer.headers["content-type"], answer.headers.get("content-security-policy", "")


def complete(cluster, prompt: list[int], max_tokens: int = 6) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "local_prefill_max_tokens": 0,
    }
    request = urllib.request.Request(
        cluster.http_url + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-request-id": "<b>shown</b>"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.status == 200


def test_the_page_needs_nothing_from_elsewhere_and_its_numbers_are_the_clusters(cluster, fresh_prompt) -> None:
    html, kind, policy = get(cluster.http_url + "/status")
    assert kind.startswith("text/html")
    assert "default-src 'self'" in policy
    for name in re.findall(rb'(?:src|href)="([^"]+)"', html):
        if name == b"data:,":
            continue
        assert b"/" not in name, name
        assert get(f"{cluster.http_url}/{name.decode()}")[0]
    prompt = fresh_prompt(160)
    complete(cluster, prompt)
    status = json.loads(get(cluster.http_url + "/status.json")[0])
    assert status["ready"]
    assert status["model"] == cluster.model
    workers = {worker["id"]: worker for worker in status["cluster"]["workers"]}
    assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
    for name in cluster.workers():
        audit = cluster.audit(name)
        assert workers[name]["num_blocks"] == audit.blocks.total
        assert workers[name]["why_not"] == ""
    latest = status["cluster"]["placements"][0]
    assert (latest["label"], latest["outcome"], latest["prompt_tokens"]) == ("<b>shown</b>", "finished", 160)
    assert latest["prefill"].startswith("prefill")
    assert latest["kv_bytes"] > 0
    assert status["stages"]["transfer"]["count"] > 0
    assert status["stages"]["queue"]["p50"] is not None
    assert sum(point["finished"] for point in status["series"]) >= 1


@pytest.mark.slow
def test_a_browser_draws_it(cluster, fresh_prompt, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    for _ in range(3):
        complete(cluster, fresh_prompt(120), 12)
    picture = Path(os.environ.get("DIPTYCH_TEST_PICTURE", tmp_path / "status.png"))
    common = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--window-size=1400,1500", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000"),
    ]
    dump = subprocess.run(
        [*common, "--dump-dom", cluster.http_url + "/status"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert re.search(r'data-drawn="\d', dump), dump[-3000:]
    for name in cluster.workers():
        assert f'data-worker="{name}"' in dump
    assert dump.count("<canvas") == len(cluster.workers())
    assert re.search(r'<svg id="ttft"[^>]*>.*?<(polyline|circle) class="p95"', dump, re.DOTALL)
    assert re.search(r'<svg id="itl"[^>]*>.*?<(polyline|circle) class="p50"', dump, re.DOTALL)
    assert "&lt;b&gt;shown" in dump or "<b>shown" not in dump, "a caller's label became markup"
    subprocess.run([*common, f"--screenshot={picture}", cluster.http_url + "/status"], timeout=300, check=True)
    assert picture.stat().st_size > 20_000
