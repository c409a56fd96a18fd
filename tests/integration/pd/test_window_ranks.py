"""Layers with a window over several ranks: KV groups on both pools, between equal and unequal degrees, on a real model. The
tokens are those of a worker of one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diptych.common.compat import identified
from diptych.common.kv_groups import PoolDemand, expected_ranges
from diptych.common.kv_parts import split
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.rpc.v1 import router_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.model import LoadedModel
from diptych_tests.rank_threads import ThreadedRanks
from diptych_tests.scripts import load_script

FAIL = router_pb2.FAILURE_POLICY_FAIL
PROMPT = [(7 * i + 3) % 310 for i in range(150)]
LONGER = [*PROMPT[:120], *PROMPT[:41][::-1]]
"""It shares leading blocks with PROMPT."""
GEMMA = {
    "sliding_window": 40, "query_pre_attn_scalar": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
Degrees = tuple[int, int]
"""Tensor parallel and pipeline."""
Make = Callable[[Degrees], LoadedModel]
_alone: list[list[int]] = []
"""The answers of one rank, which computes the prompts itself."""


class Together(LocalExecutor):
    """All ranks are in this process, and each has its part. Groups and layers of a range are those of its rank."""

    def __init__(self, ranks: ThreadedRanks) -> None:
        super().__init__(ranks)  # type: ignore[arg-type]
        self._ranks = ranks.runners
        parts = tuple(runner.pool.kv for runner in ranks.runners)
        sizes = tuple((part.num_layers, part.bytes_per_token) for part in parts)
        self.capabilities = replace(ranks.capabilities, rank_sizes=sizes, parts=parts)

    def pack(self, block_ids: Any, num_tokens: int, out: Any, layers: Any = None, group: int = 0, part: int = 0) -> int:
        return self._ranks[part].pack(block_ids, num_tokens, out, layers, group)

    def unpack(
        self, block_ids: Any, num_tokens: int, src: Any, layers: Any = None, group: int = 0, part: int = 0
    ) -> None:
        self._ranks[part].unpack(block_ids, num_tokens, src, layers, group)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exec_kit = load_script("tests/unit/engine_exec/conftest.py")
    made: Path = exec_kit.tiny_model_dir(tmp_path_factory.mktemp("model"), "Gemma3ForCausalLM", **GEMMA)
    return made


@pytest.fixture
def model(pd: ModuleType, folder: Path) -> Iterator[Make]:
    """model(degrees) -> a worker's model."""
    made: list[ThreadedRanks] = []
    settings: dict[str, Any] = {"num_blocks": 48, "block_size": 16, "backend": "torch", "num_threads": 1}

    def make(degrees: Degrees) -> LoadedModel:
        settings["demand"] = PoolDemand(8, 32)
        if degrees == (1, 1):
            runner: Any = TorchModelRunner.load(folder, **settings)
            kv, executor = runner.pool.kv, None
        else:
            made.append(runner := ThreadedRanks(folder, *degrees, **settings))
            kv, executor = runner.kv, Together(runner)
        parts = split(kv, tensor_parallel=degrees[0], pipeline=degrees[1]) if degrees != (1, 1) else ()
        facts = replace(pd.fake_model().compat, kv=kv, kv_parts=parts, compute_dtype="float32", backend="torch")
        identity, compat = identified(facts, bytes(32))
        return LoadedModel(runner, compat, identity, None, executor=executor)

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((2, 1), (4, 1)),
        ((1, 2), (1, 2)),
        ((2, 2), (1, 2)),
        *(
            pytest.param(prefill, decode, marks=pytest.mark.slow)
            for prefill, decode in (
                ((2, 1), (2, 1)),
                ((2, 1), (1, 1)),
                ((1, 1), (2, 1)),
                ((1, 1), (1, 2)),
                ((1, 2), (1, 1)),
                ((1, 4), (1, 3)),
                ((1, 2), (2, 2)),
                ((4, 1), (2, 2)),
                ((2, 2), (2, 2)),
            )
        ),
    ],
    ids=lambda pair: "x".join(map(str, pair)),
)
async def test_23_windows_move_between_ranks_and_the_tokens_are_those_of_one(
    pd: ModuleType, model: Make, prefill: Degrees, decode: Degrees
) -> None:
    """The first of two pipeline stages has window layers only, and of four or three some one group each."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "slab_bytes": 1 << 16, "num_slabs": 16}

    async def answers(num_prefill: int, degrees: Degrees) -> list[list[int]]:
        async with (
            pd.cluster(
                num_prefill=num_prefill, prefill=lambda: model(prefill), decode=lambda: model(degrees),
                prefill_config=settings, decode_config=settings,
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):  # fmt: skip
            kv = cluster.decode.compat.kv
            assert [group.name for group in kv.groups] == ["full", "window-40"]
            out = []
            for n, prompt in enumerate((PROMPT, LONGER)):
                policy = FAIL if num_prefill else router_pb2.FAILURE_POLICY_UNSPECIFIED
                message = cluster.submit_message(attempt=f"a{n}", prompt=prompt, max_tokens=60, policy=policy)
                answer = await router.run(message)
                assert answer.error is None
                out.append(list(answer.token_ids))
                why = answer.explanation
                if num_prefill and not n:
                    moved = sum(
                        part.num_tokens * kv.groups[part.group].bytes_per_token(kv.shard)
                        for part in expected_ranges(kv, 0, len(prompt), reusable=True)
                    )
                    assert why.kv_bytes == moved, "each head once, and of windows what is seen"
            audit = await cluster.decode.audit(full=True)
            counts = (audit.blocks, *audit.more_blocks)
            assert all(one.free + one.cached == one.total for one in counts)
            assert counts[1].total < 2 * counts[0].total
            await cluster.nothing_left()
            return out

    if not _alone:
        _alone.extend(await answers(0, (1, 1)))
    assert await answers(1, decode) == _alone


@pytest.mark.parametrize(
    ("prefill", "decode"), [((2, 1), (1, 2)), pytest.param((1, 4), (2, 2), marks=pytest.mark.slow)], ids=str
)
async def test_23_cached_windows_are_pulled_between_stages(
    pd: ModuleType, model: Make, prefill: Degrees, decode: Degrees
) -> None:
    """From decode's cache, into which its answer went, to prefill: of a window what the next token sees."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "slab_bytes": 1 << 16, "num_slabs": 16}
    async with (
        pd.cluster(
            prefill=lambda: model(prefill),
            decode=lambda: model(decode),
            prefill_config=settings,
            decode_config=settings,
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        first = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=60, policy=FAIL))
        history = [*PROMPT, *first.token_ids]
        held, turn_2 = (len(history) - 1) // 16 * 16, [*history, *PROMPT[:9]]
        message = cluster.submit_message(attempt="b", prompt=turn_2, max_tokens=20, policy=FAIL)
        message.placement.prefill_source.CopyFrom(
            types_pb2.KvSource(holder=wire.ref_to_proto(cluster.decode.ref), num_tokens=held, compute_s=pd.NEVER_S)
        )
        answer = await router.run(message)
        [pull] = answer.explanation.pulls
        assert (pull.note, pull.first_token + pull.num_tokens) == ("", held)
        kv = cluster.decode.compat.kv
        assert pull.kv_bytes == sum(
            part.num_tokens * kv.groups[part.group].bytes_per_token(kv.shard)
            for part in expected_ranges(kv, pull.first_token, held)
        )
        assert answer.explanation.cached_tokens_prefill == held
        await cluster.nothing_left()
    async with (
        pd.cluster(num_prefill=0, decode=lambda: model((1, 1)), decode_config=settings) as one,
        pd.FakeRouter(one.decode.address) as router,
    ):
        want = await router.run(one.submit_message(attempt="l", prompt=turn_2, max_tokens=20))
        assert answer.token_ids == want.token_ids
