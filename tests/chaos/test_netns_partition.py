"""A decode worker's host is cut off the network in the middle of its answers, and comes back: nothing breaks a connection, and
nobody refuses one. Router and Redis, prefill and two decode workers in network namespaces of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx

from diptych.cli.worker_access import WorkerAccess
from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc
from diptych_tests import waiting
from diptych_tests.netns_hosts import MARKS, START_S, Hosts, running_hosts

pytestmark = MARKS
ANSWER_S, BACK_S = 300.0, 120.0
NUM_TOKENS, CUT_AFTER = 200, 8
FIRST_DECODE = 4
"""Number of decode-0's host."""


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> tuple[str, list[int], Any]:
    """Text, token ids and explanation; `begun` once CUT_AFTER tokens have come."""
    text, ids, why = "", list[int](), None
    headers = {"x-diptych-explain": "1", "x-request-id": body["user"]}
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as response:
        lines = [line async for line in _data(response, ids, begun)]
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        text += "".join(choice["text"] for choice in chunk["choices"])
        why = chunk.get("diptych", why)
    return text, ids, why


async def _data(response: httpx.Response, ids: list[int], begun: asyncio.Event) -> Any:
    assert response.status_code == 200
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data != "[DONE]":
            ids += [i for choice in json.loads(data)["choices"] for i in choice.get("token_ids", ())]
            if len(ids) >= CUT_AFTER:
                begun.set()
        yield data


def workers(hosts: Hosts) -> dict[str, Any]:
    return {one["id"]: one for one in hosts.get("/status.json")["cluster"]["workers"]}


def usable(hosts: Hosts) -> set[str]:
    return {name for name, one in workers(hosts).items() if not one["why_not"]}


def holds_nothing(hosts: Hosts, number: int) -> bool:
    with WorkerAccess(secret=hosts.secret).open(f"{hosts.decodes[number]}:50051") as channel:
        try:
            audit = worker_pb2_grpc.WorkerStub(channel).Audit(
                worker_pb2.AuditRequest(full=True), timeout=10.0
            )  # short: the host may be cut off; it is asked again
        except grpc.RpcError:
            return False
    assert not audit.violations
    return not sum(audit.attempts.values()) and not audit.blocks.running and audit.slabs.free == audit.slabs.total


async def test_a_decode_worker_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    with running_hosts(tmp_path, decodes=2) as hosts:
        hosts.start_all()
        all_of_them = {"prefill-0", "decode-0", "decode-1"}
        waiting.wait_until(hosts.ready, deadline_s=START_S, what="the hosts serve", every_s=0.5)
        waiting.wait_until(
            lambda: usable(hosts) == all_of_them, deadline_s=START_S, what="all workers are usable", every_s=0.5
        )
        lives = {name: one["incarnation"] for name, one in workers(hosts).items()}
        asks = [
            {"prompt": f"Story {i}. Once upon a time", "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": i,
             "ignore_eos": True, "return_token_ids": True, "user": f"cut-{i}"}
            for i in range(4)
        ]  # fmt: skip
        async with httpx.AsyncClient(base_url=f"http://{hosts.router}:8000", timeout=ANSWER_S, trust_env=False) as http:
            want = await asyncio.gather(*(streamed(http, ask, asyncio.Event()) for ask in asks))
            begun = [asyncio.Event() for _ in asks]
            answers = [asyncio.create_task(streamed(http, ask, event)) for ask, event in zip(asks, begun, strict=True)]
            for event, answer in zip(begun, answers, strict=True):
                await asyncio.wait([asyncio.ensure_future(event.wait()), answer], return_when=asyncio.FIRST_COMPLETED)
            placed = await asyncio.to_thread(hosts.get, "/status.json")
            running = [one["decode"] for one in placed["cluster"]["placements"] if one["outcome"] == "running"]
            assert running, "no answer runs any more"
            lost = int(running[0].removeprefix("decode-"))
            hosts.network.cut(FIRST_DECODE + lost, off=True)
            try:
                got = await asyncio.gather(*answers)
            finally:
                hosts.network.cut(FIRST_DECODE + lost, off=False)
            moved = [why["attempts"] for _, _, why in got if why["attempts"]]
            assert moved
            for first, second in moved:
                assert (first["decode"], first["failure"], second["decode"]) == (
                    f"decode-{lost}", "WORKER_LOST", f"decode-{1 - lost}",
                )  # fmt: skip
                assert first["num_tokens"] >= CUT_AFTER
            assert [answer[:2] for answer in got] == [answer[:2] for answer in want]
            gaps = [round(why["longest_gap_s"], 2) for _, _, why in got if why["attempts"]]
            print(f"{len(moved)} of {len(asks)} answers moved; the longest gap of each: {gaps} s")
            # The same process, not another one, once the cable is back; what it held is free.
            await waiting.until(lambda: usable(hosts) == all_of_them, "it is back", deadline_s=BACK_S, every_s=0.2)
            assert {name: one["incarnation"] for name, one in workers(hosts).items()} == lives
            for number in range(2):
                await waiting.until(lambda number=number: holds_nothing(hosts, number), deadline_s=BACK_S, every_s=0.2)
            again = await asyncio.gather(*(streamed(http, ask, asyncio.Event()) for ask in asks))
            assert [answer[:2] for answer in again] == [answer[:2] for answer in want]
