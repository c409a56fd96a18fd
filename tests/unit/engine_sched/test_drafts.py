"""Rows of several tokens: whatever a drafter guesses, the output and the cached blocks are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import SamplingParams
from diptych.common.text.detokenizer import StopChecker, TextPiece
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import BlocksEvicted, BlocksStored, Failed, Finished, KvMode, TokensOut
from diptych.engine.offline import OfflineEngine
from diptych_tests.toy_grammar import Alternates

VOCABULARY = 40
"""Small, so that stop tokens, stop strings and repetitions occur."""


class Words:
    """A detokenizer: one letter for each token; looks for stop strings as the real one does."""

    def __init__(self, sampling, prompt):
        self.stops = StopChecker(sampling.stop)

    def push(self, token_id):
        return TextPiece(*self.stops.push(chr(ord("A") + token_id)))

    def finish(self):
        return TextPiece(self.stops.flush())


class Guesses:
    """Some of the tokens that plain decoding draws, some wrong ones. `truth`: attempt -> prompt and outputs of plain
    decoding. `share`: of guesses that are right."""

    def __init__(self, truth, seed, most, share):
        self.truth, self.most, self.share = truth, most, share
        self.rng = random.Random(seed)
        self.given = 0

    def __call__(self, attempt, token_ids, most):
        known = self.truth.get(attempt, [])
        guesses = []
        for i in range(len(token_ids), len(token_ids) + min(most, self.rng.randint(0, self.most))):
            right = i < len(known) and self.rng.random() < self.share
            guesses.append(known[i] if right else self.rng.randrange(VOCABULARY))
        self.given += len(guesses)
        return guesses


def run(kit, requests, *, drafter=None, device=False, **changes):
    """Args: device: it runs ahead. Returns: the engine, and by (attempt, choice) its ids, text, logprobs and end."""
    num_blocks = changes.pop("num_blocks", 64)
    make = FakeDeviceRunner if device else FakeRunner
    runner = make(num_blocks, kit.BLOCK, vocab_size=VOCABULARY, eos_token_ids=(1,), num_host_blocks=6)
    config = kit.make_config(num_blocks=num_blocks, **changes)
    engine = OfflineEngine(LocalExecutor(runner), config, kit.IDENTITY, Words, clock=kit.FakeClock(), drafter=drafter)
    outputs, rows, cached, events = {}, [], {}, []
    for request in requests:
        engine.send(request)
    for _ in range(2000):
        worked = engine.core.step()
        events += (new := engine.core.take_events())
        if not worked and not new:
            break
    for event in events:
        match event:
            case TokensOut(attempt, offset, token_ids, text, choice, logprobs):
                one = outputs.setdefault((attempt, choice), [[], "", []])
                assert offset == len(one[0])
                assert not logprobs or len(logprobs) == len(token_ids)
                one[0] += token_ids
                one[1] += text
                one[2] += logprobs
                rows.append(len(token_ids))
            case Finished(attempt):
                # How much of a prompt another one had cached by then depends on the order of steps.
                outputs[attempt, "end"] = replace(event, num_cached_tokens=0)
            case Failed(attempt, error):
                outputs[attempt, "end"] = (type(error), error.message)
            case BlocksStored(_, keys):
                cached.update(dict.fromkeys(keys, True))
            case BlocksEvicted(_, keys):
                for key in keys:
                    cached.pop(key)
    audit = engine.core.scheduler.audit(True)
    assert (audit.violations, audit.blocks.running, audit.attempts) == ((), 0, {})
    return engine, outputs, set(cached), rows


def truth_of(requests, outputs):
    out = {}
    for request in requests:
        for (attempt, choice), one in outputs.items():
            if attempt == request.attempt and choice != "end":
                name = attempt if choice == request.choice else f"{attempt}\0{choice}"
                out[name] = [*request.prompt.token_ids, *one[0]]
    return out


kinds = st.sampled_from(
    [
        {},
        {"temperature": 0.0},
        {"stop": ("C", "XY", "AB")},
        {"stop": ("Q",), "include_stop_str_in_output": True},
        {"stop_token_ids": tuple(range(5, 11))},
        {"stop_token_ids": tuple(range(2, 38)), "min_tokens": 7},
        {"ignore_eos": False},
        {"repetition_penalty": 1.7, "logprobs": 2},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"bad_words": ((3, 4), (7,), (8, 9, 10))},
        {"allowed_token_ids": tuple(range(2, 9)), "temperature": 0.0},
        {"logprobs": 1, "temperature": 0.7},
        {"n": 2, "seed": 5},
        {"best_of": 3, "n": 1},
        {"grammar": Alternates(VOCABULARY)},
        {"grammar": Alternates(VOCABULARY), "temperature": 0.0, "min_tokens": 3},
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.lists(kinds, min_size=1, max_size=3),
    prompts=st.lists(st.integers(1, 14), min_size=3, max_size=3),
    max_tokens=st.integers(1, 24),
    seed=st.integers(0, 99),
    most=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    tight=st.booleans(),
    device=st.booleans(),
)
def test_any_drafts_yield_what_plain_decoding_yields(kit, kind, prompts, max_tokens, seed, most, share, tight, device):
    requests = [
        kit.make_request(
            f"r{i}",
            [2 + (j + seed) % 30 for j in range(length)],
            sampling=SamplingParams(
                **{"max_tokens": max_tokens, "seed": seed + i, "ignore_eos": True}
                | {name: value for name, value in fields.items() if name != "grammar"}
            ),
            grammar=fields.get("grammar"),
        )
        for i, (fields, length) in enumerate(zip(kind, prompts, strict=False))
    ]
    # Tight: growing sequences are preempted and swapped, and rows get fewer guesses than the drafter has.
    tight_pool = {"num_blocks": 13, "max_num_batched_tokens": 9, "num_host_blocks": 6, "preemption_mode": "swap"}
    pool = tight_pool if tight else {}
    _, plain, plain_cache, _ = run(kit, requests, **pool)
    drafter = Guesses(truth_of(requests, plain), seed, most, share)
    _, drafted, cache, _ = run(kit, requests, drafter=drafter, device=device, **pool)
    assert drafted == plain
    if not tight:
        assert cache == plain_cache


def test_right_guesses_need_fewer_steps_and_cache_the_same_blocks(kit):
    requests = [kit.make_request("a", [5] * 9, 24, seed=3)]
    plain, outputs, cache, _ = run(kit, requests)
    guesses = Guesses(truth_of(requests, outputs), 0, 3, 1.0)
    guesses.rng.randint = lambda low, high: high
    engine, drafted, same_cache, rows = run(kit, requests, drafter=guesses)
    assert (drafted, same_cache) == (outputs, cache)
    assert rows == [1, 4, 4, 4, 4, 4, 3]
    assert engine.core.steps == 7 < plain.core.steps == 24
    assert engine.stats().generation_tokens_total == 24


def test_only_accepted_tokens_are_cached(kit):
    """Every guess is wrong and fills a block: its key is never stored, and a second request has no hit on it."""
    requests = [kit.make_request("a", [5] * 6, 7, seed=3)]
    _, outputs, cache, _ = run(kit, requests)
    truth = truth_of(requests, outputs)["a"]
    wrong = [(token + 1) % VOCABULARY for token in truth]
    engine, drafted, same, rows = run(
        kit, requests, drafter=lambda attempt, ids, most: wrong[len(ids) : len(ids) + most]
    )
    assert (drafted, same, set(rows)) == (outputs, cache, {1})
    engine.core.scheduler.drafter = None
    engine.send(kit.make_request("b", [*truth[:7], *wrong[7:13]], 1))
    [admitted] = [e for e in kit.run_until_idle(engine) if type(e).__name__ == "Admitted"]
    assert admitted.num_cached_tokens == 4, "the block with a rejected guess is no hit"


def test_guesses_preempt_nobody_and_return_their_blocks(kit):
    """Two growing sequences in a full pool: rows have guesses only where free blocks are left."""
    requests = [kit.make_request(f"r{i}", [5 + i] * 7, 17, seed=i) for i in range(2)]
    plain, outputs, _, _ = run(kit, requests, num_blocks=12)
    assert not plain.core.stats().preemptions_total
    guesses = Guesses(truth_of(requests, outputs), 0, 6, 0.5)
    engine, drafted, _, _ = run(kit, requests, num_blocks=12, drafter=guesses)
    assert drafted == outputs
    assert guesses.given
    assert not engine.core.stats().preemptions_total


def test_a_row_with_guesses_keeps_to_the_token_budget(kit):
    seen = []
    requests = [kit.make_request(f"r{i}", [5 + i] * 3, 20, seed=i) for i in range(3)]
    runner = FakeRunner(64, kit.BLOCK, vocab_size=VOCABULARY, before_execute=lambda seqs: seen.append(
        sum(len(seq.token_ids) for seq in seqs)))  # fmt: skip
    config = kit.make_config(max_num_batched_tokens=5)
    engine = OfflineEngine(
        LocalExecutor(runner),
        config,
        kit.IDENTITY,
        clock=kit.FakeClock(),
        drafter=lambda attempt, ids, most: [3] * most,
    )
    engine.generate(requests)
    assert max(seen) == 5


def test_too_many_accepted_tokens_fail_their_request_alone(kit):
    class Generous(FakeRunner):
        def execute(self, seqs, should_abort=None):
            result = super().execute(seqs, should_abort)
            for i, seq in enumerate(seqs):
                if seq.attempt == "a" and seq.output_index:
                    result.token_ids[i] = (3, 3, 3)
            return result

    engine = kit.make_engine(Generous(64, kit.BLOCK))
    events = kit.run_until_idle(engine) if engine.send(kit.make_request("a")) else []
    engine.send(kit.make_request("b", 5))
    events += kit.run_until_idle(engine)
    [failed], [finished] = kit.ends_of(events, "a"), kit.ends_of(events, "b")
    assert "accepted more tokens" in failed.error.message
    assert isinstance(finished, Finished)


def test_only_steps_with_drafts_are_not_ahead(kit):
    """The host must know the tokens before it can guess the next ones; without a guess it need not."""
    requests = [kit.make_request("a", 9, 24, seed=3)]
    [expected] = kit.make_engine().generate(requests)
    truth = [*requests[0].prompt.token_ids, *expected.token_ids]
    rows = []

    class Device(FakeDeviceRunner):
        def launch(self, seqs, sources=()):
            assert not any(seq.num_drafts for seq in seqs)
            return super().launch(seqs, sources)

        def execute(self, seqs, should_abort=None):
            rows.append([seq.num_drafts for seq in seqs])
            return super().execute(seqs, should_abort)

    def generate(drafter):
        config = kit.make_config()
        engine = OfflineEngine(
            LocalExecutor(Device(64, kit.BLOCK)), config, kit.IDENTITY, clock=kit.FakeClock(), drafter=drafter
        )
        [result] = engine.generate(requests)
        assert result.token_ids == expected.token_ids
        return engine.core.steps_ahead, engine.core.scheduler.live.not_ahead["drafts"]

    without, _ = generate(None)
    assert generate(lambda attempt, ids, most: []) == (without, 0), "a drafter that has nothing to guess costs nothing"
    rows.clear()
    ahead, held_back = generate(
        lambda attempt, ids, most: truth[len(ids) : len(ids) + most][: 3 if len(ids) in (19, 20) else 0]
    )
    assert [3] in rows
    assert 0 < held_back <= 2
    assert without - 6 <= ahead < without
    assert generate(lambda attempt, ids, most: [7] * min(most, 2))[0] == 0


def test_a_remote_request_drafts_as_a_local_one(kit):
    """Prefill samples the first token; decode verifies guesses behind it."""
    request = kit.make_request("a", 10, 12, seed=4)
    [plain] = kit.make_engine().generate([request])
    truth = [*request.prompt.token_ids, *plain.token_ids]
    decode = OfflineEngine(
        LocalExecutor(FakeRunner(64, kit.BLOCK)), kit.make_config(), kit.IDENTITY, clock=kit.FakeClock(),
        drafter=lambda attempt, ids, most: truth[len(ids) : len(ids) + min(most, 3)],
    )  # fmt: skip
    outcome = kit.Pair(kit.make_engine(), decode).run([request])["a"]
    assert request.mode is KvMode.LOCAL
    assert outcome.token_ids == plain.token_ids
    assert decode.core.steps < 6


def test_a_guess_outside_the_vocabulary_is_our_own_error(kit):
    engine = OfflineEngine(
        LocalExecutor(FakeRunner(64, kit.BLOCK)), kit.make_config(), kit.IDENTITY, clock=kit.FakeClock(),
        drafter=lambda attempt, ids, most: [-1],
    )  # fmt: skip
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([kit.make_request()])
