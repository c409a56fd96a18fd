"""kill -9 of a decode worker that loads an adapter for a request: another one loads it and answers, as if nothing had been."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import ask, check, fake_model_cluster
from diptych_tests.lora import write_adapter

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
DECODES = ("decode-0", "decode-1")
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6)}


async def test_a_decode_worker_is_killed_in_the_middle_of_a_load(tmp_path: Path) -> None:
    folder, gate = write_adapter(tmp_path / "lora" / "french", SHAPES), tmp_path / "loads-wait"
    fake = {"max_loras": 2, "held_loads": str(gate)}
    async with (
        fake_model_cluster(
            tmp_path, decode=2, fake=fake, router={"lora_modules": f"french={folder}"}, enable_lora=True, max_loras=2,
            lora_dir=[str(tmp_path / "lora")],
        ) as cluster,
        cluster.client() as client,
    ):  # fmt: skip

        async def ready() -> bool:
            return (await cluster.get("/ready")).status_code == 200

        await waiting.until(ready, "the adapter is loaded", every_s=0.05)
        asked = ask(1)
        whole = await client.generate(**asked, adapter="french")
        plain = await client.generate(**asked)
        check(plain, asked)
        assert whole.token_ids != plain.token_ids
        # Fresh workers load the adapter with the first request for it.
        for name in DECODES:
            cluster.kill_hard(name)
        gate.touch()
        for name in DECODES:
            cluster.start(name)
        await cluster.until_usable()
        answer = asyncio.create_task(client.generate(**asked, adapter="french"))

        def loading() -> list[str]:
            return [name for name in DECODES if Path(f"{gate}.{name}").exists()]

        await waiting.until(lambda: bool(loading()) or answer.done(), "a worker loads it", every_s=0.01)
        (killed,) = loading()
        assert not answer.done()
        check(await client.generate(**asked), asked)  # of the base model: nobody waits for the load
        cluster.kill_hard(killed)
        await waiting.until(lambda: len(loading()) == 2 or answer.done(), "the other one loads it", every_s=0.01)
        assert not answer.done()
        gate.unlink()
        assert (await answer).token_ids == whole.token_ids
        cluster.start(killed)
        await cluster.until_usable()
        again = await asyncio.gather(*(client.generate(**asked, adapter="french") for _ in range(8)))
        assert {one.token_ids for one in again} == {whole.token_ids}
        await cluster.idle_again()
