"""Every worker of a real cluster is killed and starts again: the first hit comes from files, on both pools, with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych_tests import waiting
from diptych_tests.clusters import Cluster

BLOCK = 16
TOKENS = 160
ANSWER = 8

pytestmark = pytest.mark.multiproc


def usable(cluster: Cluster) -> dict[str, dict[str, Any]]:
    status = httpx.get(f"{cluster.http_url}/status.json", timeout=300.0).json()["cluster"]
    return {one["id"]: one for one in status["workers"] if one["state"] == "ready" and not one["why_not"]}


def held(folder: Path, worker: str) -> int:
    return len(list(folder.glob(f"{worker}/*/*/*-*")))


async def test_after_a_kill_of_every_worker_the_first_hit_is_from_files(
    detached_cluster: Cluster, fresh_prompt
) -> None:
    cluster, folder = detached_cluster, detached_cluster.folder.root.parent / "kv"
    began = {worker: held(folder, worker) for worker in cluster.workers()}
    prompt = fresh_prompt(TOKENS)
    whole = (TOKENS - 1) // BLOCK * BLOCK

    def ask(prompt: list[int], **fields: Any) -> dict[str, Any]:
        body = {
            "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"x-diptych-explain": "1"}
        answer = httpx.post(f"{cluster.http_url}/v1/completions", json=body | fields, headers=headers, timeout=300.0)
        assert answer.status_code == 200, answer.text
        return answer.json()

    cold = ask(prompt, local_prefill_max_tokens=0)
    assert cold["diptych"]["cached_tokens"] == 0
    blocks = {"prefill-0": TOKENS // BLOCK, "decode-0": (TOKENS + ANSWER - 1) // BLOCK}
    for worker, count in blocks.items():
        waiting.wait_until(
            lambda w=worker, n=began[worker] + count: held(folder, w) >= n, what=f"{worker} has written its blocks"
        )
    files = {worker: held(folder, worker) for worker in blocks}
    before = {one["incarnation"] for one in usable(cluster).values()}
    for worker in blocks:
        cluster.kill(worker)

    def back() -> bool:
        now = usable(cluster)
        known = all(name in now and now[name]["known_blocks"] >= count for name, count in files.items())
        return known and not {one["incarnation"] for one in now.values()} & before

    waiting.wait_until(back, deadline_s=300.0, what="both workers are back, and the router knows of their files")
    # decode has all but the last tokens in its files, and needs nobody
    warm = ask(prompt)
    why = warm["diptych"]
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    assert why["local_prefill"]
    assert (why["cached_tiers_decode"], why["cached_tokens"]) == ({"disk": whole}, whole)
    # and prefill has the prompt, for others that begin alike
    longer = [*prompt, *fresh_prompt(70)]
    forced = ask(longer, local_prefill_max_tokens=0)
    assert not forced["diptych"]["local_prefill"]
    assert forced["diptych"]["cached_tiers_prefill"] == {"disk": TOKENS // BLOCK * BLOCK}
    alone = ask(longer, cache_salt="alone")
    assert alone["diptych"]["cached_tokens"] == 0
    assert alone["choices"][0]["token_ids"] == forced["choices"][0]["token_ids"]
    [decode] = [terms for terms in why["placement"] if terms["chosen"]]
    assert decode["decode_tiers"] == {"disk": whole}
    print("ttft", {"cold": cold["diptych"]["ttft_s"], "warm": why["ttft_s"]})
    cluster.wait_idle()
