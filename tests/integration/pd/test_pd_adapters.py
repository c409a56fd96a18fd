"""The adapter of a request crosses both hops, and a worker that does not have it refuses it by name."""

from __future__ import annotations

from types import ModuleType

import pytest

PROMPT = [(7 * i + 3) % 1000 for i in range(40)]
HAS = {"german": "hash-2", "french": "hash-1"}


async def test_prefill_and_decode_compute_with_the_adapter_of_the_request(pd: ModuleType) -> None:
    async def answers(num_prefill: int) -> dict[str, list[int]]:
        def model(*names: str) -> object:
            return pd.fake_model(adapters={name: HAS[name] for name in names})

        out = {}
        async with (
            pd.cluster(
                num_prefill=num_prefill,
                decode=lambda: model("german", "french"),
                prefill=lambda: model("french", "german"),  # numbers are a worker's own
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):
            for i, name in enumerate(("", "french", "german", "french")):
                message = cluster.submit_message(attempt=f"a{i}", prompt=PROMPT)
                message.adapter = name
                answer = await router.run(message)
                assert answer.error is None
                assert answer.explanation.local_prefill == (not num_prefill)
                cached = answer.finished.usage.cached_tokens
                assert cached == (32 if i == 3 else 0), "blocks of the same adapter only"
                assert out.setdefault(name, answer.token_ids) == answer.token_ids
            await cluster.nothing_left()
        return out

    alone = await answers(0)
    assert len(set(map(tuple, alone.values()))) == 3
    assert await answers(1) == alone


@pytest.mark.parametrize("lacks", ["decode", "prefill"])
async def test_a_worker_without_the_adapter_refuses_it_by_name(pd: ModuleType, lacks: str) -> None:
    have = {name: {} if name == lacks else {"german": HAS["german"]} for name in ("decode", "prefill")}
    async with (
        pd.cluster(
            decode=lambda: pd.fake_model(adapters=have["decode"]),
            prefill=lambda: pd.fake_model(adapters=have["prefill"]),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        message = cluster.submit_message(attempt="a", prompt=PROMPT)
        message.adapter = "german"
        answer = await router.run(message)
        assert answer.token_ids == []
        assert answer.error is not None
        assert "german" in answer.error.message
        await cluster.nothing_left()
