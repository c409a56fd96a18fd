"""Files of blocks, through real workers on the fake runner: a restart serves and announces them, prefill and decode use them, and
nothing but the time changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from diptych.cli.worker_roles import services_of
from diptych.common.block_identity import block_keys
from diptych.common.clock import MonotonicClock
from diptych.common.compat import identified
from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format, windowed_format
from diptych.common.kv_parts import split
from diptych.common.store.memory import MemoryStore
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.starting import RankSpec
from diptych.engine.sched.lifecycle import publishing, restores
from diptych.engine.stats import TierStats
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import BlockIndex, IndexMode
from diptych.rpc.v1 import types_pb2
from diptych.worker import disk_tier, wire
from diptych.worker.disk_tier import num_disk_blocks, open_disk
from diptych.worker.model import LoadedModel
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

PROMPT = [*range(300, 353)]


@asynccontextmanager
async def a_worker(
    pd: ModuleType,
    root: Path,
    store: MemoryStore | None = None,
    role: str = "decode",
    model: LoadedModel | None = None,
    **settings: object,
) -> AsyncIterator[WorkerRuntime]:
    config = pd.worker_config(role, f"{role}-0", heartbeat_s=0.02, lease_s=600.0, disk_kv_dir=str(root), **settings)
    worker = WorkerRuntime(
        config, model or pd.fake_model(), make_transfer=make_transfer, make_services=services_of, store=store
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def disk(worker: WorkerRuntime) -> TierStats:
    [found] = [tier for tier in worker.engine.stats().tiers if tier.name == "disk"]
    return found


@pytest.fixture(autouse=True)
def buffers_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has 64 MiB of them, and blocks here have some hundred bytes."""
    monkeypatch.setattr(disk_tier, "DiskBlockStore", partial(disk_tier.DiskBlockStore, buffer_bytes=1 << 16))


@pytest.fixture(autouse=True)
def files_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner computes faster than any disk reads; and no restore is given up on a loaded machine."""
    for user in (restores, publishing):
        monkeypatch.setattr(user, "restore_is_cheaper", lambda num_tokens, rates: True)
        monkeypatch.setattr(user, "LEAST_S", 60.0)


async def ask(pd: ModuleType, decode: WorkerRuntime, prefill: list[WorkerRuntime]) -> Any:
    """One answer of 12 tokens."""
    both = pd.Cluster(decode, prefill)
    async with pd.FakeRouter(decode.address) as router:
        answer = await router.run(both.submit_message(attempt="a", prompt=PROMPT, max_tokens=12))
    assert answer.error is None, answer.error
    return answer


async def written(worker: WorkerRuntime, num_blocks: int) -> None:
    size = worker.model.compat.kv.block_bytes
    await waiting.until(lambda: disk(worker).used_bytes == num_blocks * size)


async def test_a_worker_that_starts_again_serves_its_files_and_announces_them(pd: ModuleType, tmp_path: Path) -> None:
    block = pd.BLOCK
    whole = (len(PROMPT) + 12 - 1) // block
    async with a_worker(pd, tmp_path) as worker:
        cold = await ask(pd, worker, [])
        await written(worker, whole)
    store = MemoryStore(MonotonicClock())
    async with a_worker(pd, tmp_path, store) as worker:
        await written(worker, whole)
        # routers learn of them from events alone
        index = BlockIndex()
        index.register("decode-0", worker.incarnation, 0, 0)

        async def announced() -> bool:
            found = (await store.read_events({"decode-0": "0"}, block_s=0.0)).get("decode-0", [])
            index.apply_all("decode-0", [event for _, event in found])
            return len(index.keys_of("decode-0", 2)) == whole

        await waiting.until(announced)
        assert index.mode("decode-0") is IndexMode.EXACT
        keys = block_keys(worker.model.identity, PROMPT)
        runs, column = index.runs(as_keys(keys)), index.column("decode-0")
        assert column is not None
        assert runs.lower_blocks is not None
        assert (runs.blocks[column], list(runs.lower_blocks[:, column])) == (len(keys), [0, len(keys)])
        [record] = await store.list_workers()
        [tier] = [tier for tier in record.tiers if tier.name == "disk"]
        assert tier.num_bytes > 0
        assert tier.bytes_per_s > 0
        before = worker.engine.stats().computed_tokens_total
        warm = await ask(pd, worker, [])
        assert warm.token_ids == cold.token_ids
        hit = (len(PROMPT) - 1) // block * block
        assert worker.engine.stats().computed_tokens_total - before == len(PROMPT) - hit
        why = warm.explanation
        assert [(part.tier, part.tokens) for part in why.cached_tiers_decode] == [("disk", hit)]
        assert why.cached_tokens_decode == hit
        assert disk(worker).hit_tokens == hit
        assert (await worker.audit(full=True)).violations == []


async def test_after_a_restart_others_take_what_is_in_its_files(pd: ModuleType, tmp_path: Path) -> None:
    """Decode has the KV of the first turn in files alone, and prefill computes at most a block of it, and vouches for all."""
    block = pd.BLOCK
    async with a_worker(pd, tmp_path) as worker:
        first = await ask(pd, worker, [])
        await written(worker, (len(PROMPT) + 12 - 1) // block)
    turn_2 = [*PROMPT, *first.token_ids, *range(600, 621)]
    held = (len(PROMPT) + 12 - 1) // block * block
    async with (
        a_worker(pd, tmp_path) as decode,
        a_worker(pd, tmp_path / "prefill", role="prefill") as prefill,
        pd.FakeRouter(decode.address) as router,
    ):
        cluster = pd.Cluster(decode, [prefill])
        message = cluster.submit_message(attempt="a", prompt=turn_2, max_tokens=8)
        plan = types_pb2.KvSource(holder=wire.ref_to_proto(decode.ref), num_tokens=held, compute_s=3600.0)
        message.placement.prefill_source.CopyFrom(plan)
        before = prefill.engine.stats().computed_tokens_total
        answer = await router.run(message)
        assert answer.error is None, answer.error
        assert prefill.engine.stats().computed_tokens_total - before == len(turn_2) - held
        [pull] = answer.explanation.pulls
        assert (pull.holder, pull.num_tokens, pull.note) == ("decode-0", held, "")
        assert [(part.tier, part.tokens) for part in pull.source_tiers] == [("disk", held)]
        assert (disk(decode).served_tokens, disk(decode).hit_tokens) == (held, 0)  # they were hits on prefill
        assert decode.metrics.totals()["kv_tier_served_tokens"] == {"device": 0.0, "disk": float(held)}
        assert (await decode.audit(full=True)).violations == []
        assert (await prefill.audit(full=True)).violations == []
    async with a_worker(pd, tmp_path / "alone") as alone, pd.FakeRouter(alone.address) as router:
        message = pd.Cluster(alone, []).submit_message(attempt="a", prompt=turn_2, max_tokens=8)
        assert (await router.run(message)).token_ids == answer.token_ids


async def test_prefill_reads_its_files_and_vouches_for_them(pd: ModuleType, tmp_path: Path) -> None:
    hit = (len(PROMPT) - 1) // pd.BLOCK * pd.BLOCK
    answers = []
    for decodes in ("first", "second"):
        async with a_worker(pd, tmp_path, role="prefill") as prefill, a_worker(pd, tmp_path / decodes) as decode:
            answers.append(await ask(pd, decode, [prefill]))
            await written(prefill, len(PROMPT) // pd.BLOCK)
            computed = prefill.engine.stats().computed_tokens_total
    cold, warm = answers
    assert warm.token_ids == cold.token_ids
    assert computed - 2 * pd.BLOCK <= len(PROMPT) - hit + 2  # the warm-up's, too
    why = warm.explanation
    assert [(part.tier, part.tokens) for part in why.cached_tiers_prefill] == [("disk", hit)]
    assert list(why.cached_tiers_decode) == []


def of_windows(pd: ModuleType) -> LoadedModel:
    """Two KV groups, of which one sees nine tokens back."""
    model: LoadedModel = pd.fake_model(windows=(0, 9, 9))
    return model


def of_two_ranks(pd: ModuleType) -> LoadedModel:
    """Processes of their own, with half of the heads each."""
    spec = RankSpec(
        "diptych.engine.fake_runner:FakeRunner", {"num_blocks": 64, "block_size": pd.BLOCK, "vocab_size": pd.VOCAB}
    )
    executor = RanksExecutor([spec, spec], sampler=1, deadline_s=120.0)
    kv = full_format(2, 2, 4, block_size=pd.BLOCK, dtype="int8")
    compat = replace(pd.fake_model().compat, kv=kv, kv_parts=split(kv, tensor_parallel=2))
    identity, compat = identified(compat, bytes(32))
    runner: Any = SimpleNamespace(capabilities=executor.capabilities, expect_compiled=lambda: None)
    return LoadedModel(runner, compat, identity, None, executor=executor)


def of_two_stages(pd: ModuleType) -> LoadedModel:
    """Processes of their own, each with layers of one of two KV groups. The second one draws by its own."""
    specs = [
        RankSpec(
            "diptych.engine.fake_runner:FakeRunner",
            {"num_blocks": 64, "block_size": pd.BLOCK, "vocab_size": pd.VOCAB, "windows": windows, "groups": [group]},
        )
        for group, windows in enumerate(([0, 0], [9, 9]))
    ]
    kv = windowed_format([0, 0, 9, 9], 1, 4, block_size=pd.BLOCK, dtype="int8")
    parts = split(kv, pipeline=2)
    executor = RanksExecutor(specs, sampler=1, deadline_s=120.0, kv=kv, parts=parts)
    identity, compat = identified(replace(pd.fake_model().compat, kv=kv, kv_parts=parts), bytes(32))
    runner: Any = SimpleNamespace(capabilities=executor.capabilities, expect_compiled=lambda: None)
    return LoadedModel(runner, compat, identity, None, executor=executor)


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("make", [of_windows, of_two_ranks, of_two_stages])
async def test_files_have_the_blocks_of_every_group_and_of_every_rank(
    pd: ModuleType, tmp_path: Path, make: Callable[[ModuleType], LoadedModel]
) -> None:
    hit, answers = (len(PROMPT) - 1) // pd.BLOCK * pd.BLOCK, []
    for _ in range(2):
        async with a_worker(pd, tmp_path, model=make(pd)) as worker:
            before = worker.engine.stats().computed_tokens_total
            answers.append(await ask(pd, worker, []))
            computed = worker.engine.stats().computed_tokens_total - before
            await written(worker, (len(PROMPT) + 12 - 1) // pd.BLOCK)
            assert (await worker.audit(full=True)).violations == []
    cold, warm = answers
    assert warm.token_ids == cold.token_ids
    assert [(part.tier, part.tokens) for part in warm.explanation.cached_tiers_decode] == [("disk", hit)]
    assert computed == len(PROMPT) - hit


async def test_another_model_finds_nothing(pd: ModuleType, tmp_path: Path) -> None:
    async with a_worker(pd, tmp_path) as worker:
        await ask(pd, worker, [])
        await written(worker, (len(PROMPT) + 11) // pd.BLOCK)
        mine = worker.model
    other = replace(mine, identity=replace(mine.identity, model_revision="model-2"), runner=pd.fake_model().runner)
    config = pd.worker_config("decode", "decode-0", disk_kv_dir=str(tmp_path))
    worker = WorkerRuntime(config, other, make_transfer=make_transfer, make_services=services_of)
    await worker.start()
    try:
        assert disk(worker).used_bytes == 0
    finally:
        await worker.close()


@pytest.mark.parametrize(("backend", "shared"), [("fake", True), ("triton", False)])
def test_another_role_finds_nothing_where_its_bits_may_differ(
    pd: ModuleType, tmp_path: Path, backend: str, shared: bool
) -> None:
    """As on a GPU without --batch-invariant."""
    model, names = pd.fake_model(), []
    compat = replace(model.compat, backend=backend)
    for role in ("decode", "prefill"):
        store = open_disk(
            pd.worker_config(role, "w", disk_kv_dir=str(tmp_path)), compat, model.identity, "w", MonotonicClock()
        )
        assert store is not None
        store.close(1.0)
        names.append([path.name for path in (tmp_path / "w").iterdir() if path.is_dir()])
    assert (names[0] == names[1]) is shared


async def test_two_workers_of_one_name_never_share_a_folder(pd: ModuleType, tmp_path: Path) -> None:
    async with a_worker(pd, tmp_path):
        with pytest.raises(ConfigError, match="disk_kv_dir.*another process"):
            async with a_worker(pd, tmp_path):
                pass


async def test_metrics_by_tier(pd: ModuleType, tmp_path: Path) -> None:
    async with a_worker(pd, tmp_path) as worker:
        await ask(pd, worker, [])
        await written(worker, (len(PROMPT) + 11) // pd.BLOCK)
        totals = worker.metrics.totals()
        assert totals["kv_tier_hit_tokens"] == {"device": 0.0, "disk": 0.0}
        assert totals["kv_tier_errors"] == {}
        text = worker.metrics.expose().decode()
        assert (
            f'kv_tier_used_bytes{{role="decode",tier="disk",worker="decode-0"}} {float(disk(worker).used_bytes)}'
            in text
        )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"disk_kv_bytes": 10}, "disk_kv_bytes"),
        ({"enable_prefix_caching": False}, "disk_kv_dir"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    pd: ModuleType, tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    model = pd.fake_model()
    config = pd.worker_config("decode", "decode-0", disk_kv_dir=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match=named):
        num_disk_blocks(config, model.compat)
