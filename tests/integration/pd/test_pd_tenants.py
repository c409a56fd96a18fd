"""A request's tenant and priority reach the schedulers of both workers."""

from __future__ import annotations

import asyncio
import threading
from types import ModuleType

from diptych_tests import waiting


async def test_the_more_important_prompt_is_computed_first(pd: ModuleType) -> None:
    order: list[str] = []
    all_there = threading.Event()

    def watch(seqs: object) -> None:
        for seq in seqs:  # type: ignore[attr-defined]
            name = seq.attempt.split("/")[0]
            if name not in order:
                order.append(name)
        if "first" in order:
            assert all_there.wait(300)

    config = {"scheduling_policy": "priority", "max_num_seqs": 1}
    async with (
        pd.cluster(prefill=lambda: pd.fake_model(before_execute=watch), prefill_config=config) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        order.clear()  # the warm-up
        for name, priority in (("first", 0), ("late", 5), ("soon", -5), ("mid", 1)):
            prompt = [len(name)] * 96
            message = cluster.submit_message(attempt=name, prompt=prompt, max_tokens=2)
            message.priority = priority
            router.submit(message)
        try:
            await waiting.until(lambda: sum(cluster.prefill[0].role.states().values()) == 4, "all four are there")
        finally:
            all_there.set()
        await asyncio.gather(*(router.ended(name) for name in ("first", "late", "soon", "mid")))
    assert [name for name in order if name != "first"] == ["soon", "mid", "late"]


async def test_each_salt_is_a_tenant_with_a_share_of_the_cache(pd: ModuleType) -> None:
    config = {"tenant_cache_share": 0.125}
    model = lambda: pd.fake_model(num_blocks=32)  # noqa: E731
    async with (
        pd.cluster(num_prefill=0, decode=model, decode_config=config) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        for i in range(6):
            message = alone.submit_message(attempt=f"a{i}", prompt=[7 * i + 1] * 50, max_tokens=2)
            message.cache_salt = b"one" if i < 3 else b"other"
            assert (await router.run(message)).error is None
        counts = (await alone.decode.engine.audit()).blocks
        assert counts.cached == 2 * 4  # each salt kept an eighth of the pool
