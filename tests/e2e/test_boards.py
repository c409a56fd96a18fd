"""Dashboards and alerts against the real cluster: every metric is in a live scrape; and (slow) Prometheus answers every
query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from diptych_tests.scripts import load_script

pytestmark = pytest.mark.multiproc
ROOT = Path(__file__).resolve().parents[2]
# Series that exist only once something went wrong, or with a flag, or under a full cache: an empty answer is right.
MAY_BE_EMPTY = re.compile(
    r"tenant_|shadow_|errors|fallbacks|faults|failures|predicted_cached|regret|alert|prefix_cache|_slabs"
    r"|block_lifetime|idle_before_evict|reuse_gap|admission|placement_tickets"
)


def panels() -> ModuleType:
    return load_script("deploy/grafana/panels.py")


def queries() -> list[tuple[str, str]]:
    """Queries of the dashboards with "All" selected in every drop-down, and of the alerts."""
    found = []
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        chosen = re.compile(r"\$(job|role|worker)\b")
        found += [
            (f"{path.stem}: {panel['title']}", chosen.sub(".*", target["expr"]))
            for panel in board["panels"]
            for target in panel["targets"]
        ]
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
    return found + [(f"alert: {rule['alert']}", rule["expr"]) for rule in rules]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:
        text: str = answer.read().decode()
        return text


def targets(cluster) -> dict[str, list[str]]:
    """Role -> host:port of /metrics."""
    found = {"router": [cluster.http_url.removeprefix("http://")]}
    for child in cluster.state.children:
        if child.role in ("prefill", "decode"):
            found.setdefault(child.role, []).append(child.metrics)
    return found


def complete(cluster, prompt: list[int], max_tokens: int = 8) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(cluster.http_url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.status == 200


def test_every_query_asks_for_metrics_of_a_live_scrape(cluster) -> None:
    text = "\n".join(get(f"http://{address}/metrics") for group in targets(cluster).values() for address in group)
    families = {
        name + suffix
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }
    for title, query in queries():
        names = set(re.findall(r"diptych_\w+", query))
        assert {name for name in names if not name.startswith(panels().OPTIONAL)} <= families, title


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_answers_every_query(cluster, cluster_module, fresh_prompt, tmp_path: Path) -> None:
    from diptych.cli.up.processes import free_port, spawn

    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{
            "job_name": "diptych",
            "honor_labels": True,
            "static_configs": [{"targets": group, "labels": {"role": role}} for role, group in targets(cluster).items()],
        }],
    }  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port("127.0.0.1")
    command = [
        *("prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process: subprocess.Popen[bytes] = spawn(command, log=tmp_path / "log", env={}, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(query: str) -> list[Any]:
        answer = json.loads(get(url + "query?" + urllib.parse.urlencode({"query": query})))
        assert answer["status"] == "success", (query, answer)
        result: list[Any] = answer["data"]["result"]
        return result

    def up() -> bool:
        try:
            return len(ask("up == 1")) == sum(map(len, targets(cluster).values()))
        except OSError:
            return False

    try:
        cluster_module.wait_until(up, deadline_s=240, what=f"Prometheus scrapes all\n{(tmp_path / 'log').read_text()}")
        for _ in range(3):
            complete(cluster, fresh_prompt(100))
        cluster_module.wait_until(
            lambda: float(ask("sum(rate(diptych_request_success_total[1m]))")[0]["value"][1]) > 0,
            deadline_s=240,
            what="the requests are in Prometheus",
        )
        empty = []
        for title, query in queries():
            result = ask(query.replace("$__rate_interval", "1m"))
            if not result and not title.startswith("alert") and not MAY_BE_EMPTY.search(query):
                empty.append((title, query))
        assert not empty
        quiet = {title: ask(query) for title, query in queries() if title.startswith("alert: DiptychWorkerDown")}
        assert not any(quiet.values()), "an alert fires on a cluster that does well"
    finally:
        process.terminate()
        process.wait(timeout=300)
