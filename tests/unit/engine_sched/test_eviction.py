"""Which block leaves a tier below the first one: each order, and what the orders are told."""

from __future__ import annotations

import random

import pytest

from diptych.common.errors import ConfigError
from diptych.common.tiers import TIER_EVICTIONS
from diptych.engine.config import EngineConfig
from diptych.engine.disk_messages import DiskBlock
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.cache.eviction import (
    OldestArrivalFirst,
    OldestUseLastBlockFirst,
    PredictedValue,
    ReuseRates,
    TierOrder,
    Uses,
    tier_orders,
)
from diptych.engine.sched.cache.host_tier import HostTier


def add(order: TierOrder, keys: str, use: int) -> None:
    for index, key in enumerate(keys):
        order.add(key.encode(), use, index)


def keys_of(text: str) -> list[bytes]:
    return [key.encode() for key in text]


def popped(order: TierOrder) -> str:
    out = ""
    while (key := order.pop()) is not None:
        out += key.decode()
    assert len(order) == 0
    return out


def test_by_arrival_a_use_changes_nothing_and_coming_again_does() -> None:
    order = OldestArrivalFirst()
    add(order, "abc", 1)
    order.used(keys_of("a"), 2)
    order.add(b"b", 3, 0)
    assert order.remove(b"c")
    assert not order.remove(b"c")
    assert popped(order) == "ab"


def test_the_oldest_use_leaves_first_and_of_it_the_last_block() -> None:
    order = OldestUseLastBlockFirst()
    add(order, "abcd", 7)
    add(order, "x", 8)
    order.used(keys_of("abe"), 9)
    order.add(b"e", 9, 2)
    assert popped(order) == "dcxeba"


def test_an_older_use_takes_nothing_from_a_newer_one() -> None:
    order = OldestUseLastBlockFirst()
    order.add(b"a", 9, 0)
    order.add(b"a", 7, 0)
    order.add(b"b", 7, 1)
    assert popped(order) == "ab"


@pytest.mark.parametrize("order", [OldestUseLastBlockFirst(), PredictedValue(Uses(100))])
def test_the_last_block_leaves_first_though_it_came_first(order: TierOrder) -> None:
    """The tier above evicts the last block first."""
    for index in (4, 3, 1, 2, 0):
        order.add(b"%d" % index, 1, index)
    assert popped(order) == "43210"


@pytest.mark.parametrize("make", [OldestArrivalFirst, OldestUseLastBlockFirst, lambda: PredictedValue(Uses(100))])
def test_protected_blocks_stay(make) -> None:
    order = make()
    add(order, "ab", 1)
    add(order, "cd", 2)
    left = {order.pop(protected=keys_of("ab")) for _ in range(3)}
    assert left == {b"c", b"d", None}
    assert sorted(order) == keys_of("ab")
    assert set(popped(order)) == set("ab")


# ---- predicted value ----


def test_without_anything_seen_the_order_is_that_of_age() -> None:
    uses = Uses(100)
    order = PredictedValue(uses)
    for use, keys in enumerate(("abc", "de", "f"), 1):
        uses.used(keys_of(keys), use)
        add(order, keys, use)
    order.used([], 40)
    assert popped(order) == "cbaedf"


def test_of_prompts_that_came_once_less_is_expected_once_that_was_seen() -> None:
    """A conversation in its third turn stays, though prompts that came once are younger."""
    uses, use = Uses(10_000), 0
    order = PredictedValue(uses)

    def serve(keys: list[bytes]) -> None:
        nonlocal use
        use += 1
        uses.used(keys, use)
        order.used(keys, use)
        for index, key in enumerate(keys):
            order.add(key, use, index)
        while len(order) > 120:
            order.pop()

    def turns(name: str, count: int) -> list[bytes]:
        return [f"{name}-{index}".encode() for index in range(8 * count)]

    for number in range(60):
        for turn in (1, 2, 3, 4):
            serve(turns(f"chat {number}", turn))
            for once in range(2):
                serve(turns(f"once {number} {turn} {once}", 1))
    for turn in (1, 2, 3):
        serve(turns("last", turn))
        for once in range(3):
            serve(turns(f"then {turn} {once}", 1))
    by_age = OldestUseLastBlockFirst()
    for index, key in enumerate(turns("last", 3)):
        by_age.add(key, use - 3, index)
    add(by_age, "new", use)
    assert by_age.pop() == turns("last", 3)[-1]
    for _ in range(16):
        assert b"last" not in (order.pop() or b"last")


def test_a_block_never_leaves_before_those_behind_it_in_the_same_use() -> None:
    chance, uses = random.Random(5), Uses(500)
    order = PredictedValue(uses)
    for use in range(1, 400):
        session = chance.randrange(12)
        keys = [b"%d-%d" % (session if index > 2 else 99, index) for index in range(chance.randrange(1, 12))]
        uses.used(keys, use)
        order.used(keys, use)
        for index, key in enumerate(keys):
            order.add(key, use, index)
        while len(order) > 40:
            before = dict(order._place)
            gone = order.pop()
            assert gone is not None
            mine, index = before[gone]
            assert not [key for key in order if before[key][0] == mine and before[key][1] > index]


def test_rates_are_those_that_were_seen() -> None:
    rates = ReuseRates()
    assert rates.rate(0, 1) == 2 * rates.rate(0, 2) == 2 * rates.rate(0, 3) == rates.rate(1, 1)
    for _ in range(6400):
        rates.note(0, 40, reused=False)
        rates.note(1, 4, reused=True)
    assert rates.rate(1, 4) > 10 * rates.rate(0, 4)
    assert rates.rate(1, 1) < rates.rate(1, 4), "none was used again so soon"
    for _ in range(300_000):
        rates.note(1, 4, reused=False)
    assert rates.rate(1, 4) < 10 * rates.rate(0, 4), "what was seen long ago counts less"


def test_uses_are_counted_and_the_oldest_are_forgotten() -> None:
    uses = Uses(3)
    uses.used(keys_of("ab"), 1)
    uses.used(keys_of("bc"), 2, 5)
    assert uses.of(b"b") == (2, 2, 5)
    assert uses.of(b"a") == (1, 1, 0)
    uses.used(keys_of("d"), 3)
    assert uses.of(b"a") == (1, 0, 0)
    assert uses.of(b"c") == (1, 2, 6)


# ---- the setting ----


def test_the_setting_names_the_orders() -> None:
    assert [type(order) for order in tier_orders("lru", 9)] == [type(None), OldestArrivalFirst, OldestUseLastBlockFirst]
    assert [type(order) for order in tier_orders("value", 9)] == [Uses, PredictedValue, PredictedValue]
    assert tier_orders("value", 0)[0] is None
    with pytest.raises(ConfigError, match="tier_eviction"):
        EngineConfig(num_blocks=4, tier_eviction="oldest")


@pytest.mark.parametrize("eviction", TIER_EVICTIONS)
def test_every_order_keeps_every_token(kit, eviction) -> None:
    """A pool and a host tier that are too small; the second round of prompts finds some of them in host memory."""
    engine = kit.make_engine(
        FakeRunner(12, kit.BLOCK, num_host_blocks=10), num_blocks=12, num_host_blocks=10, tier_eviction=eviction,
        initial_prefill_tokens_per_s=1.0,
    )  # fmt: skip
    requests = [kit.make_request(f"r{n}", [n % 4 * 50 + i for i in range(17)], 4, seed=n) for n in range(16)]
    want = kit.undisturbed(requests)
    for request in requests:
        engine.send(request)
        events = kit.run_until_idle(engine)
        assert kit.tokens_of(events, request.attempt) == want[request.attempt]
        assert engine.core.scheduler.check() == []
    assert engine.stats().restored_tokens_total > 0


def test_a_tier_takes_the_order_that_it_is_given_though_that_is_empty() -> None:
    """An empty order is false, and `order or another` made the setting do nothing."""
    order = PredictedValue(Uses(8))
    host, disk = HostTier(2, order), DiskTier(2, order=order)
    host.store(b"a")
    disk.open([DiskBlock(b"b", "t", 0)])
    assert set(order) == {b"a", b"b"}
