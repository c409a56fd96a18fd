"""Steps as bytes: both ends remember the sequences, and a step has what is new of them."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import random
import resource
import socket

import numpy as np
import pytest

from diptych.common.sampling import EarlyStopping, SamplingParams, TokenLogprobs
from diptych.engine.messages import BlockCopy, Candidate, ComputedFrom, CopyKind, ScheduledSeq, StepResult
from diptych.engine.ranks import step_codec
from diptych.engine.ranks.frames import RankEnd
from diptych.engine.ranks.step_codec import SeqDecoder, SeqEncoder

SAMPLINGS = [
    SamplingParams(9, seed=2**64 - 1),
    SamplingParams(9, temperature=0.3, top_p=0.1, stop=("é",), logit_bias=((5, 2.5),), bad_words=((7, 8), (9,))),
    SamplingParams(9, beam_width=2, early_stopping=EarlyStopping.NEVER, logprobs=0),
]


def seen(seq):
    """What a runner gets of it."""
    values = {field.name: getattr(seq, field.name) for field in dataclasses.fields(seq)}
    values["prompt_targets"] = list(seq.prompt_targets)
    return {name: value for name, value in values.items() if name not in ("memo", "grammar")}


def test_every_field_but_those_that_stay_in_their_process():
    encoder, decoder = SeqEncoder(), SeqDecoder()
    for n, sampling in enumerate(SAMPLINGS):
        seq = ScheduledSeq(
            f"a\0{n}", [4, 5, 6], 7, ([1, 2, 3], [8]), True, sampling, 9, (0, 2), 2, 3, 1, 0, 5, [1, 2, 3], 2, (8, 9),
            None, 4, True, object(),
        )  # fmt: skip
        [there], sources = decoder.decode(encoder.encode([seq], [-1]))
        assert (there.memo, sources) == (None, [-1])
        assert seen(there) == seen(seq)
        assert dataclasses.replace(there, top_logprobs=0) != there


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_grow_shrink_are_replaced_and_come_again(seed):
    """Of any two steps the second has what changed: tables that grew, lost their front or were replaced, histories, objects."""
    rng = random.Random(seed)
    encoder, decoders = SeqEncoder(), (SeqDecoder(), SeqDecoder())
    live: dict[str, ScheduledSeq] = {}
    for step in range(220):
        if len(live) < 6 or rng.random() < 0.1:
            name = f"r{step}"
            history = [1, 2, 3] if rng.random() < 0.5 else None
            tables = ([step], [step, 7])
            live[name] = ScheduledSeq(name, [1, 2], 0, tables, True, rng.choice(SAMPLINGS), 0, (0, 0), history=history)
        for name in rng.sample(sorted(live), min(2, len(live))):
            if rng.random() < 0.2:
                del live[name]
                continue
            seq, what = live[name], rng.randrange(7)
            seq.token_ids, seq.start, seq.output_index = [step], seq.start + 1, seq.output_index + 1
            table = rng.choice(seq.block_tables)
            if what == 0:
                table += [rng.randrange(99) for _ in range(rng.randrange(5))]
            elif what == 1:
                del table[:1]
            elif what == 2:
                table[rng.randrange(len(table)) :] = [100 + step]
            elif what == 3:
                live[name] = dataclasses.replace(seq, block_tables=([1], [2, 3]))
            elif what == 4 and seq.history is not None:
                seq.history.append(step)
            elif what == 5 and seq.history is not None:
                seq.history = [*seq.history, 5]
            for one in seq.block_tables:
                if not one:
                    one.append(3)
        chosen = rng.sample(sorted(live), rng.randrange(len(live) + 1))
        body = encoder.encode([live[name] for name in chosen])
        for decoder in decoders:
            found, _ = decoder.decode(body)
            assert [seen(seq) for seq in found] == [seen(live[name]) for name in chosen]
    assert len(encoder._sent) == len(decoders[0]._known) < 140


def test_a_sequence_is_the_same_object_in_its_next_step_with_its_memo():
    encoder, decoder = SeqEncoder(), SeqDecoder()
    seq = ScheduledSeq("a", [1], 0, ([3],), True, SAMPLINGS[0], 0)
    [first], _ = decoder.decode(encoder.encode([seq]))
    first.memo = "state of the sampler"
    [second], _ = decoder.decode(encoder.encode([seq]))
    assert second is first
    other = dataclasses.replace(seq, start=4)
    [third], _ = decoder.decode(encoder.encode([other]))
    assert (third is first, third.memo, third.start, first.start) == (False, "state of the sampler", 4, 0)
    [again], _ = decoder.decode(encoder.encode([dataclasses.replace(seq, sampling=SAMPLINGS[1])]))
    assert again.memo is None, "another request of the same name"


def test_the_choices_of_a_request_are_sequences_of_their_own():
    """They have one attempt: with one entry for all, a choice would be computed with the blocks and the state of another."""
    encoder, decoder = SeqEncoder(), SeqDecoder()
    seqs = [
        ScheduledSeq("a", [n], 9, ([3, 40 + n],), True, SAMPLINGS[0], 0, choice=n, history=[1, n], num_prompt=1)
        for n in range(3)
    ]
    for _ in range(2):
        found, _ = decoder.decode(encoder.encode(seqs))
        assert list(map(seen, found)) == list(map(seen, seqs))
        found[1].memo = "of choice 1"
    assert [seq.memo for seq in found] == [None, "of choice 1", None]


def test_histories_that_draws_wait_for_come_later():
    encoder, decoder = SeqEncoder(), SeqDecoder()
    histories = [[1, 2], [5], None]
    seqs = [
        ScheduledSeq(f"r{n}", [-1], 2, ([3],), True, SAMPLINGS[0], 0, history=one) for n, one in enumerate(histories)
    ]
    found, sources = decoder.decode(encoder.encode(seqs, [0, 1, 2]))
    assert sources == [0, 1, 2]
    seqs[0].history.append(9)
    assert decoder.decode_draw(encoder.encode_draw(seqs, {1}), found) == {1}
    assert [seq.history for seq in found] == [[1, 2, 9], [5], None]


def test_a_decode_step_of_many_rows_is_small():
    """What is the same as in the step before costs nothing but a few numbers: at 4,096 tokens of context, too."""
    encoder = SeqEncoder()
    seqs = [ScheduledSeq(f"r{n}", [1], 4096, (list(range(256)),), True, SAMPLINGS[1], 1) for n in range(64)]
    first, second = encoder.encode(seqs), encoder.encode(seqs)
    assert len(first) > 64 * 256 * 4
    assert len(second) < 64 * 100


def test_a_result_is_the_same_on_both_sides():
    entry = TokenLogprobs(5, -0.1, 1, ((5, -0.1), (6, -2.5)))
    full = StepResult(
        token_ids=[(5,), (), (7, 8, 9)], bad_rows={1: "NaN"}, refused_rows={0: "none is left"}, logprobs={0: (entry,)},
        more_draws={2: [(4, None), (5, entry)]}, candidates={0: [Candidate(3, -0.5), Candidate(4, -0.7, entry)]},
        prompt_logprobs={1: [entry, entry]}, computed_from={2: ComputedFrom(32, b"\1\2", 16)},
    )  # fmt: skip
    for result in (full, StepResult([]), StepResult([(2**31 - 1,), ()])):
        assert step_codec.decode_result(step_codec.encode_result(result)) == result
    copies = [BlockCopy(CopyKind.FORK, 4, 6), BlockCopy(CopyKind.TO_HOST, 1, 2), BlockCopy(CopyKind.FROM_HOST, 2, 9, 1)]
    assert step_codec.decode_copies(step_codec.encode_copies(copies)) == copies


class Letters:
    """A grammar: `allowed[i]` may be output token i; a matcher of it counts its calls."""

    size_bytes = 8

    def __init__(self, allowed):
        self.allowed, self.calls = allowed, 0

    def matcher(self):
        return _Place(self)


class _Place:
    num_words, slow = 2, False

    def __init__(self, grammar):
        self._grammar, self._at = grammar, 0

    def accept(self, token_id):
        self._grammar.calls += 1
        self._at += 1
        return token_id in self._grammar.allowed[self._at - 1]

    def fill(self, mask):
        for token in self._grammar.allowed[self._at]:
            mask[token // 32] |= np.int32(1) << np.int32(token % 32)


def test_masks_follow_the_outputs_and_reach_behind_drafts():
    grammar = Letters([{3}, {40}, {5, 6}, {7}, {8}])
    encoder, decoder = SeqEncoder(), SeqDecoder()
    seq = ScheduledSeq("g", [1], 2, ([3],), True, SAMPLINGS[0], 0, history=[1, 2], num_prompt=2, grammar=grammar)
    mask = np.zeros(2, dtype=np.int32)

    def allowed():
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    for tokens, want in (([], {3}), ([3], {40}), ([40], {5, 6})):
        seq.history.extend(tokens)
        [there], _ = decoder.decode(encoder.encode([seq]))
        matcher = there.grammar.matcher()
        assert all(matcher.accept(token) for token in tokens)
        matcher.fill(mask)
        assert allowed() == want
    assert grammar.calls == 2, "each output is followed once"
    seq.token_ids, seq.num_drafts = [40, 6, 7, 3], 3
    [there], _ = decoder.decode(encoder.encode([seq]))
    for draft, want in ((None, {5, 6}), (6, {7}), (7, {8}), (3, set())):
        if draft is not None:
            there.grammar.matcher().accept(draft)
        there.grammar.matcher().fill(mask)
        assert allowed() == want
    seq.token_ids, seq.num_drafts = [9], 0
    seq.history.append(9)
    [there], _ = decoder.decode(encoder.encode([seq]))
    assert not there.grammar.matcher().accept(9)


def test_15_frames_come_over_descriptors_above_1024() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    ours, theirs = socket.socketpair()
    try:
        high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500))
        with ours, theirs, high:
            end = RankEnd(high)
            assert not end.comes(0.0)
            os.write(ours.fileno(), b"a frame")
            assert end.comes(60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
