"""The expected tokens and KV of every prompt, computed once by an undisturbed engine."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from handoff_sim.engine import BLOCK, MAX_LEN, WINDOWS, Degrees, facts_of, make_ranks, make_runner, ranks_of

from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, ScheduledSeq
from diptych.engine.offline import OfflineEngine
from diptych_tests.fake_ranks import FakeRanks, RanksTogether

MAX_TOKENS = 6
FAMILIES, SEEDS = range(2), range(3)
LENGTHS = (1, 3, 4, 7, 8, 12, 15, 16, 17, 23, 31)


@cache
def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family share their beginning."""
    return tuple((family * 131 + i * 17 + 5) % 900 for i in range(length))


def sampling(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


@cache
def tokens(
    family: int, length: int, seed: int, windows: tuple[int, ...] = (), *, ranks: bool = False
) -> tuple[int, ...]:
    """`ranks`: of the model of schedules with ranks, whose answers do not depend on their number."""
    config = EngineConfig(
        num_blocks=16, block_size=BLOCK, max_num_batched_tokens=64, max_step_time_s=None, mixed_step_time_s=None
    )
    one: Any = RanksTogether(make_ranks((1, 1), 16, windows)) if ranks else LocalExecutor(make_runner(16, windows))
    engine = OfflineEngine(one, config, facts_of(windows).identity)
    request = EngineRequest("reference", Prompt(prompt(family, length)), sampling(seed, MAX_TOKENS))
    return tuple(engine.generate([request])[0].token_ids)


@cache
def compute_all() -> None:
    """Every answer that a schedule may ask for."""
    for windows in ((), *WINDOWS):
        for family, length, seed in itertools.product(FAMILIES, LENGTHS, SEEDS):
            tokens(family, length, seed, windows)


@cache
def kv_of_rank(
    ids: tuple[int, ...],
    first_token: int,
    num_tokens: int,
    layers: range,
    degrees: Degrees,
    part: int,
    windows: tuple[int, ...] = (),
    group: int = 0,
) -> bytes:
    """As a rank packs it. Args: group: of those of the rank."""
    runner, own = _ranks(ids, degrees, windows), ranks_of(degrees, windows)[part]
    size = own.groups[group].layer_bytes_per_token(own.shard)
    out = bytearray(num_tokens * size * len(layers))
    blocks = range(first_token // BLOCK, -(-(first_token + num_tokens) // BLOCK))
    runner.pack_part(list(blocks), num_tokens, memoryview(out), layers, part, group)
    return bytes(out)


@cache
def _ranks(ids: tuple[int, ...], degrees: Degrees, windows: tuple[int, ...]) -> FakeRanks:
    num_blocks = MAX_LEN // BLOCK
    runner = make_ranks(degrees, num_blocks, windows, PoolDemand(num_blocks, MAX_LEN))
    tables = (list(range(num_blocks)),) * len(runner.kv.groups)
    runner.execute([ScheduledSeq("kv", list(ids), 0, tables, False, sampling(0, 1), 0, (0,) * len(tables))])
    return runner


@cache
def _pool(ids: tuple[int, ...], windows: tuple[int, ...]) -> FakeRunner:
    """Its tables hold every block of every group."""
    num_blocks = MAX_LEN // BLOCK
    runner = make_runner(num_blocks, windows, PoolDemand(num_blocks, MAX_LEN))
    tables = (list(range(num_blocks)),) * len(runner.pools)
    firsts = (0,) * len(runner.pools)
    runner.execute([ScheduledSeq("kv", list(ids), 0, tables, False, sampling(0, 1), 0, firsts)])
    return runner


@cache
def kv(
    ids: tuple[int, ...],
    first_token: int,
    num_tokens: int,
    layers: range | None = None,
    windows: tuple[int, ...] = (),
    group: int = 0,
) -> bytes:
    """As packed: tokens [first_token, first_token + num_tokens) of these ids, of these layers of a group; None: of all."""
    runner = _pool(ids, windows)
    one = runner.kv.groups[group]
    out = bytearray(num_tokens * one.layer_bytes_per_token(runner.kv.shard) * len(layers or one.layers))
    first, end = first_token // BLOCK, -(-(first_token + num_tokens) // BLOCK)
    runner.pack(list(range(first, end)), num_tokens, memoryview(out), layers, group)
    return bytes(out)
