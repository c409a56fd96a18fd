"""Blocks that come from another engine's prefix cache, by their identities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import RequestCancelledError
from diptych.common.request import Prompt
from diptych.common.text.prompt_digest import prompt_digest
from diptych.engine.fake_runner import FakeAdapter, FakeRunner
from diptych.engine.messages import (
    Admitted,
    BlocksStored,
    Cancel,
    EndPull,
    Failed,
    Finished,
    GrantSlabs,
    KeepAdapter,
    KvMode,
    PrefillComplete,
    PromptComputed,
    PublishCached,
    PullBlocks,
    Pulled,
    PullStarted,
    RangePacked,
    RangeUnpacked,
    UnpackRange,
)

WINDOWS = ((), (0, 6, 6, 9), (7, 7, 7, 7))
TURN_1 = tuple(range(100, 130))
NEW = tuple(range(700, 709))


class Source:
    """Publishes an engine's cached blocks, as `Source.Fetch` does."""

    def __init__(self, kit, engine, slabs: int = 8, slab_tokens: int = 8) -> None:
        self.engine = engine
        grants = kit.make_grants(slabs, slab_tokens * engine.core.scheduler.limits.kv_bytes_per_token)
        self._slabs = {grant.slab: grant for grant in grants}
        engine.send(GrantSlabs(grants))

    def fetch(self, keys, held: int) -> list[UnpackRange]:
        """Ranges of the leading blocks that it has, behind the `held` tokens; of the attempt "pull"."""
        self.engine.send(PublishCached("source/pull", tuple(keys), held, "reader"))
        ranges: list[UnpackRange] = []
        while True:
            self.engine.core.step()
            events = self.engine.core.take_events()
            for event in events:
                if isinstance(event, RangePacked):
                    grant = self._slabs[event.slab]
                    ranges.append(
                        UnpackRange(
                            "pull", len(ranges), event.first_token, event.num_tokens,
                            memoryview(bytes(grant.payload[: event.size_bytes])), group=event.group,
                        )
                    )  # fmt: skip
                    self.engine.send(GrantSlabs((grant,)))
            if any(isinstance(event, PrefillComplete) for event in events):
                return ranges


def events_of(engine, *commands) -> list:
    for command in commands:
        engine.send(command)
    return engine.core.take_events()


def pull(
    source: Source,
    reader,
    tokens,
    salt: bytes = b"",
    keep: Callable[[UnpackRange], bool] = lambda part: True,
    adapter: str = "",
) -> Pulled:
    """Pull the whole blocks of `tokens`. `keep`: which ranges arrive."""
    whole = tuple(tokens)[: len(tokens) // 4 * 4]
    [event] = events_of(reader, PullBlocks("pull", Prompt(whole, salt, adapter), vouch=True))
    if isinstance(event, Pulled):
        return event
    assert isinstance(event, PullStarted)
    parts = [part for part in source.fetch(event.keys, event.num_cached_tokens) if keep(part)]
    events = events_of(reader, *parts, EndPull("pull"))
    [done] = [e for e in events if isinstance(e, Pulled)]
    return done


def nothing_held(engine) -> None:
    for pool in engine.core.scheduler.kv.pools:
        assert (pool.counts.running, pool.counts.reserved) == (0, 0)
    assert not engine.core.scheduler.requests
    assert not engine.core.scheduler.check()


def in_the_midst_of_a_step(engine, *commands) -> list:
    """The engine is given one more command between two layers each of the next step. Returns: the events that were delivered
    before that step ended."""
    left, early = list(commands), []

    def take() -> bool:
        if not left:
            return False
        engine.core.handle(left.pop(0))
        return True

    engine.core.on_layer(take)
    engine.core.on_packing(lambda: None, lambda: early.extend(engine.core.take_events()))
    assert engine.core.step()
    engine.core.on_layer(lambda: False)
    assert not left
    return early


def turn_1(kit, windows, tokens=TURN_1, num_blocks=64, **fields):
    """A decode engine that has answered, and prompt and answer."""
    holder = kit.make_engine(windows=windows, num_blocks=num_blocks)
    [answer] = holder.generate([kit.make_request("turn-1", tokens, 11, **fields)])
    return holder, (*tokens, *answer.token_ids)


def computed_by_prefill(kit, engine, prompt, **fields) -> tuple[PromptComputed, int]:
    """What it vouches for, and how many tokens it computed."""
    before = engine.stats().computed_tokens_total
    engine.send(kit.make_request("turn-2", prompt, mode=KvMode.PREFILL, want_kv=False, **fields))
    [reported] = [e for e in kit.run_until_idle(engine) if isinstance(e, PromptComputed)]
    return reported, engine.stats().computed_tokens_total - before


def test_blocks_of_an_adapter_are_pulled_for_the_same_adapter_only(kit):
    """Nothing is computed for a pull: it takes no slot, and the reader need not know the adapter yet."""
    adapter = kit.adapter_id("a")
    holder = kit.make_lora_engine("ab", 1)
    holder.generate([kit.make_request("first", Prompt(TURN_1, adapter=adapter), 2)])
    source = Source(kit, holder)
    for other in ("", kit.adapter_id("b")):
        reader = kit.make_lora_engine("ab", 1)
        assert pull(source, reader, TURN_1, adapter=other).num_new == 0
    reader = kit.make_lora_engine("", 1)
    assert pull(source, reader, TURN_1, adapter=adapter).num_new == 28
    assert reader.stats().adapters.resident == ()
    reader.send(KeepAdapter(FakeAdapter(adapter)))
    request = kit.make_request("again", Prompt(TURN_1, adapter=adapter), 8, seed=3)
    [again] = reader.generate([request])
    [alone] = kit.make_lora_engine("a", 1).generate([request])
    assert (again.token_ids, again.num_cached_tokens) == (alone.token_ids, 28)
    nothing_held(reader)


@pytest.mark.parametrize("windows", WINDOWS)
def test_turn_2_computes_at_most_a_block_and_the_new_tokens(kit, windows):
    holder, history = turn_1(kit, windows)
    prompt = (*history, *NEW)
    prefill = kit.make_engine(windows=windows)
    done = pull(Source(kit, holder), prefill, history)
    assert done.num_tokens == done.num_new == (len(history) - 1) // 4 * 4  # the last token's KV was never computed
    reported, computed = computed_by_prefill(kit, prefill, prompt)
    assert computed <= 4 + len(NEW)
    assert computed == len(prompt) - done.num_tokens
    # what it vouches for covers the pulled tokens
    assert reported.computed_from.digest == prompt_digest(prompt, 4)
    # and the KV is right: the fake model's tokens depend on all of it
    request = kit.make_request("again", prompt, 8, seed=3)
    [again] = prefill.generate([request])
    assert again.token_ids == kit.undisturbed([request], windows)["again"]
    nothing_held(prefill)
    nothing_held(holder)


def test_pulled_blocks_are_announced_as_any_others(kit):
    holder, history = turn_1(kit, ())
    reader = kit.make_engine()
    source = Source(kit, holder)
    [started] = events_of(reader, PullBlocks("pull", Prompt(history[:40])))
    events = events_of(reader, *source.fetch(started.keys, 0), EndPull("pull"))
    stored = [key for e in events if isinstance(e, BlocksStored) for key in e.keys]
    assert stored == list(started.keys)
    assert reader.stats().pulled_tokens_total == 40


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_gap_ends_what_may_be_used(kit, windows):
    """The last range never came: with one group what is before it, with several nothing."""
    holder, history = turn_1(kit, windows)
    reader = kit.make_engine(windows=windows)
    done = pull(Source(kit, holder), reader, history[:40], keep=lambda part: part.first_token + part.num_tokens < 40)
    assert done.num_tokens == done.num_new == (0 if windows else 32)
    request = kit.make_request("r", (*history, *NEW), 6)
    [result] = reader.generate([request])
    assert result.num_cached_tokens == done.num_tokens
    assert result.token_ids == kit.undisturbed([request], windows)["r"]
    nothing_held(reader)


def test_what_was_evicted_at_the_holder_is_a_miss(kit):
    holder, history = turn_1(kit, ())
    source = Source(kit, holder)
    keys = holder.core.scheduler.kv.pool.dump().tiers[0].keys
    holder.core.scheduler.kv.pool.discard(holder.core.scheduler.kv.pool.find(keys[:4])[3:])
    done = pull(source, kit.make_engine(), history[:40])
    assert (done.num_tokens, done.num_new) == (12, 12)
    holder.core.scheduler.kv.clear()
    done = pull(source, kit.make_engine(), history[:40])
    assert (done.num_tokens, done.num_new) == (0, 0)
    nothing_held(holder)


def test_blocks_that_are_being_packed_cannot_be_evicted(kit):
    """The source waits for a slab while others need every block: what it sends later is what it found."""
    holder, history = turn_1(kit, (), num_blocks=16)
    keys = holder.core.scheduler.kv.pool.dump().tiers[0].keys
    events_of(holder, PublishCached("source/pull", tuple(keys), 0, "reader"))
    holder.generate([kit.make_request("other", range(400, 418), 6)])  # takes all other blocks
    assert holder.core.scheduler.kv.pool.counts.running == 10
    grants = kit.make_grants(3, 16 * holder.core.scheduler.limits.kv_bytes_per_token)
    holder.send(GrantSlabs(grants))
    packed = [e for e in kit.run_until_idle(holder) if isinstance(e, RangePacked)]
    reader = kit.make_engine()
    [started] = events_of(reader, PullBlocks("pull", Prompt(history[:40])))
    parts = [UnpackRange("pull", i, e.first_token, e.num_tokens, grants[e.slab].payload) for i, e in enumerate(packed)]
    [done] = [e for e in events_of(reader, *parts, EndPull("pull")) if isinstance(e, Pulled)]
    assert done.num_tokens == 40
    request = kit.make_request("r", (*history, *NEW), 6)
    [result] = reader.generate([request])
    assert result.token_ids == kit.undisturbed([request])["r"]
    nothing_held(holder)


def test_what_is_cached_here_is_not_pulled(kit):
    holder, history = turn_1(kit, ())
    reader = kit.make_engine()
    reader.generate([kit.make_request("p", TURN_1, 1)])
    [started] = events_of(reader, PullBlocks("pull", Prompt(history[:40])))
    assert started.num_cached_tokens == 28
    parts = Source(kit, holder).fetch(started.keys, 28)
    assert sum(part.num_tokens for part in parts) == 12
    [done] = [e for e in events_of(reader, *parts, EndPull("pull")) if isinstance(e, Pulled)]
    assert (done.num_tokens, done.num_new) == (40, 12)
    assert events_of(reader, PullBlocks("pull", Prompt(history[:40]))) == [Pulled("pull", 40)]


@pytest.mark.parametrize(
    ("changes", "num_tokens", "why"),
    [
        ({"num_blocks": 9}, 40, "no free blocks"),
        ({"enable_prefix_caching": False}, 40, "prefix caching is off"),
        ({}, 39, "no whole blocks"),
        ({}, 0, "no whole blocks"),
    ],
)
def test_a_pull_that_cannot_be_is_refused_at_once(kit, changes, num_tokens, why):
    reader = kit.make_engine(**changes)
    [done] = events_of(reader, PullBlocks("pull", Prompt(tuple(range(num_tokens)))))
    assert (done.num_tokens, done.num_new) == (0, 0)
    assert why in done.note
    nothing_held(reader)


def test_a_pull_takes_no_place_of_a_sequence_and_is_counted(kit):
    reader = kit.make_engine(max_num_seqs=1)
    [started] = events_of(reader, PullBlocks("pull", Prompt(tuple(range(16)))))
    assert isinstance(started, PullStarted)
    assert reader.stats().num_waiting_remote == 1
    [result] = reader.generate([kit.make_request("r", 9, 3)])
    assert len(result.token_ids) == 3
    assert isinstance(events_of(reader, EndPull("pull"))[0], Pulled)
    nothing_held(reader)


def test_every_end_gives_the_blocks_back(kit):
    holder, history = turn_1(kit, ())
    reader, source = kit.make_engine(), Source(kit, holder)
    pull_command = PullBlocks("pull", Prompt(history[:40]))
    [started] = events_of(reader, pull_command)
    parts = source.fetch(started.keys, 0)
    assert isinstance(events_of(reader, parts[0])[0], RangeUnpacked)
    [failed] = events_of(reader, Cancel("pull"))
    assert isinstance(failed.error, RequestCancelledError)
    nothing_held(reader)
    # late ranges are written nowhere, a second end has no effect
    late = events_of(reader, parts[1], EndPull("pull"))
    assert [(type(e), e.unpacked) for e in late] == [(RangeUnpacked, False)]
    # the same name twice: both end, once
    events_of(reader, pull_command)
    assert [type(e) for e in events_of(reader, pull_command)] == [Failed]
    nothing_held(reader)


def test_no_range_outside_of_the_pull_is_written(kit):
    holder, history = turn_1(kit, ())
    reader = kit.make_engine()
    reader.generate([kit.make_request("p", TURN_1, 1)])
    [started] = events_of(reader, PullBlocks("pull", Prompt(history[:36])))
    payload = memoryview(bytes(64 * reader.core.scheduler.limits.kv_bytes_per_token))
    for first, count in ((0, 8), (24, 8), (32, 8), (36, 4), (30, 4)):
        [answer] = events_of(reader, UnpackRange("pull", 0, first, count, payload))
        assert not answer.unpacked, (first, count)
    events_of(reader, EndPull("pull"))
    nothing_held(reader)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_rewritten_history_never_gets_the_kv_of_the_old_one(kit, data):
    """Whatever was changed, dropped or inserted, and whatever is asked for, by whichever tenant: the tokens are those of an
    engine that was alone with this request, and no block behind the change is reused."""
    windows = data.draw(st.sampled_from(WINDOWS))
    holder, history = turn_1(kit, windows, cache_salt=b"a")
    source, rewritten = Source(kit, holder), list(history)
    at = data.draw(st.integers(0, len(history) - 1))
    match data.draw(st.sampled_from(["nothing", "change", "drop", "insert", "swap", "other tenant"])):
        case "change":
            rewritten[at] += 1
        case "drop":
            del rewritten[at]
        case "insert":
            rewritten.insert(at, 5)
        case "swap":
            rewritten[at], rewritten[0] = rewritten[0], rewritten[at]
        case "other tenant":
            at = -1
    salt = b"b" if at < 0 else b"a"
    same = 0 if at < 0 else next((i for i, (a, b) in enumerate(zip(history, rewritten, strict=False)) if a != b), 999)
    reader = kit.make_engine(windows=windows)
    done = pull(source, reader, rewritten, salt)
    assert done.num_new <= same // 4 * 4
    request = kit.make_request("r", (*rewritten, *NEW), 5, seed=2, cache_salt=salt)
    [result] = reader.generate([request])
    assert result.num_cached_tokens <= same // 4 * 4
    assert result.token_ids == kit.undisturbed([request], windows)["r"]
    nothing_held(reader)


def test_a_pull_does_not_hide_a_wrong_block_that_rows_have_shown(kit):
    """The blocks in front of the pulled ones were computed here: what is recorded of them stays."""
    holder, history = turn_1(kit, ())
    prefill = kit.make_engine()
    computed_by_prefill(kit, prefill, TURN_1)
    pool = prefill.core.scheduler.kv.pool
    keys = pool.dump().tiers[0].keys
    right = pool.find(keys)[6]
    # A bug of the cache: the last key names a block of another prompt.
    prefill.send(kit.make_request("other", range(900, 910), mode=KvMode.PREFILL, want_kv=False))
    kit.run_until_idle(prefill)
    wrong = next(b for k, b in pool._by_key.items() if k not in keys)
    pool._by_key[keys[6]], pool._keys[wrong] = wrong, keys[6]
    pool._keys[right] = None
    prefill.core._check = False
    [started] = events_of(prefill, PullBlocks("pull", Prompt(history[:40]), vouch=True))
    assert started.num_cached_tokens == 28
    parts = Source(kit, holder).fetch(started.keys, 28)
    events_of(prefill, *parts, EndPull("pull"))
    reported, _ = computed_by_prefill(kit, prefill, (*history, *NEW))
    assert reported.computed_from.digest != prompt_digest((*history, *NEW), 4)


LAYERS = 5


def busy(kit, engine, attempt="busy"):
    """Its prompt is computed, and it decodes."""
    request = kit.make_request(attempt, range(800, 810), 8)
    engine.send(request)
    engine.core.step()
    engine.core.take_events()
    return request


def test_a_holder_serves_a_fetch_between_two_layers_of_a_step(kit):
    holder = kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS))
    [answer] = holder.generate([kit.make_request("turn-1", TURN_1, 11)])
    history = (*TURN_1, *answer.token_ids)
    other = busy(kit, holder)
    keys = holder.core.scheduler.kv.pool.dump().tiers[0].keys[:10]
    grants = kit.make_grants(8, 20 * holder.core.scheduler.limits.kv_bytes_per_token)
    holder.send(GrantSlabs(grants))
    early = in_the_midst_of_a_step(holder, PublishCached("source/pull", keys, 0, "reader"))
    assert [type(event) for event in early] == [Admitted, RangePacked, RangePacked, PrefillComplete]
    parts = [
        UnpackRange("pull", i, e.first_token, e.num_tokens, grants[e.slab].payload)
        for i, e in enumerate(event for event in early if isinstance(event, RangePacked))
    ]
    reader = kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS))
    events_of(reader, PullBlocks("pull", Prompt(history[:40])))
    events_of(reader, *parts, EndPull("pull"))
    request = kit.make_request("again", history, 6)
    fresh = kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS))
    assert reader.generate([request])[0].token_ids == fresh.generate([request])[0].token_ids
    running = kit.run_until_idle(holder)
    assert any(isinstance(event, Finished) and event.attempt == other.attempt for event in running)
    nothing_held(holder)


def test_a_reader_takes_a_pull_between_two_layers_of_one_step(kit):
    """All of it: the blocks are in the cache before that step ends, and the step itself is not disturbed."""
    make = lambda: kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS))  # noqa: E731
    holder, reader = make(), make()
    [answer] = holder.generate([kit.make_request("turn-1", TURN_1, 11)])
    history = (*TURN_1, *answer.token_ids)
    [started] = events_of(make(), PullBlocks("pull", Prompt(history[:40])))
    parts = Source(kit, holder, slab_tokens=20).fetch(started.keys, 0)
    assert len(parts) == 2
    other = busy(kit, reader)
    early = in_the_midst_of_a_step(reader, PullBlocks("pull", Prompt(history[:40])), *parts, EndPull("pull"))
    assert [type(e) for e in early] == [PullStarted, RangeUnpacked, RangeUnpacked, Pulled, BlocksStored]
    request = kit.make_request("again", history, 6)
    reader.send(request)
    events = kit.run_until_idle(reader)
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    assert admitted.num_cached_tokens == 40
    assert kit.tokens_of(events, "again") == make().generate([request])[0].token_ids
    alone = make().generate([other])[0].token_ids
    assert kit.tokens_of(events, "busy") == alone[-len(kit.tokens_of(events, "busy")) :]
    nothing_held(reader)


def test_blocks_of_a_step_that_runs_are_free_when_it_is_over(kit):
    """Whatever a command between two layers ends: the other layers are still written to these blocks."""
    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS))
    busy(kit, engine)
    pool, held = engine.core.scheduler.kv.pool, []
    engine.core._executor.runner.between_layers = lambda num_layers: held.append(pool.counts.running)
    in_the_midst_of_a_step(engine, Cancel("busy"))
    assert held == [3] * (LAYERS - 1)
    assert [type(event) for event in kit.run_until_idle(engine)] == []
    nothing_held(engine)


def test_blocks_that_a_pull_takes_from_the_host_tier_are_there_before_they_are_packed_for_another(kit):
    """A pull's reader may be a holder: between its two commands no step has copied the blocks."""
    holder = kit.make_engine(
        FakeRunner(8, kit.BLOCK, num_host_blocks=16), num_blocks=8, num_host_blocks=16, initial_copy_bytes_per_s=1e12
    )
    holder.generate([kit.make_request("a", 21, 3)])
    holder.generate([kit.make_request("b", range(500, 524), 3)])  # pushes it out of the pool
    begun = events_of(holder, PullBlocks("third", Prompt((*range(100, 120), 7, 8, 9, 10))))
    [started] = [event for event in begun if isinstance(event, PullStarted)]
    assert started.num_cached_tokens == 20
    sent = Source(kit, holder).fetch(started.keys[:5], 0)
    fresh = kit.make_engine()
    fresh.generate([kit.make_request("a", 21, 3)])
    assert [part.payload for part in sent] == [part.payload for part in Source(kit, fresh).fetch(started.keys[:5], 0)]


def pushed_out(kit, **fields):
    """An engine whose pool of 8 blocks has lost all but the first of a prompt's five blocks to its host tier."""
    runner = FakeRunner(8, kit.BLOCK, num_host_blocks=16)
    fields = {"num_blocks": 8, "num_host_blocks": 16, "initial_copy_bytes_per_s": 1e12} | fields
    engine = kit.make_engine(runner, **fields)
    engine.generate([kit.make_request("a", 21, 3)])
    engine.generate([kit.make_request("b", range(500, 524), 3)])
    kv, keys = engine.core.scheduler.kv, keys_of(kit)
    assert (kv.num_cached_blocks(keys), len(kv.host.find(keys[1:]))) == (1, 4)
    return engine


def keys_of(kit) -> list[bytes]:
    """Of the five whole blocks of `pushed_out`'s prompt."""
    [started] = events_of(kit.make_engine(), PullBlocks("keys", Prompt(tuple(range(100, 120)))))
    return list(started.keys)


def test_a_holder_serves_what_is_in_its_host_tier(kit):
    """Until then a worker's host memory was its own: what had left the pool was computed by others."""
    holder, reader = pushed_out(kit), kit.make_engine()
    cached = holder.core.scheduler.kv.pool.dump().tiers[0].keys
    hits = holder.stats().tiers
    done = pull(Source(kit, holder), reader, range(100, 120))
    assert (done.num_tokens, done.num_new, done.note) == (20, 20, "")
    request = kit.make_request("r", 21, 6)
    [result] = reader.generate([request])
    assert (result.num_cached_tokens, result.token_ids) == (20, kit.undisturbed([request])["r"])
    # The copies were for the reader alone: the holder's cache has nothing new, and no request of its own was a hit.
    assert set(holder.core.scheduler.kv.pool.dump().tiers[0].keys) <= set(cached)
    assert [(one.name, one.hit_tokens) for one in holder.stats().tiers] == [(one.name, one.hit_tokens) for one in hits]
    nothing_held(holder)


def test_what_a_holder_serves_says_its_tier(kit):
    holder = pushed_out(kit)
    events = events_of(holder, PublishCached("s", tuple(keys_of(kit)), 0, "x"))
    [admitted] = [event for event in events if isinstance(event, Admitted)]
    assert (admitted.num_cached_tokens, admitted.tiers) == (20, (("host", 16),))
    assert {one.name: one.served_tokens for one in holder.stats().tiers} == {"device": 4, "host": 16}
    events_of(holder, Cancel("s"), PublishCached("s", tuple(keys_of(kit)), 8, "x"))  # it has two blocks
    assert {one.name: one.served_tokens for one in holder.stats().tiers} == {"device": 4, "host": 28}


def test_a_holder_whose_blocks_are_all_in_use_serves_what_is_cached(kit):
    """It waits for nothing, and takes nothing from its own requests."""
    holder = pushed_out(kit)
    own = kit.make_request("own", range(700, 726), 4)
    holder.send(own)
    events = list(holder.step())
    assert holder.core.scheduler.kv.pool.available == 1
    events += events_of(holder, PublishCached("s", tuple(keys_of(kit)), 0, "x"))
    [admitted] = [event for event in events if isinstance(event, Admitted) and event.attempt == "s"]
    assert (admitted.num_cached_tokens, admitted.tiers) == (4, (("host", 4),))
    events += events_of(holder, Cancel("s"))
    assert kit.tokens_of(events + kit.run_until_idle(holder), "own") == kit.undisturbed([own])["own"]
    nothing_held(holder)


def test_a_host_tier_slower_than_computing_is_not_served(kit):
    holder = pushed_out(kit, initial_copy_bytes_per_s=1.0)
    done = pull(Source(kit, holder), kit.make_engine(), range(100, 120))
    assert done.num_tokens == 4
    nothing_held(holder)


def test_a_step_is_not_slower_for_the_pulls_that_it_served(kit):
    """By its own account: the rate of prompts, which routers place by, would fall."""
    clock = kit.FakeClock()
    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, num_layers=LAYERS, between_layers=lambda _: clock.advance(0.25)))
    engine.core._clock = clock
    engine.core.on_layer(lambda: bool(clock.advance(7.0)))
    engine.generate([kit.make_request("a", 32, 1)])
    assert engine.stats().prefill_tokens_per_s == pytest.approx(32 / (0.25 * (LAYERS - 1)))
