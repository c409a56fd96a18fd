"""A token's whole way, engine -> decode worker -> router -> client, over HTTP, gRPC and lookaside: real services on loopback
around an engine with a fake runner.

The runner is held by a gate, so that "while the answer still runs" is a fact and not a matter of speed: it computes what the
gate lets it, and the answer's end is behind the gate until the client has seen every token before it.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from diptych.cli.worker_roles import services_of
from diptych.client import AsyncClient
from diptych.common.clock import MonotonicClock
from diptych.common.compat import identified
from diptych.common.secret import create_secret
from diptych.common.store.memory import MemoryStore
from diptych.common.text.detokenizer import RequestDetokenizer
from diptych.common.text.revision import tokenizer_revision
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.messages import ScheduledSeq
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.server import ApiServers
from diptych.worker.model import identity_key
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests.waiting import until

WAIT_S = 60.0
"""Before a missing token fails the test."""
STEPS_S = (0.0003, 0.001, 0.002, 0.0043, 0.008, 0.02)
WAYS = ("http", "grpc", "lookaside")
VOCAB = 64
MODEL_REVISION = "m1"  # a router whose folder holds no weights takes any
PROMPT = [1, 2, 3, 4, 5]


class Gate:
    """Lets the runner compute steps, and counts the tokens that it samples."""

    def __init__(self) -> None:
        self._may = threading.Semaphore(0)
        self._armed = False
        self._lock = threading.Lock()
        self.step_s = 0.0
        self.left = 0
        """Steps that it may still begin; -1: it waits for leave, and all that it sampled before went out."""
        self.sampled: Counter[str] = Counter()
        """By attempt, in the steps that have begun."""

    def arm(self, steps: int, step_s: float = 0.0) -> None:
        """Allow this many further steps, of at least step_s seconds."""
        self._armed, self.step_s = True, step_s
        self.sampled.clear()
        self.let(steps)

    def let(self, steps: int) -> None:
        with self._lock:
            self.left += steps
        for _ in range(steps):
            self._may.release()

    def disarm(self) -> None:
        self._armed = False
        self._may.release()

    def before_execute(self, seqs: Sequence[ScheduledSeq]) -> None:
        if not self._armed:
            return
        with self._lock:
            self.left -= 1
        assert self._may.acquire(timeout=WAIT_S), "the test forgot the runner"
        self.sampled.update(seq.attempt for seq in seqs if seq.sample)
        if self.step_s:
            time.sleep(self.step_s)  # sleep: how long a step is; what is seen of it the gate decides


class Served:
    """The cluster's address, its runner's gate, and the number of answers given to the engine."""

    def __init__(self, http: str, grpc: str, gate: Gate, in_engine: Callable[[], int]) -> None:
        self.http, self.grpc, self.gate, self.in_engine = http, grpc, gate, in_engine

    async def stream(self, way: str, max_tokens: int) -> AsyncIterator[int]:
        """Number of tokens in each message with tokens."""
        if way == "http":
            async for count in self._over_http(max_tokens):
                yield count
            return
        async with AsyncClient(self.grpc, lookaside=way == "lookaside", timeout_s=WAIT_S) as client:
            options = {"token_ids": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
            async with client.stream(**options) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        yield len(delta.token_ids)

    async def _over_http(self, max_tokens: int) -> AsyncIterator[int]:
        body = {
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        async with (
            httpx.AsyncClient(timeout=WAIT_S) as client,
            client.stream("POST", f"http://{self.http}/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    count = len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
                    if count:
                        yield count


@pytest.fixture
async def served(pd: ModuleType, model_folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    async with _running(pd, model_folder, tmp_path) as served:
        yield served


@asynccontextmanager
async def _running(pd, folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    secret = tmp_path / "secret"
    create_secret(secret)
    store = MemoryStore(MonotonicClock())
    gate = Gate()
    worker_config = pd.worker_config(
        "decode",
        "decode-0",
        model=str(folder),
        secret_file=str(secret),
        client_port=0,
        heartbeat_s=0.05,
        stall_bound_s=WAIT_S,  # a runner that waits at the gate is not stuck
        grammar_backend="none",
    )
    model = pd.fake_model(vocab_size=VOCAB, before_execute=gate.before_execute)
    revisions = MODEL_REVISION, tokenizer_revision(folder)
    facts = replace(model.compat, model_revision=revisions[0], tokenizer_revision=revisions[1])
    identity, compat = identified(facts, identity_key(worker_config))
    tokenizer = ModelTokenizer(folder)
    model = replace(
        model,
        compat=compat,
        identity=identity,
        detokenizer_factory=lambda sampling, prompt: RequestDetokenizer(tokenizer, sampling.stop, prompt=prompt),
    )
    worker = WorkerRuntime(worker_config, model, make_transfer=make_transfer, make_services=services_of, store=store)
    router_config = RouterConfig(
        model=str(folder),
        secret_file=str(secret),
        worker_poll_s=0.05,
        worker_dead_s=WAIT_S,  # of a machine that hardly gets anywhere
        require_prefill=False,
        local_prefill_max_tokens=2**31 - 1,
    )
    frontend = Frontend(router_config, store=store, clock=MonotonicClock(), rng=random.Random(1))
    servers = ApiServers("127.0.0.1", 0, 0)
    try:
        await worker.start()
        await frontend.start()
        addresses = await servers.start(frontend, frontend.metrics)
        life = (worker.worker_id, worker.incarnation)
        await until(lambda: frontend.ready()[0] and frontend._cluster.direct_endpoint(life) is not None)
        yield Served(addresses.http, addresses.grpc, gate, lambda: worker.role.services["decode"].intake.num_attempts)
    finally:
        gate.disarm()
        await servers.stop(1.0)
        await frontend.close()
        await worker.close()


@pytest.mark.parametrize("way", WAYS)
async def test_15_3_1_each_token_is_delivered_before_the_next_is_computed(served, way):
    """The runner computes a token only once the client has the one before."""
    count = 40
    served.gate.arm(1)
    seen = 0
    async with asyncio.timeout(WAIT_S):
        async for tokens in served.stream(way, count):
            assert tokens == 1
            seen += 1
            served.gate.let(1)
    assert seen == count


@pytest.mark.parametrize("step_s", STEPS_S)
@pytest.mark.parametrize("way", WAYS)
async def test_15_3_1_all_that_was_computed_is_delivered_while_the_answers_run(served, way, step_s):
    """Steps of any length follow one another freely; where the runner stops, in the middle of the answers, clients have all."""
    answers, steps, count = 4, 30, 40
    seen = [0] * answers

    async def read(i):
        async for tokens in served.stream(way, count):
            seen[i] += tokens

    served.gate.arm(0, step_s)
    readers = [asyncio.create_task(read(i)) for i in range(answers)]
    await until(lambda: served.in_engine() == answers)
    served.gate.let(steps)
    await until(lambda: served.gate.left < 0)
    sampled = served.gate.sampled.copy()
    assert len(sampled) == answers
    assert steps / 2 < max(sampled.values()) < count
    await until(lambda: sorted(seen) == sorted(sampled.values()))
    served.gate.disarm()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*readers)
    assert seen == [count] * answers
