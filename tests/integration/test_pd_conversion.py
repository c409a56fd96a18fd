"""Prefill and decode whose KV lies differently: converted where that is allowed, refused by name where it is not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diptych.common.block_identity import golden_key
from diptych.common.errors import IncompatibleWorkersError
from diptych.rpc.v1 import router_pb2

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
FAIL = router_pb2.FAILURE_POLICY_FAIL


@pytest.fixture(scope="session")
def pd() -> ModuleType:
    name = "diptych_test_pd_harness"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("pd_harness.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def model(pd: ModuleType, block_size: int, **facts: Any) -> Any:
    """The fake runner's slots are four bytes a head: one float32."""
    made = pd.fake_model(block_size=block_size)
    identity = replace(made.identity, kv_dtype=facts.get("kv_dtype", "float32"))
    compat = replace(made.compat, head_dim=1, block_identity_golden=golden_key(identity), **facts)
    return replace(made, compat=compat, identity=identity)


def settings(block_size: int, *, allow: bool = True) -> dict[str, object]:
    return {"block_size": block_size, "allow_kv_conversion": allow, "max_num_batched_tokens": 48}


async def undisturbed(pd: ModuleType, prompt: list[int]) -> list[int]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        return (await router.run(alone.submit_message(attempt="local", prompt=prompt))).token_ids


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (32, 16), (8, 24), (24, 8)])
async def test_tokens_are_the_same_across_unequal_block_sizes(pd: ModuleType, p_size: int, d_size: int) -> None:
    expected = await undisturbed(pd, PROMPT)
    longer = [*PROMPT[:100], *PROMPT[:70][::-1]]
    expected_longer = await undisturbed(pd, longer)
    async with (
        pd.cluster(
            prefill=lambda: model(pd, p_size), decode=lambda: model(pd, d_size),
            prefill_config=settings(p_size), decode_config=settings(d_size),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert answer.token_ids == expected
        assert not answer.explanation.local_prefill
        assert answer.explanation.kv_bytes > 0
        assert "was converted" in answer.explanation.notes[-1]
        # A prefix that decode holds in blocks of its own: the transfer begins at a block of prefill's, and what is there stays.
        again = await router.run(cluster.submit_message(attempt="b", prompt=longer, policy=FAIL))
        assert again.token_ids == expected_longer
        assert again.explanation.cached_tokens_decode > 0
        await cluster.nothing_left()


@pytest.mark.parametrize(
    ("p_facts", "allow", "named"),
    [
        ({}, False, "block_size"),
        ({"kv_dtype": "bfloat16"}, False, "kv_dtype"),
        ({"num_kv_heads": 2}, True, "num_kv_heads"),
        ({"attention_version": "other"}, True, "attention_version"),
        ({"tensor_parallel_size": 2}, True, "tensor_parallel_size"),
        ({"kv_layout": "unheard-of"}, True, "kv_layout"),
    ],
)
async def test_what_must_not_or_cannot_be_converted_is_refused_by_name(
    pd: ModuleType, p_facts: dict[str, Any], allow: bool, named: str
) -> None:
    async with (
        pd.cluster(
            prefill=lambda: model(pd, 32, **p_facts), decode=lambda: model(pd, 16),
            prefill_config=settings(32), decode_config=settings(16, allow=allow),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert isinstance(answer.error, IncompatibleWorkersError)
        assert named in answer.error.message
        local = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT))
        assert local.token_ids == await undisturbed(pd, PROMPT)
        assert local.explanation.local_prefill
        await cluster.nothing_left()
