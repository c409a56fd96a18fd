"""Issue 15, 4.10: what router, prefill and decode of a real cluster count adds up, after answers of every kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from diptych_tests.scraped import Scraped

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


@pytest.fixture
def scraped(cluster) -> Scraped:
    return Scraped(cluster)


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
