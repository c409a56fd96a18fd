"""The same ids, logprobs and ends, whatever happens on the way: batched, preempted by recompute or by swap, chunked at every
size, with a warm prefix of every length, through prefill and decode; for every sampling feature, greedy and seeded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import ChoiceFinished, Finished, PromptLogprobs, TokensOut

NUM_TOKENS = 14
FEATURES: dict[str, dict] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": ((5, 3.0), (17, -50.0), (900, 7.5))},
    "allowed": {"allowed_token_ids": (3, 8, 21, 22, 23, 900)},
    "bad words": {"bad_words": ((7,), (21, 22), (3, 8, 21)), "allowed_token_ids": (3, 7, 8, 21, 22, 23)},
    "min tokens": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": (3, 8), "allowed_token_ids": (2, 3, 8, 9)},
    "stops": {"stop_token_ids": tuple(range(0, 1000, 9))},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0, "repetition_penalty": 0.7},
    "choices": {"n": 3, "logprobs": 1, "frequency_penalty": 0.5},
    "best of": {"n": 2, "best_of": 4},
    "beams": {
        "n": 2,
        "beam_width": 3,
        "logprobs": 1,
        "stop_token_ids": tuple(range(0, 1000, 9)),
        "length_penalty": 0.5,
    },
    "beams with bans": {"beam_width": 2, "frequency_penalty": 0.5, "min_tokens": 4, "bad_words": ((7,), (21, 22))},
}


CASES = [(name, greedy) for name in sorted(FEATURES) for greedy in (True, False) if greedy or "beams" not in name]
"""Beam search draws nothing: it has no seeded case."""


def params(feature: str, greedy: bool, max_tokens: int = NUM_TOKENS) -> SamplingParams:
    base = SamplingParams(max_tokens=max_tokens, seed=11, temperature=0.0 if greedy else 0.8, ignore_eos=True)
    if "beam_width" in FEATURES[feature]:
        base = replace(base, temperature=0.0)
    return replace(base, **FEATURES[feature])


def observed(events, attempt="a"):
    """All that a client would see of it, in an order that does not depend on the steps."""
    tokens: dict = {}
    prompt: list = []
    ends: list = []
    for event in events:
        if getattr(event, "attempt", None) != attempt:
            continue
        if isinstance(event, TokensOut):
            mine = tokens.setdefault(event.choice, [])
            assert event.offset == len(mine)
            logprobs = event.logprobs or (None,) * len(event.token_ids)
            mine.extend(zip(event.token_ids, logprobs, strict=True))
        elif isinstance(event, PromptLogprobs):
            assert event.first_token == 1 + len(prompt)
            prompt.extend(event.logprobs)
        elif isinstance(event, ChoiceFinished):
            ends.append((event.choice, event.reason, event.num_output_tokens, event.stop_token_id))
        elif isinstance(event, Finished):
            ends.append(("end", event.num_output_tokens))
    assert ends, "it never ended"
    assert ends[-1][0] == "end"
    return {"tokens": sorted(tokens.items()), "prompt": prompt, "ends": sorted(ends[:-1]), "total": ends[-1]}


@pytest.fixture(scope="module")
def undisturbed(kit):
    """undisturbed(request) -> what is observed when it runs alone, cold, in one chunk."""
    known: dict = {}

    def run(request):
        key = (request.prompt.token_ids, request.sampling)
        if key not in known:
            engine = kit.make_engine(num_blocks=96)
            send(engine, request)
            known[key] = observed(kit.run_until_idle(engine), request.attempt)
        return known[key]

    return run


def send(engine, *requests):
    for request in requests:
        engine.send(request)


features = st.sampled_from(sorted(FEATURES))


@pytest.mark.parametrize(("feature", "greedy"), CASES)
def test_batched(kit, undisturbed, feature, greedy):
    requests = [kit.make_request(f"a{i}", 5 + i, sampling=params(feature, greedy)) for i in range(8)]
    others = [kit.make_request(f"b{i}", 3 + i, sampling=params(f, i % 2 == 0)) for i, f in enumerate(sorted(FEATURES))]
    engine = kit.make_engine(num_blocks=512)
    send(engine, *requests, *others)
    events = kit.run_until_idle(engine)
    for request in (*requests, *others):
        assert observed(events, request.attempt) == undisturbed(request)


@pytest.mark.parametrize(("feature", "greedy"), CASES)
def test_chunked_at_every_size(kit, undisturbed, feature, greedy):
    """Of a prompt of four blocks and a token: each place in a block begins a chunk, and ends one."""
    request = kit.make_request("a", 17, sampling=params(feature, greedy, 6 if feature == "min tokens" else 2))
    for size in range(1, 17):
        engine = kit.make_engine(num_blocks=72, long_prefill_token_threshold=size)
        send(engine, request)
        assert observed(kit.run_until_idle(engine)) == undisturbed(request), f"chunks of {size}"


@pytest.mark.parametrize(("feature", "greedy"), CASES)
def test_warm_prefix_of_every_length(kit, undisturbed, feature, greedy):
    request = kit.make_request("a", 14, sampling=params(feature, greedy, 6 if feature == "min tokens" else 3))
    for warm in range(1, 15):
        engine = kit.make_engine(num_blocks=64)
        prompt = (*request.prompt.token_ids[:warm], 7, 7, 7)
        send(engine, kit.make_request("warm", prompt, sampling=SamplingParams(max_tokens=1)))
        kit.run_until_idle(engine)
        send(engine, request)
        assert observed(kit.run_until_idle(engine)) == undisturbed(request), f"{warm} tokens warm"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@given(
    feature=features,
    greedy=st.booleans(),
    num_blocks=st.integers(13, 24),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    budget=st.integers(3, 40),
)
@settings(max_examples=40, deadline=None)
def test_preempted(kit, undisturbed, mode, feature, greedy, num_blocks, lengths, budget):
    host = 64 if mode == "swap" else 0
    width = FEATURES[feature].get("beam_width", 0)  # all beams must fit, at worst without a shared block
    num_blocks = max(num_blocks, width * -(-(max(lengths) + NUM_TOKENS - 1) // kit.BLOCK))
    engine = kit.make_engine(
        FakeRunner(num_blocks, kit.BLOCK, num_host_blocks=host),
        num_blocks=num_blocks,
        num_host_blocks=host,
        preemption_mode=mode,
        max_num_batched_tokens=budget,
    )
    requests = [
        kit.make_request(f"a{i}", [30 * i + j for j in range(length)], sampling=params(feature, greedy))
        for i, length in enumerate(lengths)
    ]
    send(engine, *requests)
    events = kit.run_until_idle(engine, 5000)
    for request in requests:
        assert observed(events, request.attempt) == undisturbed(request)
    assert engine.core.scheduler.kv.pool.counts.running == 0
    assert engine.core.scheduler.kv.host.num_held == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_small_pool_does_preempt_each_way(kit, mode):
    host = 16 if mode == "swap" else 0
    engine = kit.make_engine(
        FakeRunner(7, kit.BLOCK, num_host_blocks=host), num_blocks=7, num_host_blocks=host, preemption_mode=mode
    )
    send(engine, kit.make_request("a", 6, 14), kit.make_request("b", 7, 14))
    kit.run_until_idle(engine)
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.swaps_total == (stats.preemptions_total if mode == "swap" else 0)


@pytest.mark.parametrize(("feature", "greedy"), CASES)
def test_through_prefill_and_decode(kit, undisturbed, feature, greedy):
    request = kit.make_request("a", 19, sampling=params(feature, greedy))
    want = undisturbed(request)
    for warm in (0, 9):
        pair = kit.Pair(kit.make_engine(), kit.make_engine())
        if warm:
            send(pair.decode, kit.make_request("w", request.prompt.token_ids[:warm], 1))
            kit.run_until_idle(pair.decode)
        pair.run([request])
        got = observed(pair.seen)
        assert got == want
