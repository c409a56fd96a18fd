"""A decode worker runs out of blocks: a preempted request recovers its KV from the source measured as faster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from diptych.engine.messages import ScheduledSeq

PROMPTS = [[(11 * i + 7 * n + 3) % 1000 for i in range(60)] for n in range(3)]
"""Four blocks each, and four more for the answers; decode has eleven."""
MAX_TOKENS = 60


def takes(clock: Any, step_s: float, token_s: float) -> Callable[[Sequence[ScheduledSeq]], None]:
    """A model whose steps last so long on the worker's clock, and longer for every prompt token."""

    loop = asyncio.get_running_loop()

    async def heard() -> None:
        """The event loop has handled the events of the step before."""

    def compute(seqs: Sequence[ScheduledSeq]) -> None:
        # A step of a real model is longer than the loop's answer to the one before.
        asyncio.run_coroutine_threadsafe(heard(), loop).result(60)
        clock.skip(step_s + token_s * sum(len(seq.token_ids) for seq in seqs if len(seq.token_ids) > 1))

    return compute


FAST, SLOW = (0.005, 0.0), (0.005, 10.0)
"""Seconds of a step, and more for each of its tokens: far above what a busy machine adds to a hand-off."""


async def undisturbed(pd: ModuleType) -> list[list[int]]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        messages = [
            alone.submit_message(attempt=f"l{i}", prompt=prompt, max_tokens=MAX_TOKENS)
            for i, prompt in enumerate(PROMPTS)
        ]
        return [(await router.run(message)).token_ids for message in messages]


@pytest.mark.parametrize("case", ["prefill is faster", "decode is faster", "prefill is lost"])
async def test_a_preempted_request_goes_where_it_is_sooner_back(pd: ModuleType, case: str) -> None:
    want = await undisturbed(pd)
    decode_slow = case != "decode is faster"
    clocks = {"decode_clock": pd.SkippingClock(), "prefill_clock": pd.SkippingClock()}
    on_decode = takes(clocks["decode_clock"], *(SLOW if decode_slow else FAST))
    on_prefill = takes(clocks["prefill_clock"], *(FAST if decode_slow else SLOW))
    models = {
        "decode": lambda: pd.fake_model(num_blocks=11, before_execute=on_decode),
        "prefill": lambda: pd.fake_model(before_execute=on_prefill),
    }
    async with (
        pd.cluster(**models, **clocks, decode_config={"enable_prefix_caching": False}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        first = await router.run(cluster.submit_message(attempt="first", prompt=PROMPTS[0], max_tokens=MAX_TOKENS))
        assert first.token_ids == want[0]  # now prefill's rate and the link are measured
        answers = [
            router.submit(cluster.submit_message(attempt=f"a{i}", prompt=PROMPTS[i], max_tokens=MAX_TOKENS))
            for i in (1, 2)
        ]
        if case == "prefill is lost":
            await asyncio.gather(*(router.first_token(f"a{i}") for i in (1, 2)))
            cluster.prefill[0].role.stop_accepting()  # a returning request is refused
        await asyncio.gather(*(router.ended(f"a{i}") for i in (1, 2)))
        assert [answer.token_ids for answer in answers] == want[1:]
        stats = cluster.decode.engine.stats()
        assert stats.preemptions_total > 0
        assert (stats.refetches_total > 0) is decode_slow
        notes = [note for answer in answers for note in answer.explanation.notes]
        bytes_of_prompts = 60 * cluster.decode.model.runner.kv_bytes_per_token
        moved = sum(answer.explanation.kv_bytes for answer in answers)
        if case == "prefill is faster":
            assert "preempted: prefill-0 computed the KV again" in notes
            assert moved > 2 * bytes_of_prompts
        else:
            assert moved == 2 * bytes_of_prompts
            assert any("it was computed here" in note for note in notes) is (case == "prefill is lost")
        await cluster.nothing_left()
