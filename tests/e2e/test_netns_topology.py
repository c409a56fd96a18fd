"""The topology of compose.yaml on three hosts without containers: router and Redis, prefill, and decode, each in a
separate network namespace behind one bridge. Real processes, the real model, KV over UCX; then the prefill worker is
killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych_tests.netns_hosts import MARKS, START_S, Hosts, running_hosts

pytestmark = MARKS
DEAD_S = 60.0
KV_BYTES_PER_TOKEN = 46_080


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path) as running:
        yield running


def test_a_request_crosses_three_hosts_and_survives_one_of_them(
    hosts: Hosts, cluster_module: Any, fresh_prompt: Callable[[int], list[int]]
) -> None:
    wait_until = cluster_module.wait_until
    hosts.start_all()
    wait_until(hosts.ready, deadline_s=START_S, what="the three hosts serve", every_s=0.5)
    prompt = fresh_prompt(150)
    text, why = hosts.ask(prompt)
    assert (why["prefill"], why["decode"], why["transport"]) == ("prefill-0", "decode-0", "ucx:tcp")
    assert why["kv_bytes"] >= 149 * KV_BYTES_PER_TOKEN

    dead = hosts.processes.pop("prefill-0")
    dead.send_signal(signal.SIGKILL)
    assert dead.wait(timeout=300) == -signal.SIGKILL
    again, why = hosts.ask([*prompt[:1], *fresh_prompt(149)])  # recomputed, whatever the router's state
    assert again
    assert not why["kv_bytes"]

    def left() -> bool:
        return "prefill-0" not in {w["id"] for w in hosts.get("/status.json")["cluster"]["workers"] if not w["why_not"]}

    wait_until(left, deadline_s=DEAD_S, what="the router leaves the dead worker alone", every_s=0.2)
    assert hosts.ask(prompt)[0] == text, "what decode kept of the dead worker's KV still serves"
