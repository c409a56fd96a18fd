"""This process's view of the registry: what was written before a look is in it, and many looks are few reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import InvalidRequestError, NoWorkerError
from diptych.common.store import adapters
from diptych.common.store.adapters import AdapterTable, with_version
from diptych.common.store.memory import MemoryStore
from diptych.router.adapters import registry as registry_module
from diptych.router.adapters.registry import AdapterRegistry
from diptych_tests.records import adapter_entry, adapter_version

POEMS, PROSE = adapter_entry("poems"), adapter_entry("prose")


class SlowStore(MemoryStore):
    """Reads answer what was there when they began, once `go` is set."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.go = asyncio.Event()
        self.reads = 0

    async def read_adapters(self, known: int) -> AdapterTable | None:
        self.reads += 1
        answer = await super().read_adapters(known)
        await self.go.wait()
        return answer


async def rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_look_sees_what_was_written_before_it_though_an_older_read_runs() -> None:
    """It shared the read that had begun before the write, and the name was not found."""
    store = SlowStore()
    registry = AdapterRegistry(store)
    older = asyncio.create_task(registry.refresh())
    await rest()
    await store.write_adapter("poems", POEMS, revision=0, gone={})
    looks = [asyncio.create_task(registry.look_up("poems")) for _ in range(50)]
    await rest()
    store.go.set()
    assert set(await asyncio.gather(*looks)) == {POEMS}
    await older
    assert store.reads == 2
    assert await registry.look_up("poems") == POEMS
    assert store.reads == 2, "a known name is not looked for"


async def test_an_older_answer_does_not_undo_a_change_of_this_process() -> None:
    """A read that had begun before the change and ended after it put the former view back."""
    store = SlowStore()
    await store.write_adapter("prose", PROSE, revision=0, gone={})
    registry = AdapterRegistry(store)
    older = asyncio.create_task(registry.refresh())
    await rest()
    held, store.go = store.go, asyncio.Event()
    store.go.set()
    await registry.change("poems", lambda before, table: POEMS)
    held.set()
    await older
    assert set(registry.table.entries) == {"poems", "prose"}
    assert registry.table.revision == 2


async def test_many_changes_of_one_process_do_not_forestall_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start, with many --lora-modules."""
    monkeypatch.setattr(registry_module, "_MAX_TRIES", 1)
    store = SlowStore()
    registry = AdapterRegistry(store)
    changes = [
        asyncio.create_task(registry.change(f"poems-{i}", lambda before, table, i=i: adapter_entry(f"poems-{i}")))
        for i in range(20)
    ]
    await rest()
    store.go.set()
    await asyncio.gather(*changes)
    assert len(registry.table.entries) == 20


async def test_a_look_that_is_cancelled_leaves_the_others_theirs() -> None:
    store = SlowStore()
    registry = AdapterRegistry(store)
    await store.write_adapter("poems", POEMS, revision=0, gone={})
    one, other = (asyncio.create_task(registry.look_up("poems")) for _ in range(2))
    await rest()
    one.cancel()
    store.go.set()
    assert await other == POEMS
    await registry.refresh()


async def test_a_name_that_cannot_be_looked_for_is_not_said_to_be_unknown() -> None:
    """A router that had started while the store was away answered 404 for every adapter, which no client tries again."""
    store = MemoryStore(FakeClock())
    await AdapterRegistry(store).change("poems", lambda entry, table: POEMS)
    store.available = False
    registry = AdapterRegistry(store)
    with pytest.raises(NoWorkerError, match="poems is not known here, and the registry of adapters cannot be read now"):
        await registry.look_up("poems")
    store.available = True
    assert await registry.look_up("poems") == POEMS
    assert await registry.look_up("prose") is None
    store.available = False
    assert await registry.look_up("poems") == POEMS, "a known name is not looked for"
    assert await registry.look_up("") is None


async def test_changes_of_two_routers_are_both_made() -> None:
    store = MemoryStore(FakeClock())
    one, other = AdapterRegistry(store), AdapterRegistry(store)
    await asyncio.gather(
        one.change("poems", lambda entry, table: POEMS), other.change("prose", lambda entry, table: PROSE)
    )
    await one.refresh()
    await other.refresh()
    assert one.table == other.table == AdapterTable(2, {"poems": POEMS, "prose": PROSE})
    second = adapter_entry("poems", "other")
    assert one.table.gone == {}
    before, after = await other.change("poems", lambda entry, table: with_version(entry, second, in_place=True))
    assert (before, after and after.stable) == (POEMS, 2)
    assert await other.change("poems", lambda entry, table: entry) == (after, after)
    assert other.table.revision == 3, "no change is no write"


async def test_a_change_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(FakeClock())
    registry = AdapterRegistry(store)

    async def forestalled(*args: Any, **more: Any) -> None:
        return None

    monkeypatch.setattr(store, "write_adapter", forestalled)
    with pytest.raises(NoWorkerError, match="by others"):
        await registry.change("poems", lambda entry, table: POEMS)
    store.available = False
    with pytest.raises(NoWorkerError, match="cannot be changed"):
        await registry.change("poems", lambda entry, table: POEMS)
    await registry.refresh()
    assert registry.failing


async def test_the_number_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_ADAPTERS", 1)
    registry = AdapterRegistry(MemoryStore(FakeClock()))
    await registry.change("poems", lambda entry, table: POEMS)
    with pytest.raises(InvalidRequestError, match="1 adapters"):
        await registry.change("prose", lambda entry, table: PROSE)
    assert adapters.MAX_ADAPTERS > 1


async def test_the_first_router_after_a_loss_of_all_data_writes_what_it_knows() -> None:
    store = MemoryStore(FakeClock())
    one, other, late = AdapterRegistry(store), AdapterRegistry(store), AdapterRegistry(store)
    await one.change("poems", lambda entry, table: POEMS)
    await other.refresh()
    store.flush()
    await late.refresh()
    assert late.table == AdapterTable()
    for registry in (other, one, late):
        await registry.refresh()
        assert registry.table == AdapterTable(1 + adapters.RESTORED_STEP, {"poems": POEMS})


async def test_routers_agree_again_after_a_new_primary_that_lacked_the_last_change() -> None:
    """A router that knew one change less wrote under the number of the other's last change: they differed for ever."""
    store = MemoryStore(FakeClock())
    one, other = AdapterRegistry(store), AdapterRegistry(store)
    await one.change("poems", lambda entry, table: POEMS)
    snapshot = one.table
    await one.change("letters", lambda entry, table: adapter_entry("letters"))
    await other.refresh()
    await one.change("prose", lambda entry, table: PROSE)
    store.go_back(snapshot)
    for registry in (other, one, other):
        await registry.refresh()
    assert one.table == other.table
    assert set(one.table.entries) == {"poems", "letters"}, "what all of them knew"


async def test_a_loss_of_the_adapters_alone_is_noticed() -> None:
    store = MemoryStore(FakeClock())
    one, other = AdapterRegistry(store), AdapterRegistry(store)
    await one.change("poems", lambda entry, table: POEMS)
    store.lose_adapters()
    await one.refresh()
    await other.refresh()
    assert one.table == other.table == AdapterTable(1 + adapters.RESTORED_STEP, {"poems": POEMS})


async def test_numbers_of_an_unloaded_name_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(FakeClock())
    registry, other = AdapterRegistry(store), AdapterRegistry(store)
    two = adapter_entry("poems", "one", "two")
    await registry.change("poems", lambda entry, table: two)
    await registry.change("poems", lambda entry, table: None)
    await other.refresh()
    assert (other.table.gone, other.table.next_number("poems"), other.table.next_number("new")) == ({"poems": 2}, 3, 1)
    store.flush()
    await other.refresh()
    assert other.table.gone == {"poems": 2}, "after a loss of all data, too"
    third = adapter_entry("poems", versions=(adapter_version(3),), stable=3)
    await other.change("poems", lambda entry, table: third)
    assert (other.table.gone, other.table.next_number("poems")) == ({}, 4)
    monkeypatch.setattr(adapters, "MAX_GONE", 1)
    for name in ("prose", "poems", "prose"):
        await other.change(name, lambda entry, table: None if entry is not None else PROSE)
    assert other.table.gone == {"prose": 1}, "the latest"


async def test_what_cannot_be_a_name_is_unknown_also_while_the_store_is_away() -> None:
    """It was 503 after the wait for the store, and the text held all of it."""
    store = MemoryStore(FakeClock())
    store.available = False
    registry = AdapterRegistry(store)
    for name in ("", "no name", "x" * 129, "_other"):
        assert await registry.look_up(name) is None
    with pytest.raises(NoWorkerError):
        await registry.look_up("poems")
