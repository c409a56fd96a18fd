"""A worker that comes back under its old name with another KV layout: it is never paired, the reason is shown, what was
known of its cache is forgotten, and requests run elsewhere or are refused at once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]


def restart(cluster: FakeModelCluster, name: str, **changes: Any) -> None:
    """kill -9, and start it with other settings at the same address."""
    cluster.kill_hard(name)
    *command, settings = cluster.commands[name]
    cluster.commands[name] = [*command, json.dumps(json.loads(settings) | changes)]
    cluster.start(name)


@pytest.mark.parametrize("change", [{"block_size": 32}, {"fake": {"num_layers": 3}}], ids=["block size", "layers"])
async def test_another_layout_under_the_same_name(tmp_path: Path, change: dict[str, Any]) -> None:
    async with fake_model_cluster(tmp_path, prefill=2) as cluster, cluster.client() as client:
        for number in range(8):
            check(await client.generate(**ask(number)), ask(number))
        restart(cluster, "prefill-0", **change)

        async def refused() -> bool:
            status = (await cluster.status())["cluster"]
            pairs = {(one["prefill"], one["decode"]): " ".join(one["why"]) for one in status["incompatible"]}
            (known,) = {one["known_blocks"] for one in status["workers"] if one["id"] == "prefill-0"} or {0}
            return ("prefill-0", "decode-0") in pairs and not known

        await waiting.until(refused, "the pair is refused, and the old cache is forgotten")
        for number in range(8):
            answer = await client.generate(**ask(number))
            check(answer, ask(number))
            assert answer.explanation.prefill in ("prefill-1", "decode-0")
        restart(cluster, "prefill-1", **change)

        # No prefill worker fits any more: decode computes prompts itself, or nobody does and that is said at once.
        answer = await client.generate(**ask(100))
        check(answer, ask(100))
        assert answer.explanation.local_prefill
        for name in ("prefill-0", "prefill-1"):
            restart(cluster, name, block_size=16, fake={})
        await cluster.until_usable()
        check(await client.generate(**ask(200)), ask(200))
        await cluster.idle_again()
