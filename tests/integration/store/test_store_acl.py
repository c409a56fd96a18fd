"""The store with the rights that deploy/make_secrets.py gives each role, on a real server: it needs them all and has no more."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.exceptions import NoPermissionError

from diptych.cli.up.embedded_redis import server_binary
from diptych.common import child
from diptych.common.store.adapters import RESTORED_STEP, AdapterTable
from diptych.common.store.interface import KvEvent
from diptych.common.store.redis_store import RedisStore
from diptych_tests.records import adapter_entry, worker_record
from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]
RECORD = worker_record(incarnation="a1", event_epoch=1)
EVENT = KvEvent("a1", epoch=1, sequence=1, kind="stored", keys=(b"k" * 16,))
PENDING = (1000, 2)


def users() -> str:
    return str(load_script("deploy/make_secrets.py").acl("worker-word", "router-word"))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The socket of a server that has only the roles."""
    folder = Path(tempfile.mkdtemp(prefix="vka", dir="/tmp"))
    (folder / "acl").write_text(users())
    socket = folder / "s"
    command = [str(server_binary()), "--port", "0", "--unixsocket", str(socket), "--aclfile", str(folder / "acl")]
    command += ["--save", "", "--dir", str(folder)]
    process = child.start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if b"eady to accept connections" in line:
            break
    yield str(socket)
    process.terminate()
    process.stdout.close()
    process.wait(300)
    shutil.rmtree(folder)


def url(server: str, role: str) -> str:
    return f"unix://{role}:{role}-word@{server}"


@pytest.fixture
async def stores(server: str) -> AsyncIterator[tuple[RedisStore, RedisStore]]:
    pair = RedisStore(url(server, "worker")), RedisStore(url(server, "router"))
    yield pair
    for store in pair:
        await store.close()


async def test_each_role_may_do_its_work(stores: tuple[RedisStore, RedisStore]) -> None:
    worker, router = stores
    for store in stores:
        await store.ping()
    assert await worker.put_worker(RECORD, ttl_s=30)
    await worker.append_events("p0", [EVENT])
    assert [record.worker_id for record in await router.list_workers()] == ["p0"]
    assert len((await router.read_events({"p0": "0"}, block_s=0.01))["p0"]) == 1
    await router.put_pending("r0", {}, ttl_s=30)
    await router.put_pending("r1", {"p0": PENDING}, ttl_s=30)
    assert (await router.list_pending())["r1"]["p0"] == PENDING
    assert (await router.lease_tokens("acme", per_minute=600, want=5.0))[0] == 5.0
    assert await router.restore_adapters(AdapterTable(0, {}))
    first = RESTORED_STEP
    assert await router.write_adapter("poems", adapter_entry("poems"), revision=first, gone={}) == first + 1
    assert await router.write_adapter("poems", None, revision=first + 1, gone={}) == first + 2
    assert await router.read_adapters(first) == AdapterTable(first + 2, {})
    await worker.remove_worker("p0", "a1")
    assert await router.list_workers() == []


WORKERS_OWN = ["{diptych}:worker:p0", "{diptych}:workers", "{diptych}:start:p0", "{diptych}:kv:p0"]
ROUTERS_OWN = ["{diptych}:pending:r0", "{diptych}:routers", "{diptych}:budget:acme", "{diptych}:adapters"]


async def test_no_role_may_do_anothers_or_anything_else(server: str) -> None:
    refused: list[tuple[str, tuple[Any, ...]]] = []
    for role, commands in {
        "worker": [*(("HSET", key, "a", "b") for key in ROUTERS_OWN), *(("HGET", key, "a") for key in ROUTERS_OWN)],
        "router": [
            ("HSET", "{diptych}:worker:p0", "a", "b"),
            ("DEL", "{diptych}:kv:p0"),
            ("HGET", "{diptych}:start:p0", "a"),
        ],
    }.items():
        client = aioredis.Redis.from_url(url(server, role), protocol=2)
        try:
            for command in [
                *commands,
                ("FLUSHALL",),
                ("KEYS", "*"),
                ("CONFIG", "GET", "*"),
                ("HGET", "{other}:workers", "a"),
            ]:
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
                refused.append((role, command))
        finally:
            await client.aclose()
    assert len(refused) == 8 + 3 + 8
