"""Issue 15: load generators, unmodified: no request fails, and their figures match the cluster's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.multiproc]

REQUESTS, PROMPT, ANSWER = 12, 32, 8


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(route, clients, cluster, counted, tmp_path: Path) -> None:
    """It had 5,610 refusals of 5,610: it always sets continuous_usage_stats."""
    report = tmp_path / "report.json"
    clients.run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={cluster.http_url},request_format={route}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={clients.model_folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--output", f"kind=json,path={report}", "--disable-console",
    )  # fmt: skip
    (run,) = json.loads(report.read_text())["benchmarks"]
    assert run["metrics"]["request_totals"] == {
        "successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS,
    }  # fmt: skip
    router, _, _ = counted(requests=REQUESTS)
    tokens = {kind: run["metrics"][f"{kind}_token_count"]["successful"]["total_sum"] for kind in ("prompt", "output")}
    assert tokens["output"] == router.total("generation_tokens_total") == REQUESTS * ANSWER
    assert tokens["prompt"] == router.total("prompt_tokens_total")
    assert_alike(router, "time_to_first_token_seconds", run["metrics"]["time_to_first_token_ms"]["successful"]["mean"])


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(kind, clients, cluster, counted, tmp_path: Path) -> None:
    clients.run(
        "aiperf", "profile", "--model", cluster.model, "--url", cluster.http_url, "--endpoint-type", kind, "--streaming",
        "--tokenizer", "local/smol", "--request-count", str(REQUESTS), "--concurrency", "2",
        "--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER),
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path), "--ui-type", "none", "--random-seed", "3",
        # It would encode the answers' texts: drawn tokens do not always come back as they were.
        "--use-server-token-count",
    )  # fmt: skip
    report: dict[str, Any] = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (REQUESTS, [])
    router, _, _ = counted(requests=REQUESTS)
    assert report["total_osl"]["avg"] == router.total("generation_tokens_total") == REQUESTS * ANSWER
    assert report["total_usage_prompt_tokens"]["avg"] == router.total("prompt_tokens_total")
    assert_alike(router, "time_to_first_token_seconds", report["time_to_first_token"]["avg"])
    assert_alike(router, "e2e_request_latency_seconds", report["request_latency"]["avg"])
    assert_alike(router, "inter_token_latency_seconds", report["inter_token_latency"]["avg"])


def assert_alike(router: Any, series: str, mean_ms: float) -> None:
    """Compare the client's mean with the router's. Wide bounds: the client shares the cores and reads its clock late; a
    figure of something else would differ by its own size."""
    ours_ms = 1000 * router.total(f"{series}_sum") / router.total(f"{series}_count")
    assert 0.5 * ours_ms <= mean_ms <= 2 * ours_ms + 250, (series, ours_ms, mean_ms)
