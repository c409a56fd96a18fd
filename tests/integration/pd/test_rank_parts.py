"""Prefill and decode of two ranks each, in processes of their own: every rank's KV is a part with slabs and handles of its own,
and decode waits for all of them. Pairs whose ranks differ: test_unequal_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from diptych.common.compat import Compat, identified
from diptych.common.kv_format import full_format
from diptych.common.kv_parts import split
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.starting import RankSpec
from diptych.worker.model import LoadedModel

pytestmark = pytest.mark.multiproc
PROMPTS = [[(7 * i + 3 * n) % 1000 for i in range(90 + n)] for n in range(3)]
GENEROUS_S = 120.0
POOL = {"num_blocks": 64, "block_size": 16, "vocab_size": 1000}


@pytest.fixture
def ranks(forked_ranks: None) -> Iterator[Callable[..., LoadedModel]]:
    """ranks(pipeline=...) -> a model of two ranks: two halves of the heads, or of the layers, of four layers."""
    executors: list[RanksExecutor] = []

    def make(*, pipeline: int = 1) -> LoadedModel:
        kv = full_format(4, 2 // pipeline, 4, block_size=16, dtype="int8")
        fields = {**POOL, "num_layers": 4 // pipeline}
        spec = RankSpec("diptych.engine.fake_runner:FakeRunner", fields)
        executor = RanksExecutor([spec, spec], sampler=pipeline - 1, deadline_s=GENEROUS_S)
        executors.append(executor)
        parts = split(kv, tensor_parallel=2 // pipeline, pipeline=pipeline)
        assert tuple((part.num_layers, part.bytes_per_token) for part in parts) == executor.capabilities.rank_sizes
        compat = Compat(
            model="fake", model_revision="model-1", tokenizer_revision="tokenizer-1", kv=kv, compute_dtype="int8",
            attention_version="fake-1", sampler_version="fake-1", kv_parts=parts,
        )  # fmt: skip
        identity, compat = identified(compat, bytes(32))
        runner: Any = SimpleNamespace(capabilities=executor.capabilities, expect_compiled=lambda: None)
        return LoadedModel(runner, compat, identity, None, executor=executor)

    yield make
    for executor in executors:
        executor.close()


async def alone(pd: ModuleType, ranks: Callable[..., LoadedModel], pipeline: int) -> list[list[int]]:
    async with (
        pd.cluster(num_prefill=0, decode=lambda: ranks(pipeline=pipeline)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        return [
            (await router.run(cluster.submit_message(attempt=f"l{n}", prompt=prompt))).token_ids
            for n, prompt in enumerate(PROMPTS)
        ]


@pytest.mark.parametrize("pipeline", [1, 2], ids=["halves of the heads", "halves of the layers"])
async def test_17_a_equal_ranks_exchange_each_ranks_kv(
    pd: ModuleType, ranks: Callable[..., LoadedModel], pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = await alone(pd, ranks, pipeline)
    sent = pd.note_published(monkeypatch)
    model = lambda: ranks(pipeline=pipeline)  # noqa: E731
    async with (
        pd.cluster(decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        for n, prompt in enumerate(PROMPTS):
            answer = await router.run(cluster.submit_message(attempt=f"r{n}", prompt=prompt))
            assert answer.token_ids == want[n]
            assert list(answer.explanation.notes) == []
            assert answer.explanation.kv_bytes == len(prompt) * cluster.decode.compat.kv.bytes_per_token
            assert answer.explanation.kv_ranges >= 2
        await cluster.nothing_left()
    assert {part for part, _, _ in sent} == {0, 1}
    assert pipeline == 1 or {(first, number) for _, first, number in sent} == {(0, 2)}, "whole ranges of each stage"


async def test_17_a_kv_that_one_rank_does_not_send_is_never_decoded_on(
    pd: ModuleType, ranks: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    [want, *_] = await alone(pd, ranks, 1)
    pd.withhold(monkeypatch, lambda packed: packed.part == 1)
    async with pd.cluster(decode=ranks, prefill=ranks) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="r", prompt=PROMPTS[0]))
        assert answer.token_ids == want
        assert answer.explanation.local_prefill
        [note] = [note for note in answer.explanation.notes if "before all KV had arrived" in note]
        assert "rank 1" in note
        await cluster.nothing_left()
