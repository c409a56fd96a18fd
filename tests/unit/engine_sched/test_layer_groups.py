"""The last chunk goes out in groups of layers while it is computed: same tokens, whatever happens in the midst of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    Failed,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    PrefillComplete,
    RangePacked,
    RangeUnpacked,
    UnpackRange,
)
from diptych.engine.overlap import Overlap

LAYERS = 6


def runner(**more):
    return FakeRunner(64, 4, num_layers=LAYERS, **more)


def _no_grants():
    pass


def ranges_of(events):
    return [(e.first_token, e.num_tokens, e.first_layer, e.num_layers) for e in events if isinstance(e, RangePacked)]


@pytest.mark.parametrize("chunk", [3, 4, 8, 64])
@pytest.mark.parametrize("num_prompt", [1, 4, 9, 21])
@pytest.mark.parametrize("slabs", [1, 4])
def test_ids_equal_the_local_run(kit, chunk, num_prompt, slabs):
    request = kit.make_request(prompt=num_prompt, max_tokens=6, seed=3)
    prefill = kit.make_engine(runner(), max_num_batched_tokens=chunk)
    pair = kit.Pair(prefill, kit.make_engine(runner()), slabs=slabs, slab_tokens=8)
    outcome = pair.run([replace(request, layer_groups=True)])["a"]
    alone = kit.make_engine(runner(), num_blocks=64)
    assert outcome.token_ids == alone.generate([request])[0].token_ids
    assert outcome.end is not None


def test_groups_come_out_in_the_midst_of_the_step_and_the_token_behind_them(kit):
    prefill = kit.make_engine(runner())
    early = []
    prefill.core.on_packing(_no_grants, lambda: early.append(prefill.core.take_events()))
    prefill.send(GrantSlabs(kit.make_grants(4, 4096)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=True))
    late = kit.run_until_idle(prefill)
    assert [ranges_of(events) for events in early] == [[(0, 9, 0, 1)], [(0, 9, 1, 2)], [(0, 9, 3, 1)]]
    assert isinstance(early[0][0], Admitted)
    assert ranges_of(late) == [(0, 9, 4, 2)]
    kinds = [type(e).__name__ for e in late]
    assert kinds[:4] == ["PromptComputed", "TokensOut", "RangePacked", "PrefillComplete"]
    sizes = [e.size_bytes for events in (*early, late) for e in events if isinstance(e, RangePacked)]
    assert sum(sizes) == 9 * prefill.core.scheduler.limits.kv_bytes_per_token


@pytest.mark.parametrize(
    ("layer_groups", "overlap"), [(False, Overlap("on")), (True, Overlap("off")), (True, Overlap("auto", 1e12, 0.001))]
)
def test_all_layers_go_together_unless_the_peer_takes_groups_and_they_win(kit, layer_groups, overlap):
    prefill = kit.make_engine(runner())
    prefill.send(GrantSlabs(kit.make_grants(4, 4096), overlap))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=layer_groups))
    assert ranges_of(kit.run_until_idle(prefill)) == [(0, 9, 0, 0)]


def test_only_the_last_chunk_is_cut_and_what_is_left_of_the_ranges_before_goes_with_it(kit):
    prefill = kit.make_engine(runner(), max_num_batched_tokens=8)
    prefill.send(GrantSlabs(kit.make_grants(8, 4096)))
    prefill.send(kit.make_request(prompt=21, mode=KvMode.PREFILL, layer_groups=True, peer="d"))
    assert ranges_of(kit.run_until_idle(prefill))[:2] == [(0, 8, 0, 0), (8, 8, 0, 0)]


def test_without_a_slab_the_layers_wait_for_the_end_of_the_step(kit):
    prefill = kit.make_engine(runner())
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=True))
    assert ranges_of(kit.run_until_idle(prefill)) == []
    prefill.send(GrantSlabs(kit.make_grants(1, 4096)))
    events = kit.run_until_idle(prefill)
    assert ranges_of(events) == [(0, 9, 0, 0)]
    assert isinstance(kit.ends_of(events)[0], PrefillComplete)


def test_a_slab_that_holds_fewer_layers_takes_what_fits(kit):
    prefill = kit.make_engine(runner())
    token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
    slab_bytes = 9 * token_bytes * 2 // LAYERS + 5
    prefill.send(GrantSlabs(kit.make_grants(4, max(slab_bytes, 4 * token_bytes))))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=True, peer="d"))
    got = ranges_of(kit.run_until_idle(prefill))
    assert all(n * 9 * token_bytes // LAYERS <= max(slab_bytes, 4 * token_bytes) for *_, n in got)
    assert [first for _, _, first, _ in got] == [sum(n for *_, n in got[:i]) for i in range(len(got))]
    assert sum(n for *_, n in got) == LAYERS


def test_a_failed_pack_in_the_midst_ends_the_request_only_after_the_step(kit):
    class Broken(FakeRunner):
        def pack(self, block_ids, num_tokens, out, layers=None, group=0):
            raise RuntimeError("no")

    prefill = kit.make_engine(Broken(64, 4, num_layers=LAYERS))
    prefill.send(GrantSlabs(kit.make_grants(2, 4096)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=True))
    events = kit.run_until_idle(prefill)
    assert "packing KV failed" in str(kit.ends_of(events)[0].error)
    assert len(kit.tokens_of(events)) == 1, "the step was computed to its end"
    assert prefill.core.scheduler.packing.slabs_held == 2
    assert prefill.core.scheduler.kv.pool.counts.running == 0


def test_a_step_that_is_given_up_between_two_groups_frees_all_but_the_slab_that_is_out(kit):
    prefill = kit.make_engine(runner())
    cancelled = set()
    early = []

    def packed_early():
        early.extend(prefill.core.take_events())
        cancelled.add("a")

    prefill.core.on_packing(_no_grants, packed_early)
    prefill.send(GrantSlabs(kit.make_grants(4, 4096)))
    prefill.send(kit.make_request(prompt=9, mode=KvMode.PREFILL, layer_groups=True))
    prefill.core.step(cancelled)
    prefill.core.scheduler.cancel("a")
    assert ranges_of(early) == [(0, 9, 0, 1)]
    events = prefill.core.take_events()
    assert ranges_of(events) == []
    assert [type(e) for e in kit.ends_of(events)] == [Failed]
    assert prefill.core.scheduler.kv.pool.counts.running == 0
    assert prefill.core.scheduler.packing.slabs_held == 3


class Decode:
    """A REMOTE request of 9 tokens, and the layers of its KV from an engine that computed them."""

    def __init__(self, kit):
        self.engine = kit.make_engine(runner())
        request = kit.make_request(prompt=9, max_tokens=3)
        self.right = kit.make_engine(runner(), num_blocks=64).generate([request])[0].token_ids
        source = kit.make_engine(runner())
        grants = kit.make_grants(4, 4096)
        source.send(GrantSlabs(grants))
        source.send(replace(request, mode=KvMode.PREFILL, layer_groups=True))
        self.parts = [
            (e, bytes(grants[e.slab].payload[: e.size_bytes]))
            for e in kit.run_until_idle(source)
            if isinstance(e, RangePacked)
        ]
        self.engine.send(replace(request, mode=KvMode.REMOTE))
        self.engine.step()

    def unpack(self, part, *, first_layer=None, last=False):
        event, payload = part
        low = event.first_layer if first_layer is None else first_layer
        command = UnpackRange("a", 1, 0, 9, memoryview(payload), last, low, event.num_layers)
        self.engine.send(command)
        return next(e for e in self.engine.core.take_events() if isinstance(e, RangeUnpacked)).unpacked


def test_decode_takes_the_layers_in_any_order_and_runs_when_all_are_in(kit):
    decode = Decode(kit)
    for part in reversed(decode.parts):
        assert decode.unpack(part)
    decode.engine.send(FirstToken("a", decode.right[0]))
    decode.engine.send(KvComplete("a"))
    assert kit.tokens_of(kit.run_until_idle(decode.engine)) == decode.right


def test_decode_refuses_to_run_while_a_layer_is_missing(kit):
    decode = Decode(kit)
    for part in decode.parts[:-1]:
        assert decode.unpack(part, last=True), "called the last, but it is not"
    decode.engine.send(FirstToken("a", decode.right[0]))
    assert decode.engine.core.scheduler.audit(False).attempts == {"waiting_for_remote_kv": 1}
    decode.engine.send(KvComplete("a"))
    failed = kit.ends_of(kit.run_until_idle(decode.engine))[0]
    assert "3 blocks from block 0 on never came" in str(failed.error)


@pytest.mark.parametrize("first_layer", [LAYERS - 1, LAYERS, 99])
def test_layers_outside_the_model_are_not_written(kit, first_layer):
    decode = Decode(kit)
    assert not decode.unpack(decode.parts[-1], first_layer=first_layer)


def late_prompt(kit):
    """Prefill, with a prompt of 9 tokens computed, 4 of them packed, and no slab for the others."""
    prefill = kit.make_engine(runner())
    token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
    prefill.send(GrantSlabs(kit.make_grants(1, 4 * token_bytes)))
    prefill.send(kit.make_request("late", prompt=9, mode=KvMode.PREFILL))
    assert ranges_of(kit.run_until_idle(prefill)) == [(0, 4, 0, 0)]
    return prefill


def test_a_slab_that_comes_back_in_the_midst_of_a_step_is_packed_between_two_layers(kit):
    prefill = late_prompt(kit)
    looks, early = [], []

    def take_grants():
        looks.append(1)
        if len(looks) == 4:
            prefill.core.handle(GrantSlabs(kit.make_grants(1, 4096, first=1)))

    prefill.core.on_packing(take_grants, lambda: early.append(prefill.core.take_events()))
    prefill.send(kit.make_request("other", prompt=7, mode=KvMode.PREFILL))
    prefill.core.step()
    assert [ranges_of(events) for events in early] == [[(4, 5, 0, 0)]]
    assert "PrefillComplete" in [type(e).__name__ for e in early[0]]
    assert not [e for e in early[0] if getattr(e, "attempt", "") == "other" and type(e).__name__ == "TokensOut"]
    late = prefill.core.take_events()
    assert [e.attempt for e in late if type(e).__name__ == "TokensOut"] == ["other"]


def test_a_slab_that_came_back_between_two_steps_is_packed_before_the_next_one(kit):
    prefill = late_prompt(kit)
    early = []
    prefill.core.on_packing(_no_grants, lambda: early.append(prefill.core.take_events()))
    prefill.core.handle(GrantSlabs(kit.make_grants(1, 4096, first=1)))
    computed = []
    prefill.core._executor.runner.before_execute = lambda seqs: computed.append(len(early))
    prefill.send(kit.make_request("other", prompt=7, mode=KvMode.PREFILL))
    prefill.core.step()
    assert [ranges_of(events) for events in early] == [[(4, 5, 0, 0)]]
    assert computed == [1]


def test_a_late_prompt_that_cannot_be_packed_fails_alone(kit):
    class Broken(FakeRunner):
        broken = False

        def pack(self, block_ids, num_tokens, out, layers=None, group=0):
            if self.broken:
                raise RuntimeError("no")
            return super().pack(block_ids, num_tokens, out, layers, group)

    engine = Broken(64, 4, num_layers=LAYERS)
    prefill = kit.make_engine(engine)
    token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
    prefill.send(GrantSlabs(kit.make_grants(1, 4 * token_bytes)))
    prefill.send(kit.make_request("late", prompt=9, mode=KvMode.PREFILL))
    kit.run_until_idle(prefill)
    engine.broken = True
    engine.before_execute = lambda seqs: prefill.core.handle(GrantSlabs(kit.make_grants(1, 4096, first=1)))
    prefill.send(kit.make_request("other", prompt=7, mode=KvMode.PREFILL, want_kv=False))
    prefill.core.step()
    events = prefill.core.take_events()
    assert [type(e) for e in kit.ends_of(events, "late")] == [Failed]
    assert [e.attempt for e in events if type(e).__name__ == "TokensOut"] == ["other"]
