"""Loss of a prefill worker, by phase and policy: real processes, real UCX, a fake model.

The answer equals that of the undisturbed run token for token, or the request ends with a typed error; decode releases
everything, within the bound.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diptych.cli.worker_roles import services_of
from diptych.common.errors import DiptychError, TransferError, WorkerLostError
from diptych.rpc.v1 import router_pb2
from diptych.worker.liveness_timer import LivenessTimer
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting
from diptych_tests.pd import PROMPT, undisturbed
from diptych_tests.prefill import Prefill

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
RETRY, RECOMPUTE, FAIL = (
    router_pb2.FAILURE_POLICY_RETRY,
    router_pb2.FAILURE_POLICY_RECOMPUTE,
    router_pb2.FAILURE_POLICY_FAIL,
)
POLICIES = pytest.mark.parametrize(
    "policy",
    [
        pytest.param(RETRY, id="retry"),
        pytest.param(RECOMPUTE, id="recompute", marks=pytest.mark.slow),
        pytest.param(FAIL, id="fail", marks=pytest.mark.slow),
    ],
)

SILENCE_S = 2.0
"""For tests of a silent peer; elsewhere a bound that no test reaches."""
NEVER_S = 3600.0
ANSWER_S = 60.0


@asynccontextmanager
async def two_prefill_one_decode(
    pd: ModuleType, *, silence_s: float = NEVER_S, decode_gate: object = None, **decode_config: object
) -> AsyncIterator[tuple[Any, list[Prefill]]]:
    """`silence_s`: of prefill, which says three times within it that it is alive, and of decode, unless that has its own."""
    async with AsyncExitStack() as stack:
        prefill = await asyncio.gather(*(Prefill.start(f"prefill-{i}", leg_silence_s=silence_s) for i in range(2)))
        for child in prefill:
            stack.push_async_callback(child.stop)
        settings = {"leg_silence_s": silence_s, **decode_config}
        config = pd.worker_config("decode", "decode-0", transport="ucx", **settings)
        decode = WorkerRuntime(
            config, pd.fake_model(before_execute=decode_gate), make_transfer=make_transfer, make_services=services_of
        )
        await decode.start()
        stack.push_async_callback(decode.close)
        yield pd.Cluster(decode, []), prefill


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {}


def check(answer: Any, policy: int, tokens: list[int], errors: tuple[type[DiptychError], ...]) -> None:
    if policy == FAIL:
        assert isinstance(answer.error, errors), answer
        return
    assert answer.token_ids == tokens
    assert "prefill-0 failed" in answer.explanation.notes[0]
    assert ("trying prefill-1" if policy == RETRY else "local prefill") in answer.explanation.notes[0]
    if len(answer.explanation.notes) == 1:
        assert answer.explanation.prefill == ("prefill-1" if policy == RETRY else "decode-0")


@POLICIES
@pytest.mark.parametrize("after", [0, 2], ids=["before it starts", "in the middle of the transfer"])
async def test_killed(pd: ModuleType, expected: dict[str, list[int]], policy: int, after: int) -> None:
    tokens = await undisturbed(expected)
    async with two_prefill_one_decode(pd) as (cluster, prefill), pd.FakeRouter(cluster.decode.address) as router:
        await prefill[0].hold(after)
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, policy=policy, prefill=prefill))
        await prefill[0].held()
        prefill[0].process.kill()
        await router.ended("a")  # noticed by what broke: the bound of silence is far away
        check(answer, policy, tokens, (WorkerLostError, TransferError))
        await cluster.nothing_left()


async def test_killed_after_the_transfer_changes_nothing(pd: ModuleType, expected: dict[str, list[int]]) -> None:
    """The KV is transferred and decode runs: the loss has no effect, and nothing is recomputed."""
    tokens = await undisturbed(expected)
    gate = pd.Gate(5)
    async with (
        two_prefill_one_decode(pd, decode_gate=gate) as (cluster, prefill),
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = router.submit(
            cluster.submit_message(attempt="a", prompt=PROMPT, prefill=prefill, max_tokens=400, policy=FAIL)
        )
        await gate.wait()
        prefill[0].process.kill()
        await prefill[0].ended()
        gate.open()
        await router.ended("a")
        assert answer.error is None
        assert len(answer.token_ids) == 400
        assert answer.token_ids[: len(tokens)] == tokens
        assert answer.explanation.prefill == "prefill-0"
        assert not answer.explanation.notes
        await cluster.nothing_left()


@POLICIES
@pytest.mark.parametrize("after", [0, 2], ids=["before it starts", "in the middle of the transfer"])
async def test_stopped(pd: ModuleType, expected: dict[str, list[int]], policy: int, after: int) -> None:
    """SIGSTOP breaks no connection and completes nothing: it is only detected by silence. The worker has no effect when
    it continues."""
    tokens = await undisturbed(expected)
    async with (
        two_prefill_one_decode(pd, silence_s=SILENCE_S) as (cluster, prefill),
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        await prefill[0].hold(after)
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, policy=policy, prefill=prefill))
        await prefill[0].held()
        prefill[0].process.send_signal(signal.SIGSTOP)
        await router.ended("a")
        check(answer, policy, tokens, (WorkerLostError, TransferError))
        await cluster.nothing_left()
        prefill[0].process.send_signal(signal.SIGCONT)
        await prefill[0].ask("go")
        await prefill[0].ask("idle")  # what the zombie does with the old leg it has done by then
        again = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT[::-1], prefill=prefill[:1]))
        assert again.explanation.prefill == "prefill-0"
        assert not again.explanation.notes
        await cluster.nothing_left()


async def test_stopped_for_a_moment_is_only_slow(pd: ModuleType, expected: dict[str, list[int]]) -> None:
    tokens = await undisturbed(expected)
    async with (
        two_prefill_one_decode(pd, silence_s=ANSWER_S) as (cluster, prefill),
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        await prefill[0].hold(2)
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL, prefill=prefill))
        await prefill[0].held()
        prefill[0].process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{prefill[0].process.pid}/stat")
        await waiting.until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stands still")
        prefill[0].process.send_signal(signal.SIGCONT)
        await prefill[0].ask("go")
        await router.ended("a")
        assert answer.error is None
        assert answer.token_ids == tokens
        assert answer.explanation.prefill == "prefill-0"


async def test_computing_and_queueing_for_long_is_not_silence(
    pd: ModuleType, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await undisturbed(expected)
    words, hear = [], LivenessTimer.on_message
    monkeypatch.setattr(LivenessTimer, "on_message", lambda silence: words.append(silence) or hear(silence))
    # A busy machine can keep prefill from the CPU for two seconds: decode has more patience than prefill is told.
    async with (
        two_prefill_one_decode(pd, silence_s=SILENCE_S, leg_silence_s=ANSWER_S) as (cluster, prefill),
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        await prefill[0].hold(1)
        first = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL, prefill=prefill))
        await prefill[0].held()
        second = router.submit(cluster.submit_message(attempt="b", prompt=PROMPT, policy=FAIL, prefill=prefill))
        so_far = len(words)  # of two legs, each of which is given three words in the bound of silence
        await waiting.until(lambda: len(words) >= so_far + 12, "prefill speaks for twice the bound of silence")
        assert first.error is None
        await prefill[0].ask("go")
        await router.ended("a")
        await router.ended("b")
        assert (first.error, second.error) == (None, None)
        assert first.token_ids == second.token_ids == tokens


@POLICIES
async def test_damaged(pd: ModuleType, expected: dict[str, list[int]], policy: int) -> None:
    tokens = await undisturbed(expected)
    async with (
        two_prefill_one_decode(pd, fault_corrupt_every=5) as (cluster, prefill),
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=policy, prefill=prefill))
        check(answer, policy, tokens, (TransferError,))
        await cluster.nothing_left()


async def test_restarted_under_the_same_name_again_and_again(pd: ModuleType, expected: dict[str, list[int]]) -> None:
    tokens = await undisturbed(expected)
    async with two_prefill_one_decode(pd) as (cluster, prefill), pd.FakeRouter(cluster.decode.address) as router:
        open_fds = 0
        for life in range(3):
            answer = await router.run(cluster.submit_message(attempt=f"a{life}", prompt=PROMPT, prefill=prefill[:1]))
            assert answer.token_ids == tokens
            assert answer.explanation.prefill == "prefill-0"
            old = prefill[0]
            old.process.kill()
            await old.ended()
            prefill[0] = await Prefill.start("prefill-0")
            try:
                stale = cluster.submit_message(attempt=f"b{life}", prompt=PROMPT[::-1], prefill=[old], policy=FAIL)
                assert isinstance((await router.run(stale)).error, WorkerLostError)
                await cluster.decode.engine.reset_cache()
                fds = len(os.listdir("/proc/self/fd"))
                assert life == 0 or fds <= open_fds + 2, "file descriptors grow with each life of the peer"
                open_fds = fds
            except BaseException:
                await prefill[0].stop()
                raise
        await cluster.nothing_left()
        await prefill[0].stop()
