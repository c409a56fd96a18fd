"""A router dies and another one goes on with its attempts, at a real decode worker."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from diptych.common.errors import RequestCancelledError, StaleReferenceError
from diptych_tests import waiting

NUM_TOKENS = 8
OPEN = 1 << 30
"""Steps: more than any test takes."""


@pytest.fixture
async def held(pd: ModuleType):
    """A worker that is held in the middle of an answer, attempt "a", and the router that has it."""
    gate = pd.Gate(3)
    config = {"detach_s": pd.NEVER_S}
    async with pd.cluster(decode=lambda: pd.fake_model(before_execute=gate), decode_config=config) as cluster:
        cluster.gate = gate
        async with pd.FakeRouter(cluster.decode.address) as first:
            submit = cluster.submit_message(attempt="a", prompt=pd.PROMPT)
            submit.keep, submit.cache_salt = True, b"mine"
            first.submit(submit)
            await gate.wait()
            await first.first_token("a")
            yield cluster, first
            gate.open()
        intake(cluster).fail_all()
        await cluster.nothing_left()


def intake(cluster):
    return cluster.decode.role.services["decode"].intake


async def lost(cluster, router):
    """Until the worker knows that the router is gone."""
    await router.break_stream()
    await waiting.until(lambda: not intake(cluster)._routers)


@pytest.mark.parametrize("when", ["running", "ended", "attached"])
async def test_another_router_gets_all_of_it_once(pd: ModuleType, held, when: str) -> None:
    """`ended`: meanwhile, alone; `attached`: the worker does not know yet that the first router is gone."""
    cluster, first = held
    expected = await pd.undisturbed({})
    if when != "attached":
        await lost(cluster, first)
    if when == "ended":
        cluster.gate.open()
        await waiting.until(lambda: not intake(cluster).num_attempts)
    steps = cluster.prefill[0].engine.stats().steps
    async with pd.FakeRouter(cluster.decode.address) as second:
        answer = second.resume("a", b"mine")
        if when == "attached":
            await first.ended("a")
            first.cancel("a")  # of no effect: it is not its own any more
        cluster.gate.open()
        await second.ended("a")
        assert answer.accepted
        assert answer.token_ids == expected
        assert answer.finished is not None
        assert answer.finished.usage.completion_tokens == NUM_TOKENS
    assert cluster.prefill[0].engine.stats().steps == steps, "nothing was computed again"
    if when == "attached":
        assert isinstance(first._answers["a"][0].error, RequestCancelledError)


@pytest.mark.parametrize(("attempt", "salt"), [("a", b"theirs"), ("b", b"mine")])
async def test_a_stranger_is_answered_as_for_an_unknown_attempt(
    pd: ModuleType, held, attempt: str, salt: bytes
) -> None:
    cluster, first = held
    await lost(cluster, first)
    async with pd.FakeRouter(cluster.decode.address) as second:
        answer = second.resume(attempt, salt)
        await second.ended(attempt)
        assert isinstance(answer.error, StaleReferenceError)
        assert answer.error.message == "this worker has no such attempt, or no longer"
        assert not answer.accepted
        mine = second.resume("a", b"mine")
        cluster.gate.open()
        await second.ended("a")
        assert mine.finished is not None


async def test_a_router_cancels_what_no_router_has(pd: ModuleType, held) -> None:
    cluster, first = held
    async with pd.FakeRouter(cluster.decode.address) as second:
        for holder in (first, None):
            if holder is None:
                await first.break_stream()
                await waiting.until(lambda: len(intake(cluster)._routers) == 1)
            second.cancel("a")
            second.resume("b")
            await second.ended("b")  # so the worker has read the cancel
            assert intake(cluster).states() == {"decoding" if holder else "ended": 1}
        cluster.gate.open()
        await cluster.nothing_left()
        gone = second.resume("a", b"mine")
        await second.ended("a")
        assert isinstance(gone.error, StaleReferenceError)


@pytest.mark.parametrize("ended", [False, True])
async def test_nobody_comes(pd: ModuleType, ended: bool) -> None:
    """The attempt ends after detach_s by its timer, and so does the keeping of one that has ended."""
    gate = pd.Gate(OPEN if ended else 3)
    config = {"detach_s": 0.1}
    async with pd.cluster(decode=lambda: pd.fake_model(before_execute=gate), decode_config=config) as cluster:
        async with pd.FakeRouter(cluster.decode.address) as first:
            submit = cluster.submit_message(attempt="a", prompt=pd.PROMPT)
            submit.keep = True
            answer = first.submit(submit)
            await (first.ended("a") if ended else gate.wait())
            assert (answer.finished is not None) == ended
        await waiting.until(lambda: not intake(cluster)._kept)
        gate.open()
        await cluster.nothing_left()
        assert intake(cluster)._budget.left == 64 * 1024 * 1024


async def test_a_worker_that_stops_ends_them(pd: ModuleType, held) -> None:
    cluster, first = held
    await lost(cluster, first)
    intake(cluster).fail_all()
    cluster.gate.open()
    async with asyncio.timeout(pd.DEADLINE_S):
        await intake(cluster).drained()
    assert not intake(cluster)._kept
