"""The adapter of a request crosses both hops, and an engine that does not have it refuses it by its id."""

from __future__ import annotations

from types import ModuleType

import pytest

from diptych.engine.fake_runner import FakeAdapter
from diptych.engine.messages import KeepAdapter

PROMPT = [(7 * i + 3) % 1000 for i in range(40)]
FRENCH, GERMAN = "0f" * 16, "a1" * 16


async def test_prefill_and_decode_compute_with_the_adapter_of_the_request(pd: ModuleType) -> None:
    async def answers(num_prefill: int) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        model = lambda: pd.fake_model(max_loras=2)  # noqa: E731
        async with (
            pd.cluster(num_prefill=num_prefill, decode=model, prefill=model) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):
            for i, worker in enumerate(cluster.workers):
                for adapter in (GERMAN, FRENCH)[:: 1 - 2 * i]:  # the order is a worker's own
                    worker.engine.send(KeepAdapter(FakeAdapter(adapter)))
            for i, adapter in enumerate(("", FRENCH, GERMAN, FRENCH)):
                message = cluster.submit_message(attempt=f"a{i}", prompt=PROMPT)
                message.adapter = adapter
                answer = await router.run(message)
                assert answer.error is None
                assert answer.explanation.local_prefill == (not num_prefill)
                cached = answer.finished.usage.cached_tokens
                assert cached == (32 if i == 3 else 0), "blocks of the same adapter only"
                assert out.setdefault(adapter, answer.token_ids) == answer.token_ids
            await cluster.nothing_left()
        return out

    alone = await answers(0)
    assert len(set(map(tuple, alone.values()))) == 3
    assert await answers(1) == alone


@pytest.mark.parametrize("lacks", ["decode", "prefill"])
async def test_a_worker_without_the_adapter_refuses_it_by_its_id(pd: ModuleType, lacks: str) -> None:
    model = lambda: pd.fake_model(max_loras=2)  # noqa: E731
    async with (
        pd.cluster(decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        worker = cluster.prefill[0] if lacks == "decode" else cluster.decode
        worker.engine.send(KeepAdapter(FakeAdapter(GERMAN)))
        message = cluster.submit_message(attempt="a", prompt=PROMPT)
        message.adapter = GERMAN
        answer = await router.run(message)
        assert answer.token_ids == []
        assert answer.error is not None
        assert GERMAN in answer.error.message
        await cluster.nothing_left()
