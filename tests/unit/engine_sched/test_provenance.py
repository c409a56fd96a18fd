"""What KV was computed from, by the rows that computed it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import SamplingParams
from diptych.common.text.prompt_digest import prompt_digest
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import BlockCopy, CopyKind, Failed, KvMode, PromptComputed
from diptych.engine.provenance import Provenance

TOKENS = list(range(500, 523))


def test_blocks_of_which_nothing_is_recorded_fail_one_prompt_and_no_other(kit):
    """They leave the cache: the next one computes them again."""
    engine, prompt = kit.make_engine(), tuple(range(100, 141))
    engine.send(kit.make_request("of no prefill worker", prompt, 4))
    kit.run_until_idle(engine)
    engine.send(kit.make_request("a", prompt, mode=KvMode.PREFILL, want_kv=False))
    [failed] = [event for event in kit.run_until_idle(engine) if isinstance(event, Failed)]
    assert "does not say what attempt a was computed from" in str(failed.error)
    engine.send(kit.make_request("b", prompt, mode=KvMode.PREFILL, want_kv=False))
    [computed] = [event for event in kit.run_until_idle(engine) if isinstance(event, PromptComputed)]
    assert computed.computed_from.digest == prompt_digest(prompt, 4)


@given(size=st.integers(1, 9), cuts=st.lists(st.integers(0, len(TOKENS)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_chunks_add_up_to_the_whole(size, cuts):
    table = list(range(len(TOKENS)))
    random.Random(size).shuffle(table)
    notes = Provenance(size)
    borders = sorted({0, *cuts, len(TOKENS)})
    for first, end in zip(borders, borders[1:], strict=False):
        notes.computed(table, first, TOKENS[first:end])
        known = notes.of(table, end)
        assert (known.num_tokens, known.digest) == (end, prompt_digest(TOKENS[:end], size))


@pytest.mark.parametrize(
    ("what", "rows"),
    [
        ("a token dropped", [(0, [1, 2, 3, 5, 6, 7, 8])]),
        ("a token changed", [(0, [1, 2, 3, 9, 5, 6, 7, 8])]),
        ("two swapped", [(0, [1, 2, 4, 3, 5, 6, 7, 8])]),
        ("blocks swapped", [(0, [5, 6, 7, 8, 1, 2, 3, 4])]),
        ("a chunk twice", [(0, [1, 2, 3, 4]), (4, [1, 2, 3, 4])]),
    ],
)
def test_what_differs_has_another_digest(what, rows):
    notes = Provenance(4)
    for start, tokens in rows:
        notes.computed([3, 5], start, tokens)
    known = notes.of([3, 5], start + len(tokens))
    assert (known.num_tokens, known.digest) != (8, prompt_digest([1, 2, 3, 4, 5, 6, 7, 8], 4)), what


def test_a_block_tells_what_it_was_computed_behind():
    notes = Provenance(4)
    notes.computed([0, 1], 0, [1, 2, 3, 4, 5, 6, 7, 8])
    notes.computed([2, 3], 0, [9, 9, 9, 9, 5, 6, 7, 8])
    assert notes.of([0, 1], 8) != notes.of([0, 3], 8)
    notes.computed([0, 3, 4], 8, [7])
    assert notes.of([0, 3, 4], 9).digest != prompt_digest([1, 2, 3, 4, 5, 6, 7, 8, 7], 4)


def test_what_nobody_told_of_is_unknown():
    notes = Provenance(4)
    assert notes.of([0], 4) is None
    notes.computed([0, 1], 4, [5])
    assert notes.of([0, 1], 5) is None, "the block before it is unknown"
    notes.computed([0], 0, [1, 2, 3, 4])
    notes.computed([0, 1], 5, [6])
    assert notes.of([0, 1], 6) is None, "the slot before it is unknown"
    notes.forget([0])
    assert notes.of([0], 4) is None
    notes.computed([0], 0, [1, 2, 3, 4])
    notes.copied(
        [BlockCopy(CopyKind.TO_HOST, 0, 7), BlockCopy(CopyKind.FROM_HOST, 7, 5), BlockCopy(CopyKind.FORK, 9, 0)]
    )
    assert notes.of([5], 4).digest == prompt_digest([1, 2, 3, 4], 4)
    assert notes.of([0], 4) is None


def computed_from(kit, engine, attempt, prompt, outputs=()):
    request = kit.make_request(attempt, prompt, mode=KvMode.PREFILL, want_kv=False, output_token_ids=tuple(outputs))
    engine.send(request)
    [reported] = [event for event in kit.run_until_idle(engine) if isinstance(event, PromptComputed)]
    return reported.computed_from


@pytest.mark.parametrize("budget", [3, 7, 64])
def test_a_prefill_engine_says_what_its_runner_computed(kit, budget):
    """In chunks, behind cached blocks, and back from the host tier; with sent tokens all but the last of them."""
    runner = FakeRunner(12, kit.BLOCK, num_host_blocks=16)
    engine = kit.make_engine(
        runner, num_blocks=12, num_host_blocks=16, max_num_batched_tokens=budget, initial_copy_bytes_per_s=1e12
    )
    first = [*range(300, 321)]
    cases = [(first, ()), ([*first, 7, 8], ()), ([*range(600, 640)], ()), (first, (5, 6, 7)), ([9], ())]
    for number, (prompt, outputs) in enumerate(cases):
        tokens = [*prompt, *outputs[:-1]]
        reported = computed_from(kit, engine, f"r{number}", prompt, outputs)
        assert (reported.num_tokens, reported.block_size) == (len(tokens), kit.BLOCK)
        assert reported.digest == prompt_digest(tokens, kit.BLOCK)
    assert engine.stats().cached_tokens_total > 20
    assert engine.stats().restored_tokens_total > 0


def test_kv_of_unknown_origin_is_not_vouched_for(kit):
    """A cached block that a LOCAL request computed before anything was noted: the leg ends by name."""
    engine = kit.make_engine()
    engine.generate([kit.make_request("local", 20, 2)])
    engine.send(kit.make_request("leg", 20, mode=KvMode.PREFILL, want_kv=False))
    [failed] = [event for event in kit.run_until_idle(engine) if isinstance(event, Failed)]
    assert "the runner does not say what attempt leg was computed from" in failed.error.message


def test_several_choices_are_vouched_for_once(kit):
    engine = kit.make_engine()
    sampling = SamplingParams(max_tokens=4, n=3, seed=1, ignore_eos=True)
    engine.send(kit.make_request("a", 20, sampling=sampling, mode=KvMode.PREFILL, want_kv=False))
    reported = [event for event in kit.run_until_idle(engine) if isinstance(event, PromptComputed)]
    assert [one.computed_from.num_tokens for one in reported] == [20]
