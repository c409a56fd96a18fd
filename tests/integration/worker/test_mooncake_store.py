"""Workers that share a real Mooncake store; where its package is not installed, test_block_keepers.py has what it does."""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest

from diptych.cli.up.processes import free_port
from diptych.cli.worker_roles import services_of
from diptych.common import child
from diptych.common.clock import MonotonicClock
from diptych.common.errors import ConfigError
from diptych.engine.disk_messages import DiskBlock
from diptych.engine.sched.lifecycle import restores
from diptych.kvtransfer.disk.block_file import BadBlockError, identity_of
from diptych.kvtransfer.disk.mooncake import MooncakeKeeper, check, connect, purge
from diptych.worker.disk_tier import open_disk
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None, reason="mooncake-transfer-engine is not installed"
    ),
]

PROMPT = [*range(300, 353)]
SEGMENT = 48 << 20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a master, of whose store each worker gives a part."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.origin is not None
    port = free_port("127.0.0.1")
    flags = {"rpc_port": port, "metrics_port": free_port("127.0.0.1"), "rpc_address": "127.0.0.1", "rpc_thread_num": 2}
    command = [
        str(Path(found.origin).parent / "mooncake_master"),
        *(f"-{name}={value}" for name, value in flags.items()),
    ]
    url = f"mooncake://127.0.0.1:{port}?segment_bytes={SEGMENT}"

    def is_there() -> bool:
        assert process.poll() is None, (tmp_path / "master.log").read_text()
        try:
            check(url)
        except ConfigError:
            return False
        return True

    with (tmp_path / "master.log").open("wb") as log, child.start(command, stdout=log, stderr=log) as process:
        try:
            waiting.wait_until(is_there, what="the master answers")
            yield url
        finally:
            process.kill()
            process.wait(waiting.DEADLINE_S)


def test_a_keeper_on_a_real_store(master: str) -> None:
    size = 1 << 20
    keeper = MooncakeKeeper(connect(master, size), identity_of("m"), size)
    try:
        blocks = [DiskBlock(number.to_bytes(16, "big"), "a" * 32, number) for number in range(64)]
        pieces = [memoryview(bytearray(b"x" * 1000)), memoryview(bytearray(b"y" * (size - 1000)))]
        into = [memoryview(bytearray(1000)), memoryview(bytearray(size - 1000))]
        with pytest.raises(BadBlockError, match="missing"):
            keeper.read(blocks[0], into)
        keeper.sync([keeper.write(blocks[0], pieces)])
        assert (keeper.has(blocks[0]), keeper.has(blocks[1])) == (True, False)
        keeper.read(blocks[0], into)
        assert into == pieces
        keeper.remove(blocks[0])  # read a moment ago
        keeper.remove(blocks[0])
        assert not keeper.has(blocks[0])

        def fill() -> None:
            for block in blocks:
                keeper.write(block, pieces)

        with pytest.raises(OSError, match="-200") as error:
            fill()
        assert error.value.errno == errno.ENOSPC
    finally:
        keeper.close()


def test_a_purge_of_a_real_store(master: str) -> None:
    keeper = MooncakeKeeper(connect(master, 64), identity_of("m"), 64)
    try:
        blocks = [DiskBlock(bytes([number]) * 16, tenant * 32, number) for tenant in "ab" for number in range(3)]
        for block in blocks:
            keeper.write(block, [memoryview(bytearray(64))])
        keeper.read(blocks[0], [memoryview(bytearray(64))])
        assert purge(master, "a" * 32) == 3
        assert [keeper.has(block) for block in blocks] == [False] * 3 + [True] * 3
        assert purge(master) == 3
        assert purge(master) == 0
    finally:
        keeper.close()


@asynccontextmanager
async def a_worker(pd: ModuleType, name: str, url: str) -> AsyncIterator[WorkerRuntime]:
    config = pd.worker_config("decode", name, heartbeat_s=0.02, lease_s=600.0, kv_store=url)
    worker = WorkerRuntime(config, pd.fake_model(), make_transfer=make_transfer, make_services=services_of)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def test_a_worker_serves_what_another_has_computed(
    pd: ModuleType, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "restore_is_cheaper", lambda num_tokens, rates: True)
    monkeypatch.setattr(restores, "LEAST_S", 60.0)
    answers, hit = [], (len(PROMPT) - 1) // pd.BLOCK * pd.BLOCK
    async with a_worker(pd, "decode-0", master) as first, a_worker(pd, "decode-1", master) as second:
        for worker in (first, second):
            async with pd.FakeRouter(worker.address) as router:
                message = pd.Cluster(worker, []).submit_message(attempt="a", prompt=PROMPT, max_tokens=12)
                answers.append(await router.run(message))
            size = worker.model.compat.kv.block_bytes
            whole = (len(PROMPT) + 11) // pd.BLOCK * size
            await waiting.until(
                lambda worker=worker, whole=whole: (
                    [tier.used_bytes for tier in worker.engine.stats().tiers if tier.name == "disk"] == [whole]
                )
            )
            assert (await worker.audit(full=True)).violations == []
    cold, warm = answers
    assert warm.token_ids == cold.token_ids
    assert list(cold.explanation.cached_tiers_decode) == []
    assert [(part.tier, part.tokens) for part in warm.explanation.cached_tiers_decode] == [("disk", hit)]


def test_a_store_without_room_is_used_later(pd: ModuleType, master: str) -> None:
    """Nobody has given it memory yet: a worker starts, and measures nothing."""
    model = pd.fake_model()
    url = master.replace(f"segment_bytes={SEGMENT}", "segment_bytes=0")
    store = open_disk(
        pd.worker_config("decode", "w", kv_store=url), model.compat, model.identity, "w", MonotonicClock()
    )
    assert store is not None
    try:
        assert (store.is_shared, store.bytes_per_s) == (True, 0.0)
    finally:
        store.close(waiting.DEADLINE_S)
