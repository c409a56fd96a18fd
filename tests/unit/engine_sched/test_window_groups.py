"""Window groups through the engine: what is freed behind the window, what a hand-off moves, what a prefix hit may use, how
much is held; and that tokens are those of an engine that keeps everything."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.block_identity import BlockHasher, IdentityHeader, block_keys, header_of_request
from diptych.common.errors import ConfigError, InternalError, InvalidRequestError
from diptych.common.kv_format import kv_group, windowed_format
from diptych.common.kv_groups import PoolDemand, expected_ranges, hit_end, most_blocks_held
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Failed,
    Finished,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    PublishCached,
    RangePacked,
    RunLocally,
    ScheduledSeq,
    TokensOut,
    UnpackRange,
)
from diptych.engine.offline import OfflineEngine
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import BlockIndex
from diptych.worker.cache_events import CacheEventFeed

BLOCK = 4
FORMATS = {"full and windows": (0, 6, 6, 9), "windows first": (7, 0, 3), "one window": (10, 10), "two windows": (6, 9)}
WINDOWS = [pytest.param(windows, id=name) for name, windows in FORMATS.items()]


def kept_whole(windows, prompt, count, *, seed=0):
    """The tokens of a runner whose tables hold every block of every group, driven by hand."""
    runner = FakeRunner(100, BLOCK, windows=windows, demand=PoolDemand(64, 64))
    groups = len(runner.kv.groups)
    tables = tuple(list(range(50 - 10 * g, 50 - 10 * g + 40)) for g in range(groups))
    sampling = SamplingParams(count, seed=seed)
    tokens, start, new = [], 0, list(prompt)
    for index in range(count):
        seq = ScheduledSeq("a", new, start, tables, True, sampling, index, (0,) * groups)
        [[token]] = runner.execute([seq]).token_ids
        tokens.append(token)
        start, new = start + len(new), [token]
    return tokens


def at_rest(engine):
    audit = engine.core.scheduler.audit(True)
    assert audit.violations == ()
    assert all((blocks.running, blocks.reserved) == (0, 0) for blocks in (audit.blocks, *audit.more_blocks))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_a_sliding_table_gives_the_tokens_of_one_that_keeps_every_block(kit, windows, chunk):
    engine = kit.make_engine(windows=windows, max_num_batched_tokens=chunk)
    requests = [kit.make_request(f"r{i}", 9 + 5 * i, 14, seed=i) for i in range(4)]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == kept_whole(windows, request.prompt.token_ids, 14, seed=request.sampling.seed)
    at_rest(engine)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prompt", [1, 4, 9, 23, 32])
@pytest.mark.parametrize("slab_tokens", [4, 64])
def test_a_hand_off_moves_what_the_next_token_sees_and_the_window_slides_on(kit, windows, prompt, slab_tokens):
    prefill = kit.make_engine(windows=windows, max_num_batched_tokens=8)
    decode = kit.make_engine(windows=windows)
    pair = kit.Pair(prefill, decode, slab_tokens=slab_tokens)
    tokens, cached = list(range(100, 100 + prompt)), 0
    for turn in range(3):
        request = kit.make_request(f"turn-{turn}", tokens, 16)
        outcome = pair.run([request])[request.attempt]
        assert isinstance(outcome.end, Finished)
        assert outcome.token_ids == kept_whole(windows, tokens, 16)
        assert outcome.cached_tokens == cached, "the turn before is in decode's cache, and what its last token sees"
        kv = prefill.core.scheduler.limits.kv
        needed = kv.transfer_bytes(cached, len(tokens))
        edges = sum((BLOCK - 1) * group.bytes_per_token(kv.shard) for group in kv.groups if group.window)
        assert needed <= outcome.moved_bytes <= needed + edges
        cached = (len(tokens) + 15) // BLOCK * BLOCK
        tokens += [*outcome.token_ids, 7, 8, 9]
    at_rest(prefill)
    at_rest(decode)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_group_that_never_comes_is_noticed_before_a_token_is_computed_from_it(kit, windows):
    """Each range of each group is lost once, and each group altogether; the sender calls the KV complete all the same."""
    request = kit.make_request("a", 23, 12)

    def run(drops):
        pair = kit.Pair(kit.make_engine(windows=windows), kit.make_engine(windows=windows), slab_tokens=4, drops=drops)
        return pair, pair.run([request])["a"]

    pair, whole = run(lambda packed: False)
    assert isinstance(whole.end, Finished)
    ranges = [(packed.group, packed.first_token) for packed in pair.ranges]
    groups = {group for group, _ in ranges}
    assert groups == set(range(len(set(windows))))
    losses = [[one] for one in ranges] + [[one for one in ranges if one[0] == group] for group in groups]
    noticed = 0
    for lost in losses:
        _, outcome = run(lambda packed, lost=lost: (packed.group, packed.first_token) in lost)
        assert isinstance(outcome.end, Failed)
        assert isinstance(outcome.end.error, InternalError)
        assert "never came" in str(outcome.end.error)
        assert outcome.token_ids == whole.token_ids[:1], "the first token is prefill's"
        noticed += 1
    assert noticed == len(losses) >= 3


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_range_is_written_only_where_its_group_expects_it(kit, windows):
    decode = kit.make_engine(windows=windows)
    decode.send(kit.make_request("a", 23, 12, mode=KvMode.REMOTE))
    kit.run_until_idle(decode)
    plan, kv = decode.core.scheduler.plan_unpack, decode.core.scheduler.limits.kv
    payload = memoryview(bytearray(4096))
    for index, group in enumerate(kv.groups):
        first = group.first_block(hit_end(BLOCK, 23)) * BLOCK
        assert plan(UnpackRange("a", 1, first, 23 - first, payload, group=index)) is not None
        if first:
            assert plan(UnpackRange("a", 1, first - BLOCK, BLOCK, payload, group=index)) is None, "behind the window"
        size = (23 - first) * group.bytes_per_token(kv.shard)
        assert plan(UnpackRange("a", 1, first, 23 - first, payload[: size - 1], group=index)) is None
        layers = {"first_layer": 1, "num_layers": group.num_layers}
        assert plan(UnpackRange("a", 1, first, 23 - first, payload, group=index, **layers)) is None
    assert plan(UnpackRange("a", 1, 20, 3, payload, group=len(kv.groups))) is None
    assert plan(UnpackRange("a", 1, 20, 3, payload, group=-1)) is None


# ---- how much is held ----


def gemma_3_like(max_num_seqs, chunk):
    """Five layers with a window of 512 to each full one, blocks of 16."""
    windows = [0 if (layer + 1) % 6 == 0 else 512 for layer in range(12)]
    demand = PoolDemand(max_num_seqs, chunk)
    return FakeRunner(2048, 16, windows=windows, max_model_len=16_384, demand=demand)


def bytes_held(engine):
    scheduler = engine.core.scheduler
    kv = scheduler.limits.kv
    pools = zip(kv.groups, scheduler.kv.pools, strict=True)
    return sum(pool.counts.running * group.block_bytes(kv.shard) for group, pool in pools)


def test_at_8192_tokens_a_gemma_3_like_model_holds_at_most_a_quarter_of_full_kv(kit):
    """And its prefill at most what the window and one chunk take."""
    length, chunk = 8192, 512
    runner = gemma_3_like(max_num_seqs=4, chunk=chunk)
    config = kit.make_config(num_blocks=2048, block_size=16, max_num_seqs=4, max_num_batched_tokens=chunk)
    engine = OfflineEngine(kit.local(runner), config, IdentityHeader(b"k" * 32, "m", "t", "u", 16))
    full = -(-length // 16) * sum(group.block_bytes(runner.kv.shard) for group in runner.kv.groups)
    engine.send(kit.make_request("a", [i % 900 for i in range(length - 40)], 80))
    peaks = Counter()
    for _ in range(17 + 40):
        decoding = "a" in engine.core.scheduler.running.decoding
        engine.core.step()
        engine.core.take_events()
        peaks["decode" if decoding else "prefill"] = max(peaks["decode" if decoding else "prefill"], bytes_held(engine))
    assert engine.core.scheduler.requests["a"].num_computed >= length
    assert bytes_held(engine) <= peaks["decode"] <= 0.25 * full
    window = next(group for group in runner.kv.groups if group.window)
    most = most_blocks_held(window, length, chunk) * window.block_bytes(runner.kv.shard)
    complete = runner.kv.groups[0]
    assert peaks["prefill"] <= -(-(length + 40) // 16) * complete.block_bytes(runner.kv.shard) + most <= 0.28 * full


def test_prefill_holds_only_what_the_hand_off_needs_while_it_waits_for_slabs(kit):
    windows = FORMATS["full and windows"]
    prefill = kit.make_engine(windows=windows, max_num_batched_tokens=8)
    prefill.send(kit.make_request("a", 32, mode=KvMode.PREFILL, peer="d"))
    kit.run_until_idle(prefill)
    scheduler = prefill.core.scheduler
    held = [pool.counts.running for pool in scheduler.kv.pools]
    assert held == [group.blocks_held(32) for group in scheduler.limits.kv.groups] == [8, 2, 2]
    prefill.send(GrantSlabs(kit.make_grants(4, 4096)))
    packed = [event for event in kit.run_until_idle(prefill) if isinstance(event, RangePacked)]
    assert [(one.group, one.first_token, one.num_tokens, one.num_layers) for one in packed] == [
        (0, 0, 32, 1), (1, 24, 8, 2), (2, 24, 8, 1),
    ]  # fmt: skip
    at_rest(prefill)


# ---- prefix hits ----


@settings(max_examples=60, deadline=None)
@given(
    windows=st.sampled_from(list(FORMATS.values())),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=8),
    num_blocks=st.integers(12, 24),
    chunk=st.sampled_from([5, 8, 40]),
)
def test_a_prefix_hit_ends_where_every_group_has_what_is_seen_and_is_the_longest(
    kit, windows, prompts, num_blocks, chunk
):
    """Of the caches that a random past has left in the pools; the tokens after the hit are those of a cold run."""
    runner = FakeRunner(num_blocks, BLOCK, windows=windows, demand=PoolDemand(1, chunk))
    engine = kit.make_engine(runner, num_blocks=num_blocks, max_num_batched_tokens=chunk)
    scheduler = engine.core.scheduler
    kv, pools = scheduler.limits.kv, scheduler.kv.pools
    for number, (kind, length) in enumerate(prompts):
        prompt = [kind * 7 + i % 11 for i in range(length)]
        request = kit.make_request(f"r{number}", prompt, 3)
        keys = keys_of(kit, prompt)

        def usable(num_tokens, keys=keys):
            for group, pool in zip(kv.groups, pools, strict=True):
                first = max(0, num_tokens + 1 - group.window) if group.window else 0
                seen = range(first // BLOCK, num_tokens // BLOCK)
                if any(pool.cached_block(keys[block]) is None for block in seen):
                    return False
            return True

        best = max(n for n in range(0, length, BLOCK) if n == 0 or usable(n))
        before = scheduler.outbox.totals.cached_tokens
        [result] = engine.generate([request])
        if result.error is not None:
            assert length + 2 > num_blocks * BLOCK
            continue
        assert scheduler.outbox.totals.cached_tokens - before == best
        assert result.token_ids == kept_whole(windows, prompt, 3)
    at_rest(engine)


def keys_of(kit, prompt):
    hasher = BlockHasher(header_of_request(kit.IDENTITY, Prompt(tuple(prompt))))
    hasher.update(prompt[: len(prompt) // BLOCK * BLOCK])
    return hasher.keys


# ---- what else a request may do ----


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prompt", [7, 16, 21])
def test_choices_and_beams_share_window_blocks_and_leave_nothing(kit, windows, prompt):
    sampling = SamplingParams(14, n=3, seed=3, ignore_eos=True)
    beams = SamplingParams(10, temperature=0.0, beam_width=3, n=2, ignore_eos=True)
    for params in (sampling, beams):
        outs = []
        for num_blocks in (64, 26):
            engine = kit.make_engine(windows=windows, num_blocks=num_blocks)
            engine.send(kit.make_request("a", prompt, sampling=params))
            events = kit.run_until_idle(engine)
            [end] = kit.ends_of(events)
            assert isinstance(end, Finished), end
            out: dict[int, list[int]] = {}
            for event in events:
                if isinstance(event, TokensOut):
                    out.setdefault(event.choice, []).extend(event.token_ids)
            outs.append(out)
            at_rest(engine)
        assert outs[0] == outs[1], "with room for all and with little"
    for choice, tokens in kit_choices(kit, windows, prompt, sampling).items():
        assert tokens == alone(kit, windows, prompt, sampling, choice)


def kit_choices(kit, windows, prompt, sampling):
    engine = kit.make_engine(windows=windows)
    engine.send(kit.make_request("a", prompt, sampling=sampling))
    out: dict[int, list[int]] = {}
    for event in kit.run_until_idle(engine):
        if isinstance(event, TokensOut):
            out.setdefault(event.choice, []).extend(event.token_ids)
    return out


def alone(kit, windows, prompt, sampling, choice):
    engine = kit.make_engine(windows=windows)
    one = kit.make_request("a", prompt, sampling=replace(sampling, n=1), choice=choice)
    engine.send(one)
    return [t for e in kit.run_until_idle(engine) if isinstance(e, TokensOut) for t in e.token_ids]


@pytest.mark.parametrize("windows", WINDOWS)
def test_steps_ahead_never_read_a_block_that_was_given_away(kit, windows):
    """Pools so small that a freed block has a new owner at once; the device computes as late as it may."""
    runner = FakeDeviceRunner(24, BLOCK, windows=windows, demand=PoolDemand(3, 8))
    engine = kit.make_engine(runner, num_blocks=24, max_num_batched_tokens=8, enable_prefix_caching=False)
    requests = [kit.make_request(f"r{i}", 3 + 4 * i, 18, seed=i) for i in range(4)]
    for request in requests:
        engine.send(request)
    events = kit.run_until_idle(engine)
    for request in requests:
        tokens = kit.tokens_of(events, request.attempt)
        assert tokens == kept_whole(windows, request.prompt.token_ids, 18, seed=request.sampling.seed)
    assert runner.most_in_flight == 2
    at_rest(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_falling_back_amid_a_hand_off_computes_the_prompt_here(kit, windows):
    prefill, decode = kit.make_engine(windows=windows), kit.make_engine(windows=windows)
    request = kit.make_request("a", 23, 12, mode=KvMode.REMOTE)
    decode.send(request)
    kit.run_until_idle(decode)
    prefill.send(GrantSlabs(kit.make_grants(4, 4096)))
    prefill.send(replace(request, mode=KvMode.PREFILL))
    events = kit.run_until_idle(prefill)
    packed = next(event for event in events if isinstance(event, RangePacked))
    decode.send(UnpackRange("a", 1, packed.first_token, packed.num_tokens, memoryview(bytes(4096)), group=packed.group))
    decode.send(FirstToken("a", kit.tokens_of(events)[0]))
    decode.send(RunLocally("a"))
    decode.send(KvComplete("a"))  # too late
    tokens = kit.tokens_of(kit.run_until_idle(decode))
    assert tokens == kept_whole(windows, request.prompt.token_ids, 12)
    at_rest(decode)


@pytest.mark.parametrize("windows", WINDOWS)
def test_prompts_that_share_window_blocks_do_not_wait_for_each_other_for_ever(kit, windows):
    """A block that one frees stays with the others, so the next chunk may find none: somebody is preempted."""
    runner = FakeRunner(40, BLOCK, windows=windows, demand=PoolDemand(2, 8))
    engine = kit.make_engine(runner, num_blocks=40, max_num_batched_tokens=8)
    shared = list(range(200, 224))
    requests = [kit.make_request(f"r{i}", [*shared[: 4 * (i + 1)], 900 + i, *range(20)], 6, seed=i) for i in range(6)]
    for request in requests:
        engine.send(request)
        engine.core.step()
    events = [*engine.core.take_events(), *kit.run_until_idle(engine)]
    for request in requests:
        tokens = kit.tokens_of(events, request.attempt)
        assert tokens == kept_whole(windows, request.prompt.token_ids, 6, seed=request.sampling.seed)
    at_rest(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_drafts_that_are_taken_back_leave_the_window_right(kit, windows):
    def guesses(attempt, token_ids, most):
        wanted = kept[len(token_ids) - 13 :][:2]
        return [*wanted, 5][:most]

    kept = kept_whole(windows, range(100, 113), 20)
    engine = kit.make_engine(windows=windows)
    engine.core.scheduler.drafter = guesses
    engine.send(kit.make_request("a", 13, 20))
    assert kit.tokens_of(kit.run_until_idle(engine)) == kept
    assert engine.core.steps < 12
    at_rest(engine)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("held", [0, 8])
def test_cached_blocks_are_published_by_group(kit, windows, held):
    """Keys are asked for: of each group comes what the token behind them sees, and the pins are given back."""
    source = kit.make_engine(windows=windows)
    prompt = list(range(300, 328))
    assert source.generate([kit.make_request("a", prompt, 3)])[0].error is None
    keys = keys_of(kit, prompt)
    grants = kit.make_grants(4, 4096)
    payloads = {grant.slab: grant.payload for grant in grants}
    source.send(GrantSlabs(grants))
    source.send(PublishCached("s", tuple(keys), held, "d"))
    packed = [event for event in kit.run_until_idle(source) if isinstance(event, RangePacked)]
    kv = source.core.scheduler.limits.kv
    assert [(one.group, one.first_token, one.first_token + one.num_tokens) for one in packed] == [
        (part.group, part.first, part.end) for part in expected_ranges(kv, held, 28)
    ]
    runner = source.core._executor.runner
    for one in packed:
        pool = source.core.scheduler.kv.pools[one.group]
        blocks = [pool.cached_block(key) for key in keys]
        whole = b"".join(runner.pools[one.group][blocks[i]].tobytes() for i in range(one.first_token // BLOCK, 7))
        assert bytes(payloads[one.slab][: one.size_bytes]) == whole
    at_rest(source)


# ---- what is refused ----


def test_what_window_groups_cannot_do_is_refused_by_name(kit):
    with pytest.raises(ConfigError, match="num_host_blocks.*window-6"):
        kit.make_engine(FakeRunner(64, BLOCK, windows=(0, 6), num_host_blocks=8), num_host_blocks=8)
    runner = FakeRunner(64, BLOCK, windows=(0, 6))
    kv = runner.kv
    runner.kv = replace(kv, groups=(kv.groups[0], kv_group((1,), 1, 4, block_size=8, dtype="int8", window=6)))
    with pytest.raises(ConfigError, match="block_size"):
        kit.make_engine(runner)
    engine = kit.make_engine(FakeRunner(64, BLOCK, windows=(0, 30), demand=PoolDemand(2, 4)))
    params = SamplingParams(20, temperature=0.0, beam_width=4, n=1)
    [result] = engine.generate([kit.make_request("a", 40, sampling=params)])
    assert isinstance(result.error, InvalidRequestError)
    assert result.error.param == "beam_width"


def test_a_worker_with_windows_has_room_for_long_prompts_that_full_kv_would_not_hold():
    kv = windowed_format([512, 512], 1, 64, block_size=16, dtype="bfloat16")
    assert PoolDemand(4, 512).group_blocks(kv, 100) == (100,)
    assert most_blocks_held(kv.groups[0], 100_000, 512) == 65


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_blocks", [16, 40])
def test_events_name_the_first_groups_blocks_and_a_router_expects_no_less_than_there_is(kit, windows, num_blocks):
    """Behind hand-offs and local prompts, with evictions in every pool. Of windows alone a router expects less on decode: it
    counts from the prompt's start."""
    chance = random.Random(num_blocks)
    small = {"windows": windows, "num_blocks": num_blocks, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    pair = kit.Pair(kit.make_engine(**small), kit.make_engine(**small), slab_tokens=8, reusable=True)
    kv, feed, index = pair.decode.core.scheduler.kv, CacheEventFeed("i"), BlockIndex()
    index.register("d0", "i", 0)
    family = [chance.randrange(900) for _ in range(40)]
    asked, less, more, hits = [], 0, 0, 0
    for number in range(30):
        prompt = [*family[: chance.randrange(1, 40)], *(chance.randrange(900) for _ in range(chance.randrange(1, 9)))]
        asked.append(prompt)
        pair.seen.clear()
        outcome = pair.run([kit.make_request(f"r{number}", prompt, chance.randrange(1, 9))])[f"r{number}"]
        assert isinstance(outcome.end, Finished)
        index.apply_all("d0", filter(None, map(feed.convert, pair.seen)))
        assert index.keys_of("d0", 0) == set(kv.pool.dump().tiers[0].keys)
        for known in asked:
            keys = block_keys(header_of_request(kit.IDENTITY, Prompt(tuple(known))), known)
            expected, there = int(index.runs(as_keys(keys)).blocks[index.column("d0")]), kv.num_cached_blocks(keys)
            hits += there
            less += expected < there
            more += expected > there
    assert hits
    assert (less > 0) == (0 not in windows)
    assert more or len(set(windows)) == 1
    at_rest(pair.decode)
