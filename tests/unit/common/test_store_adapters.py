"""The registry of adapters: which version answers, and what a load, a promotion and a rollback change."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.clock import FakeClock
from diptych.common.errors import InvalidRequestError
from diptych.common.ids import new_request_id
from diptych.common.store import adapters
from diptych.common.store.adapters import (
    AdapterTable,
    other_base_models,
    promoted,
    resolve,
    rolled_back,
    with_canary,
    with_version,
)
from diptych.common.store.codec import BadRowError, decode_adapter, decode_gone, encode_adapter, encode_gone
from diptych.common.store.memory import MemoryStore
from diptych_tests.records import adapter_entry, adapter_version

V1, V2, V3 = (adapter_entry("poems", content) for content in ("one", "two", "three"))


def stable_of(entry: adapters.AdapterEntry) -> str:
    return entry.version(entry.stable).folder


def refused(param: str, call: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call(*args, **named)
    assert caught.value.param == param
    return caught.value.message


def test_a_name_is_loaded_once_and_then_only_in_place() -> None:
    assert with_version(None, V1) is V1
    assert "already been loaded" in refused("lora_name", with_version, V1, V2)
    second = with_version(V1, V2, in_place=True)
    assert (stable_of(second), second.stable, second.previous) == ("/adapters/two", 2, 1)
    assert with_version(second, V2, in_place=True) == second, "the same content is no new version"
    refused("lora_name", with_version, V1, adapter_entry("poems", "two", model="other"), in_place=True)
    refused("canary_share", with_version, None, V1, canary_share=0.1)


def test_a_canary_is_promoted_or_rolled_back() -> None:
    canary = with_version(V1, V2, canary_share=0.25)
    assert (canary.stable, canary.canary, canary.canary_share) == (1, 2, 0.25)
    whole = promoted(canary)
    assert (whole.stable, whole.canary, whole.canary_share, whole.previous) == (2, 0, 0.0, 1)
    back = rolled_back(whole)
    assert (stable_of(back), back.previous) == ("/adapters/one", 0)
    refused("lora_name", rolled_back, back)
    assert rolled_back(back, 2).stable == 2
    assert rolled_back(canary).stable == 1
    assert rolled_back(canary).canary == 0
    refused("lora_name", promoted, V1)
    refused("version", with_canary, canary, 1, 0.5)
    refused("version", with_canary, canary, 9, 0.5)
    refused("version", rolled_back, canary, 9)
    assert with_canary(canary, 2, 0.0).canary == 0
    assert with_canary(canary, 0, 0.0).canary == 0
    assert "no version 9" in refused("version", with_canary, canary, 9, 0.0)
    assert "name a version" in refused("version", with_canary, whole, 0, 0.5)


def test_a_canary_replaces_a_canary_and_no_load_in_place_ends_it() -> None:
    """One did, without a word: the new version had all requests at once."""
    canary = with_version(with_version(V1, V2, canary_share=0.25), V3, canary_share=0.5)
    assert (canary.canary, canary.canary_share) == (3, 0.5)
    assert with_version(canary, V3, canary_share=0.75).canary == 3, "the same content, with another share"
    four = adapter_entry("poems", "four")
    assert "canary, version 3" in refused("load_inplace", with_version, canary, four, in_place=True)
    whole = with_version(rolled_back(canary), four, in_place=True)
    assert (whole.stable, whole.canary, whole.previous) == (4, 0, 1)


def test_a_warning_names_the_versions_of_another_base_model() -> None:
    assert other_base_models("tiny", [(1, ""), (2, "")]) == ""
    text = other_base_models("tiny", [(1, ""), (2, "acme/large"), (3, "other")])
    assert text.startswith("version 2 was trained for acme/large, version 3 was trained for other, ")
    assert " for tiny: " in text


def test_a_load_in_place_of_what_is_stable_leaves_a_canary_alone() -> None:
    """It ended the canary without a word."""
    canary = with_version(V1, V2, canary_share=0.25)
    assert with_version(canary, V1, in_place=True) == canary


def test_versions_that_nothing_points_to_are_forgotten_and_numbers_never_come_again() -> None:
    entry = V1
    for i in range(30):
        entry = with_version(entry, adapter_entry("poems", f"next {i}"), in_place=True)
    assert len(entry.versions) == adapters.MAX_VERSIONS
    assert [version.number for version in entry.versions] == list(range(24, 32))
    back = rolled_back(entry, 24)
    for i in range(30):
        back = with_version(back, adapter_entry("poems", f"canary {i}"), canary_share=0.1)
    assert stable_of(back) == "/adapters/next 22"
    assert back.has(31), "the version before the rollback"


@given(st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_a_request_has_the_same_version_wherever_it_is_resolved(share: float, number: int) -> None:
    entry = with_canary(with_version(V1, V2, in_place=True), 1, share)
    name = f"req-{number:024x}"
    assert resolve(entry, name) == resolve(decode_adapter("poems", encode_adapter(entry)), name)


def test_a_canary_has_its_share_and_other_names_draw_apart() -> None:
    entry = with_version(V1, V2, canary_share=0.3)
    other = msgspec.structs.replace(entry, name="prose")
    ids = [new_request_id() for _ in range(4000)]
    canaries = [resolve(entry, one).number == 2 for one in ids]
    assert 0.25 < sum(canaries) / len(ids) < 0.35
    both = sum(one and resolve(other, name).number == 2 for name, one in zip(ids, canaries, strict=True))
    assert both / len(ids) < 0.15
    wider = with_canary(entry, 2, 0.6)
    assert all(resolve(wider, one).number == 2 for one, canary in zip(ids, canaries, strict=True) if canary)
    assert {resolve(with_canary(entry, 2, 1.0), one).number for one in ids} == {2}


@pytest.mark.parametrize(
    "change",
    [
        {"stable": 7}, {"canary": 7}, {"canary_share": 1.5}, {"versions": ()}, {"name": "../x"},
        {"versions": (adapter_version(1, adapter_id="A" * 32),)}, {"versions": (adapter_version(1, folder=""),)},
        {"versions": (adapter_version(1), adapter_version(1))}, {"versions": (adapter_version(1, rank=0),)},
        {"versions": tuple(adapter_version(i) for i in range(1, 10))}, {"versions": (adapter_version(1, other_base="a\n"),)},
    ],
)  # fmt: skip
def test_hostile_entries_are_refused(change: dict[str, Any]) -> None:
    entry = msgspec.structs.replace(V1, **change)
    with pytest.raises(BadRowError):
        decode_adapter(entry.name, encode_adapter(entry))
    good = encode_adapter(V1)
    assert decode_adapter("poems", good) == V1
    for raw in (b"", b"[]", b"x" * 70_000, good.replace(b"poems", b"prose")):
        with pytest.raises(BadRowError):
            decode_adapter("poems", raw)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'[["poems", 0]]', b'[["../x", 1]]', b'[["poems", "1"]]', b'[["poems", 1' + b"0" * 30 + b"]]"]
)
def test_hostile_numbers_of_names_that_are_gone_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRowError):
        decode_gone(raw)
    assert decode_gone(encode_gone({"b": 2, "a": 1})) == {"b": 2, "a": 1}


def test_ids_that_another_name_has_stay_in_use() -> None:
    two = with_version(V1, V2, in_place=True)
    table = AdapterTable(1, {"poems": two, "prose": adapter_entry("prose", "one")})
    ids = {version.folder: version.adapter_id for version in two.versions}
    assert adapters.unused_ids(two, None, table) == {ids["/adapters/two"]}
    assert adapters.unused_ids(two, two, table) == frozenset()


def test_what_a_router_knows_is_written_over_an_earlier_registry_and_over_no_other() -> None:
    two, prose = with_version(V1, V2, in_place=True), adapter_entry("prose")
    known = AdapterTable(8, {"poems": two, "prose": prose}, {"letters": 4})
    for earlier in (
        AdapterTable(),
        AdapterTable(6, {"poems": V1}),
        AdapterTable(6, {"poems": rolled_back(two)}),
        AdapterTable(6, {"poems": V1, "letters": adapter_entry("letters")}, {"prose": 3}),
    ):
        assert adapters.restored(known, earlier) == known
    new = adapter_entry("new")
    found = adapters.restored(known, AdapterTable(2, {"new": new}, {"old": 7}))
    assert found == AdapterTable(8, {**known.entries, "new": new}, {"old": 7, "letters": 4}), "what others loaded stays"
    full = AdapterTable(8, {f"poems-{i}": V1 for i in range(adapters.MAX_ADAPTERS - 1)})
    found = adapters.restored(full, AdapterTable(2, {"new": new, "other": new}))
    assert found is not None
    assert set(found.entries) == {*full.entries, "new"}, "no more than a registry holds"
    assert adapters.restored(known, AdapterTable(8, {"poems": V1})) is None
    assert adapters.restored(known, AdapterTable(9, {})) is None
    other = adapter_entry("poems", "other")
    assert adapters.restored(known, AdapterTable(3, {"poems": other})) is None, "another history: version 1 is another"
    assert adapters.restored(AdapterTable(), AdapterTable()) is None


async def of_two(store: Any, other: Any) -> None:
    """What every store promises. Both lead to the same registry."""
    assert await store.read_adapters(0) is None
    assert await store.write_adapter("poems", V1, revision=0, gone={}) == 1
    assert await store.write_adapter("poems", V2, revision=0, gone={}) is None, "another one wrote first"
    assert await other.read_adapters(0) == AdapterTable(1, {"poems": V1})
    assert await other.read_adapters(1) is None
    assert await other.write_adapter("prose", adapter_entry("prose"), revision=1, gone={}) == 2
    assert await store.write_adapter("poems", None, revision=2, gone={}) == 3
    assert await store.read_adapters(2) == AdapterTable(3, {"prose": adapter_entry("prose")})
    assert not await store.restore_adapters(AdapterTable(9, {})), "nothing is lost"


def test_the_store_in_memory_keeps_the_registry() -> None:
    store = MemoryStore(FakeClock())
    asyncio.run(of_two(store, store))
    store.flush()
    table = AdapterTable(3, {"poems": V1})
    assert asyncio.run(store.read_adapters(3)) == AdapterTable()
    assert asyncio.run(store.restore_adapters(table))
    assert asyncio.run(store.read_adapters(3)) == AdapterTable(3 + adapters.RESTORED_STEP, {"poems": V1})
