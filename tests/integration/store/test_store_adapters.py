"""The registry of adapters in Redis: two routers, a loss of all data, and keys of another kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.common.store.adapters import AdapterTable
from diptych.common.store.redis_store import RedisStore
from diptych_tests.records import adapter_entry

POEMS, PROSE = adapter_entry("poems"), adapter_entry("prose")


@pytest.fixture
async def stores(valkey_url: str, raw: Any) -> AsyncIterator[tuple[RedisStore, RedisStore]]:
    pair = RedisStore(valkey_url, cluster="t"), RedisStore(valkey_url, cluster="t")
    yield pair
    for store in pair:
        await store.close()


async def test_one_of_two_writers_wins_and_the_other_sees_its_change(stores: tuple[RedisStore, RedisStore]) -> None:
    store, other = stores
    assert await store.read_adapters(0) is None
    answers = await asyncio.gather(
        store.write_adapter("poems", POEMS, revision=0), other.write_adapter("prose", PROSE, revision=0)
    )
    assert sorted(answers, key=str) == [1, None]
    table = await other.read_adapters(0)
    assert table is not None
    assert list(table.entries.values()) == [POEMS if answers[0] else PROSE]
    assert await store.read_adapters(1) is None
    assert await store.write_adapter(next(iter(table.entries)), None, revision=1) == 2
    assert await other.read_adapters(1) == AdapterTable(2, {})


async def test_the_registry_is_written_again_after_a_loss_of_all_data(
    stores: tuple[RedisStore, RedisStore], raw: Any
) -> None:
    store, other = stores
    await store.write_adapter("poems", POEMS, revision=0)
    known = await store.read_adapters(0)
    assert known is not None
    await raw.flushall()
    assert await other.read_adapters(1) == AdapterTable()
    assert sorted(await asyncio.gather(store.restore_adapters(known), other.restore_adapters(known))) == [False, True]
    assert await other.read_adapters(1) == AdapterTable(2, {"poems": POEMS})


async def test_rows_and_keys_of_another_kind_hide_no_adapter(stores: tuple[RedisStore, RedisStore], raw: Any) -> None:
    store, _ = stores
    await store.write_adapter("poems", POEMS, revision=0)
    await raw.hset("{t}:adapters", "prose", b'{"name": 3}')
    await raw.hset("{t}:adapters", b"\xff", b"{}")
    assert await store.read_adapters(0) == AdapterTable(1, {"poems": POEMS})
    assert store.bad_rows == 2
    await raw.set("{t}:adapters", "a string")
    assert await store.read_adapters(0) == AdapterTable(1, {})
    assert await store.write_adapter("poems", POEMS, revision=1) == 2
    assert await store.read_adapters(0) == AdapterTable(2, {"poems": POEMS})
    await raw.delete("{t}:adapters:rev")
    await raw.sadd("{t}:adapters:rev", "x")
    assert await store.read_adapters(2) == AdapterTable()
    assert await store.restore_adapters(AdapterTable(2, {"poems": POEMS}))
    assert await store.read_adapters(0) == AdapterTable(3, {"poems": POEMS})
