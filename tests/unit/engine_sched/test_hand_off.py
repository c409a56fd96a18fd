"""Prefill packs, decode unpacks: the tokens are those of the undisturbed local run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.errors import InternalError, RequestCancelledError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    Cancel,
    Failed,
    Finished,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    PrefillComplete,
    RangePacked,
    RangeUnpacked,
    RunLocally,
    TokensOut,
    UnpackRange,
)
from diptych.engine.overlap import Overlap


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("num_prompt", [1, 4, 8, 9, 21])
def test_ids_equal_the_local_run_for_every_chunk_size(kit, chunk, num_prompt):
    request = kit.make_request(prompt=num_prompt, max_tokens=6, seed=3)
    pair = kit.Pair(kit.make_engine(max_num_batched_tokens=chunk), kit.make_engine())
    outcome = pair.run([request])["a"]
    assert outcome.token_ids == kit.undisturbed([request])["a"]
    assert outcome.moved_tokens == num_prompt


def test_a_batch_with_warm_prefixes_on_both_sides(kit):
    requests = [kit.make_request(f"r{i}", [*range(200, 200 + 4 * (i % 3 + 1)), 7 + i, 8], 5, seed=i) for i in range(9)]
    pair = kit.Pair(kit.make_engine(max_num_batched_tokens=10), kit.make_engine(), slabs=3)
    first = pair.run(requests)
    wanted = kit.undisturbed(requests)
    assert {a: o.token_ids for a, o in first.items()} == wanted
    again = [replace(r, attempt=r.attempt + "x") for r in requests]
    second = pair.run(again)
    for r in requests:
        outcome = second[r.attempt + "x"]
        assert outcome.token_ids == wanted[r.attempt]
        assert outcome.cached_tokens == (len(r.prompt.token_ids) - 1) // kit.BLOCK * kit.BLOCK
        assert outcome.moved_tokens == len(r.prompt.token_ids) - outcome.cached_tokens


def test_forced_tokens_are_computed_by_prefill_but_never_drawn_again(kit):
    request = kit.make_request(prompt=11, max_tokens=9)
    whole = kit.undisturbed([request])["a"]
    for sent in (1, 2, 5):
        resumed = replace(request, output_token_ids=tuple(whole[:sent]))
        pair = kit.Pair(kit.make_engine(max_num_batched_tokens=5), kit.make_engine())
        outcome = pair.run([resumed])["a"]
        assert outcome.token_ids == whole[sent:]
        assert outcome.moved_tokens == 11 + sent - 1


def test_a_flipped_byte_changes_the_ids(kit):
    request = kit.make_request(prompt=13, max_tokens=6)

    def flip(data: bytearray) -> None:
        data[5] ^= 1

    pair = kit.Pair(kit.make_engine(), kit.make_engine(), on_payload=flip)
    damaged = pair.run([request])["a"].token_ids
    good = kit.undisturbed([request])["a"]
    assert damaged[0] == good[0]
    assert damaged != good


def test_decode_preempts_and_still_gives_the_same_ids(kit):
    requests = [kit.make_request(f"r{i}", [30 + i, *range(50, 58)], 14) for i in range(2)]
    pair = kit.Pair(kit.make_engine(), kit.make_engine(num_blocks=7, enable_prefix_caching=False))
    outcomes = pair.run(requests)
    assert {a: o.token_ids for a, o in outcomes.items()} == kit.undisturbed(requests)
    assert pair.decode.stats().preemptions_total > 0


def test_eos_first_and_one_token_take_no_decode_step(kit):
    decode = kit.make_engine()
    for attempt, token, max_tokens, reason in (("eos", 2, 9, FinishReason.STOP), ("one", 9, 1, FinishReason.LENGTH)):
        sampling = SamplingParams(max_tokens=max_tokens)
        decode.send(kit.make_request(attempt, 9, sampling=sampling, mode=KvMode.REMOTE))
        decode.step()
        decode.send(FirstToken(attempt, token))
        events = decode.step()
        assert events[0] == TokensOut(attempt, 0, (token,), "")
        assert isinstance(events[1], Finished)
        assert events[1].reason is reason
    assert decode.core.steps == 0
    assert decode.core.scheduler.kv.pool.counts.free == 64


def test_want_kv_false_packs_nothing(kit):
    prefill = kit.make_engine()
    prefill.send(GrantSlabs(kit.make_grants(2, 1000)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, want_kv=False))
    events = kit.run_until_idle(prefill)
    assert len(kit.tokens_of(events)) == 1
    assert not [e for e in events if isinstance(e, RangePacked)]
    assert [type(e) for e in kit.ends_of(events)] == [PrefillComplete]


def test_ranges_are_block_aligned_split_to_fit_and_end_with_the_tail(kit):
    prefill = kit.make_engine(max_num_batched_tokens=10)
    token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
    prefill.send(GrantSlabs(kit.make_grants(9, 4 * token_bytes + 3)))
    prefill.send(kit.make_request(prompt=14, mode=KvMode.PREFILL, decode_cached_tokens=4, peer="d"))
    config_quota = [e for e in kit.run_until_idle(prefill) if isinstance(e, RangePacked)]
    assert [(e.first_token, e.num_tokens) for e in config_quota] == [(4, 4), (8, 4), (12, 2)]
    assert [e.size_bytes for e in config_quota] == [4 * token_bytes, 4 * token_bytes, 2 * token_bytes]


def test_the_first_token_comes_before_the_last_range(kit):
    prefill = kit.make_engine()
    prefill.send(GrantSlabs(kit.make_grants(1, 4096)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL))
    kinds = [type(e).__name__ for e in kit.run_until_idle(prefill)]
    assert kinds[:5] == ["Admitted", "PromptComputed", "TokensOut", "RangePacked", "PrefillComplete"]


def test_without_a_slab_the_blocks_wait_and_others_go_on(kit):
    prefill = kit.make_engine()
    prefill.send(kit.make_request("stuck", 9, mode=KvMode.PREFILL))
    events = kit.run_until_idle(prefill)
    assert kit.ends_of(events, "stuck") == []
    assert prefill.core.scheduler.audit(False).attempts == {"packing": 1}
    prefill.send(kit.make_request("local", 5, 3))
    assert isinstance(kit.ends_of(kit.run_until_idle(prefill), "local")[0], Finished)
    prefill.send(GrantSlabs(kit.make_grants(1, 4096)))
    assert isinstance(kit.ends_of(kit.run_until_idle(prefill), "stuck")[0], PrefillComplete)


def test_a_peer_at_its_quota_stalls_nobody_else(kit):
    prefill = kit.make_engine(slab_quota_per_peer=1)
    token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
    grants = kit.make_grants(3, 4 * token_bytes)
    prefill.send(GrantSlabs(grants))
    prefill.send(kit.make_request("slow", 8, mode=KvMode.PREFILL, peer="stopped"))
    prefill.send(kit.make_request("fast", 4, mode=KvMode.PREFILL, peer="well"))
    events = kit.run_until_idle(prefill)
    assert kit.ends_of(events, "slow") == []
    assert isinstance(kit.ends_of(events, "fast")[0], PrefillComplete)
    (slow,) = [e for e in events if isinstance(e, RangePacked) and e.attempt == "slow"]
    prefill.send(GrantSlabs((grants[slow.slab],)))
    assert isinstance(kit.ends_of(kit.run_until_idle(prefill), "slow")[0], PrefillComplete)


def _remote(kit, decode, num_prompt=10, **fields):
    decode.send(kit.make_request(prompt=num_prompt, mode=KvMode.REMOTE, **fields))
    (admitted,) = [e for e in decode.step() if isinstance(e, Admitted)]
    return admitted.num_cached_tokens


def test_an_admitted_remote_request_holds_a_count_and_binds_at_the_first_range(kit):
    decode = kit.make_engine()
    _remote(kit, decode)
    assert decode.core.scheduler.kv.pool.counts.reserved == 3
    payload = memoryview(bytes(4 * 16))
    decode.send(UnpackRange("a", 7, 4, 4, payload))
    assert RangeUnpacked("a", 7, True) in decode.step()
    counts = decode.core.scheduler.kv.pool.counts
    assert (counts.reserved, counts.running) == (0, 3)


@pytest.mark.parametrize(
    ("first", "count", "size"), [(2, 4, 64), (0, 3, 64), (8, 4, 64), (8, 3, 64), (0, 4, 63), (0, 0, 64), (12, 4, 64)]
)
def test_a_range_that_does_not_fit_is_answered_and_not_written(kit, first, count, size):
    decode = kit.make_engine()
    _remote(kit, decode)
    decode.send(UnpackRange("a", 1, first, count, memoryview(bytes(size))))
    assert RangeUnpacked("a", 1, False) in decode.step()


def test_a_range_of_a_group_that_the_pool_does_not_have_is_not_written(kit):
    decode = kit.make_engine()
    _remote(kit, decode)
    decode.send(UnpackRange("a", 1, 0, 4, memoryview(bytes(64)), group=1))
    assert RangeUnpacked("a", 1, False) in decode.step()
    decode.send(UnpackRange("a", 2, 0, 4, memoryview(bytes(64))))
    assert RangeUnpacked("a", 2, True) in decode.step()


def test_a_range_over_the_pinned_prefix_is_refused(kit):
    decode = kit.make_engine()
    decode.generate([kit.make_request("warm", 10)])
    assert _remote(kit, decode) == 8
    decode.send(UnpackRange("a", 1, 4, 4, memoryview(bytes(64))))
    assert RangeUnpacked("a", 1, False) in decode.step()


def test_a_range_for_an_attempt_that_is_gone_is_answered(kit):
    decode = kit.make_engine()
    _remote(kit, decode)
    decode.send(Cancel("a"))
    decode.send(UnpackRange("a", 3, 0, 4, memoryview(bytes(64))))
    assert RangeUnpacked("a", 3, False) in decode.step()
    assert decode.core.scheduler.kv.pool.counts.free == 64


def test_a_gap_in_the_kv_fails_the_request_and_caches_nothing(kit):
    decode = kit.make_engine()
    _remote(kit, decode)
    decode.send(UnpackRange("a", 1, 0, 4, memoryview(bytes(64))))
    decode.send(KvComplete("a"))
    (failed,) = [e for e in decode.step() if isinstance(e, Failed)]
    assert isinstance(failed.error, InternalError)
    assert "never came" in str(failed.error)
    counts = decode.core.scheduler.kv.pool.counts
    assert (counts.free, counts.cached) == (64, 0)


@pytest.mark.parametrize("arrived", [0, 1])
@pytest.mark.parametrize("token_first", [False, True])
def test_run_locally_drops_what_arrived_and_keeps_the_sent_token(kit, arrived, token_first):
    request = kit.make_request(prompt=10, max_tokens=6)
    whole = kit.undisturbed([request])["a"]
    decode = kit.make_engine()
    _remote(kit, decode, max_tokens=6)
    events = []
    if arrived:
        decode.send(UnpackRange("a", 1, 0, 4, memoryview(b"\xff" * 64)))
    if token_first:
        decode.send(FirstToken("a", whole[0]))
    decode.send(RunLocally("a"))
    decode.send(UnpackRange("a", 2, 4, 4, memoryview(b"\xff" * 64)))
    events += kit.run_until_idle(decode)
    assert RangeUnpacked("a", 2, False) in events
    assert kit.tokens_of(events) == whole


def test_run_locally_before_admission(kit):
    decode = kit.make_engine(max_num_seqs=1)
    decode.send(kit.make_request("first", 4, 3))
    decode.step()
    request = kit.make_request("b", 10, 4)
    decode.send(replace(request, mode=KvMode.REMOTE))
    decode.step()
    decode.send(RunLocally("b"))
    assert kit.tokens_of(kit.run_until_idle(decode), "b") == kit.undisturbed([request])["b"]


@pytest.mark.parametrize("order", ["token", "kv"])
def test_first_token_and_kv_complete_come_in_any_order(kit, order):
    request = kit.make_request(prompt=4, max_tokens=5)
    whole = kit.undisturbed([request])["a"]
    prefill = kit.make_engine()
    (grant,) = kit.make_grants(1, 64)
    prefill.send(GrantSlabs((grant,)))
    prefill.send(replace(request, mode=KvMode.PREFILL))
    kit.run_until_idle(prefill)
    decode = kit.make_engine()
    _remote(kit, decode, 4, max_tokens=5)
    decode.send(UnpackRange("a", 1, 0, 4, grant.payload))
    commands = [FirstToken("a", whole[0]), KvComplete("a")]
    for command in commands if order == "token" else reversed(commands):
        decode.send(command)
    assert kit.tokens_of(kit.run_until_idle(decode)) == whole


def test_cancel_in_every_state_of_the_hand_off_frees_everything(kit):
    decode = kit.make_engine(num_blocks=8)
    for step in range(4):
        attempt = f"c{step}"
        decode.send(kit.make_request(attempt, 10, mode=KvMode.REMOTE))
        if step > 0:
            decode.step()
        if step > 1:
            decode.send(UnpackRange(attempt, 1, 0, 4, memoryview(bytes(64))))
        if step > 2:
            decode.send(FirstToken(attempt, 9))
        decode.send(Cancel(attempt))
        decode.send(Cancel(attempt))
        (failed,) = [e for e in decode.step() if isinstance(e, Failed)]
        assert isinstance(failed.error, RequestCancelledError)
        assert decode.core.scheduler.kv.pool.counts.free == 8
    prefill = kit.make_engine()
    prefill.send(kit.make_request(prompt=10, mode=KvMode.PREFILL))
    kit.run_until_idle(prefill)
    prefill.send(Cancel("a"))
    assert isinstance(kit.ends_of(prefill.step())[0], Failed)
    counts = prefill.core.scheduler.kv.pool.counts
    assert (counts.running, counts.cached) == (0, 2)


def test_a_token_outside_the_vocabulary_fails_the_request(kit):
    decode = kit.make_engine()
    _remote(kit, decode)
    decode.send(FirstToken("a", 10**6))
    assert isinstance(kit.ends_of(decode.step())[0], Failed)


def test_a_slab_that_holds_no_block_is_refused_loudly(kit):
    from diptych.common.errors import ConfigError

    with pytest.raises(ConfigError, match="slab_bytes"):
        kit.make_engine().send(GrantSlabs(kit.make_grants(1, 10)))


def test_a_failed_pack_fails_that_request_and_keeps_the_slab(kit):
    class Broken(FakeRunner):
        def pack(self, block_ids, num_tokens, out, layers=None, group=0):
            raise RuntimeError("no")

    prefill = kit.make_engine(Broken(64, kit.BLOCK))
    prefill.send(GrantSlabs(kit.make_grants(1, 4096)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL))
    events = kit.run_until_idle(prefill)
    assert "packing KV failed" in str(kit.ends_of(events)[0].error)
    assert prefill.core.scheduler.packing.slabs_held == 1


def ranges_of(kit, overlap, num_prompt=32, chunk=8):
    """Token counts of the ranges as they are packed, and how many of them came before the last chunk was computed."""
    engine = kit.make_engine(max_num_batched_tokens=chunk)
    token_bytes = engine.core.scheduler.limits.kv_bytes_per_token
    engine.send(GrantSlabs(kit.make_grants(8, 64 * token_bytes), overlap))
    request = replace(kit.make_request(prompt=num_prompt, max_tokens=3), mode=KvMode.PREFILL, peer="d0")
    engine.send(request)
    events = kit.run_until_idle(engine)
    packed = [event.num_tokens for event in events if isinstance(event, RangePacked)]
    first = next(i for i, event in enumerate(events) if isinstance(event, TokensOut))
    early = sum(isinstance(event, RangePacked) for event in events[:first])
    assert sum(packed) == num_prompt
    return packed, early, token_bytes


def test_small_ranges_wait_for_the_next_chunk_and_none_goes_early_when_overlap_is_off(kit):
    packed, early, token_bytes = ranges_of(kit, Overlap("on"))
    assert packed == [8] * 4
    assert early == 3
    assert ranges_of(kit, Overlap("auto", 16 * token_bytes, 1.0))[0] == [16, 16]
    packed, early, _ = ranges_of(kit, Overlap("off"))
    assert (packed, early) == ([32], 0)


def test_a_short_prompt_behind_ten_cancelled_long_ones_waits_for_one_chunk_at_most(kit):
    """The chunk that is being computed is all that a cancelled prompt may still cost its neighbours."""
    chunk = 8
    engine = kit.make_engine(max_num_batched_tokens=chunk)
    runner = engine.core._executor.runner
    engine.send(GrantSlabs(kit.make_grants(8, 64 * engine.core.scheduler.limits.kv_bytes_per_token)))
    for i in range(10):
        long = kit.make_request(f"long{i}", [i, *range(100, 130)], max_tokens=4)
        engine.send(replace(long, mode=KvMode.PREFILL, peer="d0"))
    engine.step()
    for i in range(10):
        engine.send(Cancel(f"long{i}"))
    before = runner.computed_tokens
    assert before <= chunk
    engine.send(replace(kit.make_request("short", [7, 8, 9], max_tokens=4), mode=KvMode.PREFILL, peer="d0"))
    events = engine.step()
    assert any(isinstance(event, TokensOut) and event.attempt == "short" for event in events)
    assert runner.computed_tokens - before == 3, "nothing more of the cancelled ones is computed"
