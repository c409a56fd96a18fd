"""The expected tokens and KV of every prompt, computed once by an undisturbed engine."""

from __future__ import annotations

from functools import cache

from handoff_sim.engine import BLOCK, IDENTITY, LAYERS, MAX_LEN, make_runner

from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, ScheduledSeq
from diptych.engine.offline import OfflineEngine

MAX_TOKENS = 6
LENGTHS = (1, 3, 4, 7, 8, 12, 15, 16, 17, 23, 31)


@cache
def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family share their beginning."""
    return tuple((family * 131 + i * 17 + 5) % 900 for i in range(length))


def sampling(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


@cache
def tokens(family: int, length: int, seed: int) -> tuple[int, ...]:
    config = EngineConfig(
        num_blocks=16, block_size=BLOCK, max_num_batched_tokens=64, max_step_time_s=None, mixed_step_time_s=None
    )
    engine = OfflineEngine(LocalExecutor(make_runner(16)), config, IDENTITY)
    request = EngineRequest("reference", Prompt(prompt(family, length)), sampling(seed, MAX_TOKENS))
    return tuple(engine.generate([request])[0].token_ids)


@cache
def _pool(ids: tuple[int, ...]) -> FakeRunner:
    runner = make_runner(MAX_LEN // BLOCK)
    table = list(range(MAX_LEN // BLOCK))
    runner.execute([ScheduledSeq("kv", list(ids), 0, (table,), False, sampling(0, 1), 0)])
    return runner


@cache
def kv(ids: tuple[int, ...], first_token: int, num_tokens: int, layers: range) -> bytes:
    """As packed: tokens [first_token, first_token + num_tokens) of these ids."""
    runner = _pool(ids)
    out = bytearray(num_tokens * runner.kv_bytes_per_token * len(layers) // LAYERS)
    first, end = first_token // BLOCK, -(-(first_token + num_tokens) // BLOCK)
    runner.pack(list(range(first, end)), num_tokens, memoryview(out), layers)
    return bytes(out)
