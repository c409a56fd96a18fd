"""Issue 15, 4.10: what router, prefill and decode of a real cluster count adds up, after answers of every kind and after clients
that left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.multiproc

PROMPTS = [[1000 + 7 * i + j for j in range(40)] for i in range(6)]
APART = {"local_prefill_max_tokens": 0}
ANSWERED: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "max_tokens": 6, "ignore_eos": True, **APART},
    {"prompt": PROMPTS[0], "max_tokens": 1, **APART},
    {"prompt": PROMPTS[1], "max_tokens": 8, "n": 3, "temperature": 1, "ignore_eos": True, **APART},
    {"prompt": PROMPTS[2], "max_tokens": 5, "best_of": 3, "n": 2, "temperature": 1, "ignore_eos": True, **APART},
    {"prompt": PROMPTS[3], "max_tokens": 7, "stream": True, "n": 2, "temperature": 1, "ignore_eos": True, **APART},
    {"prompt": "The capital of France is", "max_tokens": 9, "stream": True, "stop": ["."]},
    {"prompt": [PROMPTS[4], PROMPTS[5]], "max_tokens": 4, "logprobs": 1, "echo": True, "ignore_eos": True},
    {"prompt": "A rather short one", "max_tokens": 0, "echo": True},
]


class Scraped:
    """Counters of all parts of the cluster since the start of the test."""

    def __init__(self, cluster: Any, laws: Any) -> None:
        self._cluster, self._laws = cluster, laws
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        self._cluster.wait_idle(deadline_s=300.0)
        urls = {"router": [self._cluster.http_url], "prefill": [], "decode": []}
        for child in self._cluster.state.children:
            if child.role in ("prefill", "decode"):
                urls[child.role].append(f"http://{child.metrics}")
        return {
            role: self._laws.Figures.parse(*[httpx.get(f"{url}/metrics", timeout=120.0).text for url in found])
            for role, found in urls.items()
        }

    def grown(self) -> tuple[Any, Any, Any]:
        """Increases of router, decode, prefill."""
        now = self._now()
        router, decode, prefill = (now[role].since(self._before[role]) for role in ("router", "decode", "prefill"))
        return router, decode, prefill


@pytest.fixture
def scraped(cluster, metric_laws) -> Iterator[Scraped]:
    return Scraped(cluster, metric_laws)


def complete(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    assert not body.get("stream") or answer.text.endswith("data: [DONE]\n\n")


def test_every_answer_is_counted_alike_by_all(cluster, scraped, metric_laws) -> None:
    with httpx.Client(base_url=cluster.http_url, timeout=120.0) as http, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda body: complete(http, body), ANSWERED))
    router, decode, prefill = scraped.grown()
    # best_of holds its choices back: their tokens have no visible intervals.
    assert not metric_laws.check_router(router, more_choices=None)
    assert not metric_laws.check_workers(router, decode, prefill, exact=True)
    assert router.total("requests_total") == router.total("request_success_total") == len(ANSWERED) + 1
    assert router.total("unfinished_tokens_total") == 0
    assert decode.total("prompt_tokens_by_source_total", source="external_kv_transfer") > 0


def test_every_choice_has_its_own_gaps(cluster, scraped, metric_laws) -> None:
    bodies = [body for body in ANSWERED if "best_of" not in body]
    with httpx.Client(base_url=cluster.http_url, timeout=120.0) as http:
        for body in bodies:
            complete(http, body)
    assert not metric_laws.check_router(scraped.grown()[0], more_choices=2 + 1)


def test_who_leaves_is_counted_on_both_sides(cluster, scraped, metric_laws) -> None:
    """One with its first tokens, one that may not have any yet; and one that stays."""
    body = {"prompt": PROMPTS[1], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True, **APART}
    with httpx.Client(base_url=cluster.http_url, timeout=120.0) as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(3):
                next(lines)
        with http.stream("POST", "/v1/completions", json=body | {"prompt": PROMPTS[2] * 20}) as answer:
            assert answer.status_code == 200
        complete(http, ANSWERED[0])
        refused = http.post("/v1/completions", json={"prompt": "x", "n": 17})
        assert refused.status_code == 400
    settled = threading.Event()
    for _ in range(200):  # until the router is notified
        router, decode, prefill = scraped.grown()
        if router.total("num_requests_running") == 0 and router.total("request_errors_total") == 3:
            break
        settled.wait(0.1)
    assert not metric_laws.check_router(router)
    assert not metric_laws.check_workers(router, decode, prefill, exact=False)
    assert router.total("requests_total") == 4
    assert router.total("request_errors_total", reason="CLIENT_LEFT") == 2
    assert router.total("request_success_total") == 1
    assert router.total("unfinished_tokens_total", of="prompt") >= 40
    assert router.total("unfinished_tokens_total", of="generation") >= 1
