"""The registry of adapters in Redis: two routers, a loss of all data, and keys of another kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.common.store.adapters import RESTORED_STEP, AdapterTable
from diptych.common.store.redis_store import RedisStore
from diptych.router.adapters.registry import AdapterRegistry
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
        store.write_adapter("poems", POEMS, revision=0, gone={}),
        other.write_adapter("prose", PROSE, revision=0, gone={}),
    )
    assert sorted(answers, key=str) == [1, None]
    table = await other.read_adapters(0)
    assert table is not None
    assert list(table.entries.values()) == [POEMS if answers[0] else PROSE]
    assert await store.read_adapters(1) is None
    assert await store.write_adapter(next(iter(table.entries)), None, revision=1, gone={}) == 2
    assert await other.read_adapters(1) == AdapterTable(2, {})


async def test_the_registry_is_written_again_after_a_loss_of_all_data(
    stores: tuple[RedisStore, RedisStore], raw: Any
) -> None:
    store, other = stores
    await store.write_adapter("poems", POEMS, revision=0, gone={})
    known = await store.read_adapters(0)
    assert known is not None
    await raw.flushall()
    assert await other.read_adapters(1) == AdapterTable()
    assert sorted(await asyncio.gather(store.restore_adapters(known), other.restore_adapters(known))) == [False, True]
    assert await other.read_adapters(1) == AdapterTable(1 + RESTORED_STEP, {"poems": POEMS})


async def test_changes_that_a_new_primary_lacks_are_written_again(
    stores: tuple[RedisStore, RedisStore], raw: Any
) -> None:
    """Redis went on from a snapshot, or with a replica: a load that had succeeded was forgotten by every router."""
    one, other = map(AdapterRegistry, stores)
    await one.change("poems", lambda entry, table: POEMS)
    before = await raw.dump("{t}:adapters")
    await one.change("prose", lambda entry, table: PROSE)
    await raw.restore("{t}:adapters", 0, before, replace=True)
    await other.refresh()
    assert other.table == AdapterTable(1, {"poems": POEMS}), "it knows nothing better"
    for registry in (one, other):
        await registry.refresh()
        assert registry.table == AdapterTable(2 + RESTORED_STEP, {"poems": POEMS, "prose": PROSE})


async def test_rows_and_keys_of_another_kind_hide_no_adapter(stores: tuple[RedisStore, RedisStore], raw: Any) -> None:
    store, _ = stores
    await store.write_adapter("poems", POEMS, revision=0, gone={})
    await raw.hset("{t}:adapters", "prose", b'{"name": 3}')
    await raw.hset("{t}:adapters", b"\xff", b"{}")
    assert await store.read_adapters(0) == AdapterTable(1, {"poems": POEMS})
    assert store.bad_rows == 2
    await raw.hset("{t}:adapters", ":gone", b'[["poems", 0]]')
    assert await store.read_adapters(0) == AdapterTable(1, {"poems": POEMS}), "numbers that are none are not kept"
    await raw.set("{t}:adapters", "a string")
    assert await store.read_adapters(1) == AdapterTable(), "as a loss of all data"
    assert await store.write_adapter("poems", POEMS, revision=1, gone={}) is None
    assert await store.write_adapter("poems", POEMS, revision=0, gone={}) == 1
    assert await store.read_adapters(0) == AdapterTable(1, {"poems": POEMS})


@pytest.mark.parametrize("loss", ["evicted", "of another kind", "without its revision"])
async def test_a_loss_of_the_registry_alone_is_noticed_and_written_again(
    stores: tuple[RedisStore, RedisStore], raw: Any, loss: str
) -> None:
    """The revision was a key of its own: it outlived the entries, and two routers differed for ever."""
    one, other = map(AdapterRegistry, stores)
    await one.change("prose", lambda entry, table: PROSE)
    await one.change("prose", lambda entry, table: None)
    await one.change("poems", lambda entry, table: POEMS)
    if loss == "without its revision":
        await raw.hdel("{t}:adapters", ":revision")
    else:
        await raw.delete("{t}:adapters")
    if loss == "of another kind":
        await raw.set("{t}:adapters", "a string")
    await other.refresh()
    assert other.table == AdapterTable(), "it began after the loss"
    for registry in (one, other):
        await registry.refresh()
        assert registry.table == AdapterTable(3 + RESTORED_STEP, {"poems": POEMS}, {"prose": 1})
    assert await raw.keys("{t}:adapters*") == [b"{t}:adapters"]
