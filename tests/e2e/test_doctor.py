"""`diptych doctor` and `diptych top` against the real cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiproc


def run(cluster, cluster_module, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "diptych.cli", *arguments]
    env = cluster_module.environment(cluster.folder.root)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


async def test_the_doctor_sees_what_the_cluster_is(cluster, cluster_module, client, fresh_prompt) -> None:
    answer = await client.generate(token_ids=fresh_prompt(100), max_tokens=4, local_prefill_max_tokens=0)
    assert answer.usage.completion_tokens
    result = run(cluster, cluster_module, "doctor", "--json", "--sample-s", "0.2")
    reported = json.loads(result.stdout)
    assert result.returncode == (0 if reported["ok"] else 1), result.stderr
    by_check: dict[str, list[dict[str, str]]] = {}
    for verdict in reported["verdicts"]:
        by_check.setdefault(verdict["check"], []).append(verdict)
    expected = {
        *("cluster", "time", "balance", "batch", "preemptions", "kv", "cache", "tokenizer", "fallbacks"),
        *("transport", "rdma", "link", "kernels", "cores", "limits", "clock"),
    }
    assert expected <= set(by_check)
    assert all("ucx:tcp" in verdict["finding"] for verdict in by_check["transport"])
    assert [verdict["level"] for verdict in by_check["clock"]] == ["ok"]
    assert not [v for v in reported["verdicts"] if v["level"] == "unknown"], reported
    assert {verdict["level"] for verdict in by_check["link"]} == {"info"}, "5.5: nothing is to be said of an idle link"
    assert "transfer" in by_check["time"][0]["finding"]
    assert {v["finding"].partition(":")[0] for v in by_check["kv"]} == set(cluster.workers())


def test_top_prints_a_line_for_each_look(cluster, cluster_module) -> None:
    result = run(cluster, cluster_module, "top", "--count", "2", "--every-s", "0.1")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(name in line for line in lines for name in ("ready", *cluster.workers()))


def test_without_a_cluster_the_reason_is_printed(cluster_module, tmp_path) -> None:
    command = [sys.executable, "-P", "-m", "diptych.cli", "doctor", "--url", "http://127.0.0.1:9"]
    result = subprocess.run(
        command, env=cluster_module.environment(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1
    assert "the router at http://127.0.0.1:9 cannot be reached: Connection refused" in result.stderr
