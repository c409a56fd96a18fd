"""A rank of a worker is killed (kill -9) or stopped (SIGSTOP) in each phase of a request: the worker ends with all its ranks, and
what it computed is computed elsewhere, with the same tokens. Ranks are processes with fake runners; the workers are real, in
this process. Ranks of a model, under `diptych up` with its supervisor: `make chaos-kill-ranks`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.common.compat import Compat, identified
from diptych.common.errors import WorkerLostError
from diptych.common.kv_format import full_format
from diptych.common.kv_parts import split
from diptych.engine.executor import ExecutorLost
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.starting import RankSpec
from diptych.worker.model import LoadedModel
from diptych_tests import pd

pytestmark = pytest.mark.multiproc
GENEROUS_S = 120.0
PROMPT = [(7 * i + 3) % 1000 for i in range(90)]


class Held:
    """An executor of ranks, one of whose calls waits until a test lets it go on."""

    def __init__(self, executor: RanksExecutor, call: str, after: int) -> None:
        self.executor = executor
        self.processes = [rank.process for rank in executor._ranks]
        self.reached, self._open, self._left = threading.Event(), threading.Event(), after
        inner = getattr(executor, call)

        def held(*arguments: Any) -> Any:
            mine = call != "execute" or all(seq.attempt != "warm-up" for seq in arguments[0])
            if mine:
                self._left -= 1
                if self._left < 0 and not self._open.is_set():
                    self.reached.set()
                    self._open.wait(GENEROUS_S)
            return inner(*arguments)

        setattr(executor, call, held)

    async def lose_a_rank(self, signum: int) -> None:
        """At the held call, which then goes on."""
        assert await asyncio.to_thread(self.reached.wait, GENEROUS_S)
        self.processes[1].send_signal(signum)
        self._open.set()

    @property
    def all_gone(self) -> bool:
        return all(process.poll() is not None for process in self.processes)


@pytest.fixture
def ranks(forked_ranks: None) -> Iterator[Callable[..., Callable[[], LoadedModel]]]:
    """ranks(held call, after how many) -> a factory of models of two ranks; `ranks.of[executor]` is what holds it."""
    held: dict[RanksExecutor, Held] = {}

    def choose(call: str = "execute", after: int = 10**6) -> Callable[[], LoadedModel]:
        def make() -> LoadedModel:
            kv = full_format(4, 2, 4, block_size=16, dtype="int8")
            spec = RankSpec(
                "diptych.engine.fake_runner:FakeRunner",
                {"num_blocks": 64, "block_size": 16, "vocab_size": 1000, "num_layers": 4},
            )
            executor = RanksExecutor([spec, spec], sampler=0, deadline_s=GENEROUS_S, silence_s=2.0)
            held[executor] = Held(executor, call, after)
            compat = Compat(
                model="fake", model_revision="model-1", tokenizer_revision="tokenizer-1", kv=kv, compute_dtype="int8",
                attention_version="fake-1", sampler_version="fake-1", kv_parts=split(kv, tensor_parallel=2),
            )  # fmt: skip
            identity, compat = identified(compat, bytes(32))
            runner: Any = SimpleNamespace(capabilities=executor.capabilities, expect_compiled=lambda: None)
            return LoadedModel(runner, compat, identity, None, executor=executor)

        return make

    choose.of = held  # type: ignore[attr-defined]
    yield choose
    for executor in held:
        executor.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("call", "after", "signum"),
    [
        pytest.param("execute", 1, signal.SIGKILL, id="killed in the middle of the prompt"),
        pytest.param("pack", 1, signal.SIGSTOP, id="stopped in the hand-off"),
        pytest.param("execute", 0, signal.SIGSTOP, id="stopped when the request is queued", marks=SLOW),
        pytest.param("execute", 1, signal.SIGSTOP, id="stopped in the middle of the prompt", marks=SLOW),
        pytest.param("pack", 1, signal.SIGKILL, id="killed in the hand-off", marks=SLOW),
        pytest.param("execute", 0, signal.SIGKILL, id="killed when the request is queued", marks=SLOW),
    ],
)
async def test_prefill_loses_a_rank(ranks: Any, call: str, after: int, signum: int) -> None:
    """Decode computes the prompt itself."""
    async with pd.cluster(decode=ranks(), prefill=ranks(call, after)) as cluster:
        prefill = cluster.prefill[0].model.executor
        async with pd.FakeRouter(cluster.decode.address) as router:
            alone = await router.run(cluster.submit_message(attempt="alone", prompt=PROMPT, prefill=[], local=True))
            await cluster.decode.engine.reset_cache()
            running = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
            held = ranks.of[prefill]
            await held.lose_a_rank(signum)
            await router.ended("a")
            assert running.token_ids == alone.token_ids
            assert running.explanation.local_prefill
            async with asyncio.timeout(GENEROUS_S):
                await cluster.prefill[0].ended.wait()
            assert held.all_gone
            await cluster.settle(cluster.decode)


@pytest.mark.parametrize(
    ("after", "signum"),
    [
        pytest.param(9, signal.SIGSTOP, id="stopped while it decodes"),
        pytest.param(9, signal.SIGKILL, id="killed while it decodes", marks=SLOW),
        pytest.param(0, signal.SIGKILL, id="killed at the first step", marks=SLOW),
    ],
)
async def test_decode_loses_a_rank(ranks: Any, after: int, signum: int) -> None:
    """Its attempts fail as those of a lost worker, which a router continues elsewhere from the tokens that it has."""
    async with pd.cluster(num_prefill=0, decode=ranks("execute", after)) as cluster:
        held = ranks.of[cluster.decode.model.executor]
        async with pd.FakeRouter(cluster.decode.address) as router:
            answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=30))
            await held.lose_a_rank(signum)
            await router.ended("a")
            assert isinstance(answer.error, WorkerLostError)
            assert len(answer.token_ids) < 30
            async with asyncio.timeout(GENEROUS_S):
                await cluster.decode.ended.wait()
        assert held.all_gone
        with pytest.raises(ExecutorLost):
            held.executor.copy_blocks([])
