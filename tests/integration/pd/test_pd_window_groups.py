"""Item 17: KV groups with a window, through the whole hand-off: what moves is what the next token sees, the tokens are those of
one engine, and every range of every group that is lost, damaged or zeroed on its way is noticed before a token is computed
from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import TransferError, WorkerLostError
from diptych.common.kv_groups import PoolDemand, expected_ranges
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, TRAILER_BYTES
from diptych.kvtransfer.wrappers import faults
from diptych.rpc.v1 import router_pb2
from diptych.worker import wire

FORMATS = {"full and windows": (0, 40, 40, 70), "one window": (50, 50)}
PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
FAIL, RECOMPUTE = router_pb2.FAILURE_POLICY_FAIL, router_pb2.FAILURE_POLICY_RECOMPUTE

windows_of = pytest.mark.parametrize("windows", [pytest.param(value, id=name) for name, value in FORMATS.items()])


@asynccontextmanager
async def pair(pd: ModuleType, windows: tuple[int, ...], **settings: Any) -> AsyncIterator[Any]:
    model = lambda: pd.fake_model(windows=windows, demand=PoolDemand(8, 32))  # noqa: E731
    async with (
        pd.cluster(decode=model, prefill=model, **settings) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        yield cluster, router


async def local(pd: ModuleType, windows: tuple[int, ...], prompt: list[int], max_tokens: int = 8) -> list[int]:
    async with pair(pd, windows, num_prefill=0) as (cluster, router):
        answer = await router.run(cluster.submit_message(attempt="l", prompt=prompt, max_tokens=max_tokens))
        assert answer.explanation.local_prefill
        return list(answer.token_ids)


@windows_of
@pytest.mark.parametrize("num_tokens", [16, 41, 150])
async def test_a_hand_off_moves_the_windows_and_the_tokens_are_one_engines(
    pd: ModuleType, windows: tuple[int, ...], num_tokens: int
) -> None:
    """40 more tokens: the window slides behind the hand-off."""
    prompt = PROMPT[:num_tokens]
    expected = await local(pd, windows, prompt, 90)
    async with pair(pd, windows) as (cluster, router):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=prompt, max_tokens=90))
        assert answer.token_ids == expected
        assert not answer.explanation.local_prefill
        kv = cluster.decode.model.runner.kv
        moved = sum(
            part.num_tokens * kv.groups[part.group].bytes_per_token(kv.shard)
            for part in expected_ranges(kv, 0, num_tokens, reusable=True)
        )
        assert answer.explanation.kv_bytes == moved
        assert answer.explanation.kv_ranges >= len(kv.groups)
        audit = await cluster.decode.audit(full=True)
        counts = (audit.blocks, *audit.more_blocks)
        assert [one.total for one in counts] == list(cluster.decode.model.runner.capabilities.group_blocks)
        assert all(one.free + one.cached == one.total for one in counts)
        assert all(one.cached for one in counts), "each group keeps what a next turn needs"
        # The next turn finds on decode what this one left there, where every group has what is seen.
        longer = [*prompt, *expected, 5, 6, 7]
        turn = await router.run(cluster.submit_message(attempt="b", prompt=longer))
        assert turn.token_ids == await local(pd, windows, longer)
        assert turn.explanation.cached_tokens_decode >= num_tokens + 89 - 15
        await cluster.nothing_left()


async def ranges_of(pd: ModuleType, windows: tuple[int, ...]) -> tuple[list[int], int]:
    async with pair(pd, windows) as (cluster, router):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        return list(answer.token_ids), answer.explanation.kv_ranges


@windows_of
@pytest.mark.parametrize("zeroed", [False, True], ids=["one byte", "zeroed"])
async def test_every_damaged_range_is_noticed_before_a_token_is_computed_from_it(
    pd: ModuleType, windows: tuple[int, ...], zeroed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, num_ranges = await ranges_of(pd, windows)
    if zeroed:
        monkeypatch.setattr(faults, "damage", _zero)
    noticed = 0
    for nth in range(1, num_ranges + 1):
        async with pair(pd, windows, decode_config={"fault_corrupt_every": nth}) as (cluster, router):
            answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
            assert isinstance(answer.error, TransferError)
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert len(answer.token_ids) <= 1, "the first token is prefill's"
            noticed += 1
            await cluster.nothing_left()
    assert noticed == num_ranges >= len(set(windows))


def _zero(dest: np.ndarray) -> None:
    dest[HEADER_BYTES : dest.size - TRAILER_BYTES] = 0


@windows_of
async def test_a_group_that_is_never_sent_is_noticed_and_made_good(
    pd: ModuleType, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await ranges_of(pd, windows)
    for group in range(len(set(windows))):
        pd.withhold(monkeypatch, lambda packed, group=group: packed.group == group)
        for policy in (FAIL, RECOMPUTE):
            async with pair(pd, windows) as (cluster, router):
                answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=policy))
                if policy == FAIL:
                    assert isinstance(answer.error, WorkerLostError)
                    assert "before all KV had arrived" in str(answer.error)
                    assert len(answer.token_ids) <= 1
                else:
                    assert answer.token_ids == expected
                    assert "failed (WORKER_LOST" in " ".join(answer.explanation.notes)
                await cluster.nothing_left()


@windows_of
async def test_a_prompt_of_an_older_prefill_worker_leaves_nothing_that_did_not_arrive(
    pd: ModuleType, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not send the block that makes the prompt a hit."""
    monkeypatch.setattr(wire, "REQUEST_FIELDS", ())
    prompt = PROMPT[:112]
    expected = await local(pd, windows, prompt, 40)
    async with pair(pd, windows) as (cluster, router):
        for attempt, local_max in (("a", 0), ("b", 0), ("c", 200)):
            message = cluster.submit_message(
                attempt=attempt, prompt=prompt, max_tokens=40, local=local_max > 0, local_max=local_max
            )
            answer = await router.run(message)
            assert answer.token_ids == expected
            assert answer.explanation.cached_tokens_decode == 0
            assert answer.explanation.local_prefill == (attempt == "c")
        await cluster.nothing_left()


@windows_of
@pytest.mark.parametrize(("num_tokens", "chunk"), [(96, 512), (97, 512), (110, 512), (111, 35), (112, 512), (112, 37)])
async def test_the_same_prompt_again_finds_on_decode_all_that_it_may_use(
    pd: ModuleType, windows: tuple[int, ...], num_tokens: int, chunk: int
) -> None:
    """The last token is always computed, and sees one block more of a window than the token behind the prompt may."""
    prompt = PROMPT[:num_tokens]
    expected = await local(pd, windows, prompt, 40)
    async with pair(pd, windows, prefill_config={"max_num_batched_tokens": chunk}) as (cluster, router):
        first = await router.run(cluster.submit_message(attempt="a", prompt=prompt, max_tokens=40))
        again = await router.run(cluster.submit_message(attempt="b", prompt=prompt, max_tokens=40))
        assert first.token_ids == again.token_ids == expected
        assert not first.explanation.local_prefill
        assert (first.explanation.cached_tokens_decode, again.explanation.cached_tokens_decode) == (
            0,
            (num_tokens - 1) // 16 * 16,
        )
        await cluster.nothing_left()
