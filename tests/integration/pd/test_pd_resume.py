"""A router dies and another one goes on with its attempts, at a real decode worker."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from diptych.common.errors import InvalidRequestError, RequestCancelledError, StaleReferenceError
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
            submit.idempotency, submit.resume_ref = b"key", "ref of a"
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


async def test_an_attempt_is_found_by_its_key_while_it_is_kept(pd: ModuleType, held) -> None:
    """The latest one of a key; until it is cancelled, here by the router that has it."""
    cluster, first = held
    async with pd.FakeRouter(cluster.decode.address) as second:
        assert await second.find(b"key") == "ref of a"
        assert [await second.find(key) for key in (b"", b"other", b"key" * 10)] == ["", "", ""]
        again = cluster.submit_message(attempt="b", prompt=pd.PROMPT)
        again.keep, again.idempotency, again.resume_ref = True, b"key", "ref of b"
        second.submit(again)
        await waiting.until(lambda: "b" in intake(cluster)._kept)
        assert await second.find(b"key") == "ref of b"
        first.cancel("a")
        cluster.gate.open()
        await second.ended("b")
        assert await second.find(b"key") == "ref of b", "it has ended well, and is kept"
        intake(cluster)._drop("b")
        assert await second.find(b"key") == ""
        assert not intake(cluster)._by_key


@pytest.mark.parametrize(("field", "value"), [("idempotency", b"k" * 65), ("resume_ref", "r" * 1025)])
async def test_what_is_kept_for_a_key_is_bounded(pd: ModuleType, held, field: str, value: object) -> None:
    cluster, first = held
    submit = cluster.submit_message(attempt="b", prompt=pd.PROMPT)
    submit.keep, submit.idempotency = True, b"k"
    setattr(submit, field, value)
    answer = first.submit(submit)
    await first.ended("b")
    assert isinstance(answer.error, InvalidRequestError)
    assert answer.error.param == field
    assert "b" not in intake(cluster)._kept
