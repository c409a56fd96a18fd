"""Rows of several tokens verify guesses: on every back end the ids are those of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.kv_format import full_format
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.cuda.batch import lay_out
from diptych.engine.exec.sampling import draw_step
from diptych.engine.messages import ScheduledSeq, StepResult

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SEEDED = SamplingParams(max_tokens=64, seed=11, temperature=0.9, top_p=0.95)
CONSTRAINED = SamplingParams(
    max_tokens=64, seed=5, temperature=0.9, top_k=60, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((7, 3.0),),
    bad_words=((7, 11), (12,)), logprobs=2,
)  # fmt: skip
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED, CONSTRAINED], ids=["greedy", "seeded", "constrained"])


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(320) for _ in range(n)] for n in lengths]


@SAMPLINGS
@pytest.mark.parametrize("lanes", [None, *ALL_LANES], ids=lambda lanes: "torch" if lanes is None else f"native-{lanes}")
@pytest.mark.parametrize("model", ["llama", "mistral-window", "qwen3"])
def test_given_drafts_yield_the_ids_of_plain_decoding(model_of, driver_of, set_lanes, model, lanes, sampling):
    if lanes is not None:
        set_lanes(lanes)
    folder, _ = model_of(model)
    backend = "torch" if lanes is None else "native"
    prompts = prompts_of(3, 17, 9)
    expected = driver_of(folder, backend=backend).generate(prompts, 21, sampling=sampling)
    driver = driver_of(folder, backend=backend)
    outputs, logprobs, yielded = driver.generate_with_drafts(prompts, expected, sampling=sampling)
    assert outputs == expected
    assert max(yielded) > 2
    assert min(yielded) == 1
    if sampling.logprobs:
        assert [[entry.token_id for entry in one] for one in logprobs] == [out[1:] for out in expected]


# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_triton_verifies_in_decode_rows(model_dir_of, driver_of):
    """The rows that a CUDA graph serves: one token each, through Triton's interpreter."""
    knobs = pytest.importorskip("triton", reason="Triton is not installed").knobs
    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    small = {
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    folder = model_dir_of("LlamaForCausalLM", **small)
    prompts = prompts_of(3, 9)
    for sampling in (GREEDY, CONSTRAINED):
        expected = driver_of(folder, backend="torch").generate(prompts, 9, sampling=sampling)
        driver = driver_of(folder, backend="triton")
        outputs, _, yielded = driver.generate_with_drafts(prompts, expected, most=3, sampling=sampling)
        assert outputs == expected
        assert max(yielded) > 1


def seq_of(attempt, tokens, start, table, *, drafts=0, sample=True, sampling=GREEDY):
    return ScheduledSeq(attempt, tokens, start, (table,), sample, sampling, 0, num_drafts=drafts)


def test_a_row_with_drafts_is_laid_out_as_decode_rows():
    """So it needs no chunk, and a graph of as many rows serves it; each row reads the table of its sequence."""
    kv = full_format(1, 1, 16, block_size=4, dtype="float32")
    plain = seq_of("a", [7], 4, [5, 6])
    drafted = seq_of("b", [8, 9, 10], 3, [1, 2, 3], drafts=2)
    chunk = seq_of("c", [1, 2], 0, [9], sample=False)
    batch = lay_out([chunk, drafted, plain], kv, 64)
    assert (batch.order, batch.num_decode, batch.decode_counts) == ([1, 2, 0], 4, [3, 1])
    assert (batch.token_ids, batch.positions) == ([8, 9, 10, 7, 1, 2], [3, 4, 5, 4, 0, 1])
    assert batch.slots == [[4 + 3, 8, 9, 24, 36, 37]]
    assert (batch.sample_rows, batch.sample_seqs) == ([0, 1, 2, 3], [1, 1, 1, 2])
    assert batch.row_tables([30, 31, 32]) == [30, 30, 30, 31, 32]
    alone = lay_out([drafted, plain], kv, 64)
    assert alone.all_rows_sampled
    assert not alone.counts


def test_a_draw_that_fails_behind_the_first_one_ends_the_row_in_front_of_it():
    """NaN at the second position: the first token counts, and the next step reports the bad row at its first position."""
    logits = torch.zeros(3, 300)
    logits[0, 5] = logits[2, 6] = 9.0
    logits[1, 0] = float("nan")
    seq = seq_of("a", [4, 5, 6], 9, [0], drafts=2)
    result = StepResult([()])
    draw_step([seq], [0, 0, 0], [], logits, (), result)
    assert (result.token_ids, result.bad_rows, result.refused_rows) == ([(5,)], {}, {})
    result = StepResult([()])
    draw_step([seq_of("a", [5], 10, [0])], [0], [], logits[1:2], (), result)
    assert (result.token_ids, list(result.bad_rows)) == ([()], [0])


def test_a_step_that_fails_while_it_draws_leaves_no_memo_of_tokens_that_never_counted(monkeypatch):
    """The scheduler drops such a step and repeats it from the tokens that it knows."""
    from diptych.engine.exec import sampling as module

    def drawn_of(fail_at):
        logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
        history = [3, 4]
        seq = seq_of("a", [4, 0, 0], 1, [0], drafts=2, sampling=CONSTRAINED)
        seq.history, seq.num_prompt, seq.top_logprobs = history, 1, 0
        first = StepResult([()])
        draw_step([seq], [0, 0, 0], [], logits, (), first)
        seq.memo = None
        seq.token_ids[1] = first.token_ids[0][0]
        if fail_at:
            calls = []

            def failing(*arguments):
                calls.append(1)
                if len(calls) == fail_at:
                    raise RuntimeError("out of memory")
                return real(*arguments)

            real = module.draw_tokens
            with monkeypatch.context() as patch:
                patch.setattr(module, "draw_tokens", failing)
                with pytest.raises(RuntimeError):
                    draw_step([seq], [0, 0, 0], [], logits, (), StepResult([()]))
        result = StepResult([()])
        draw_step([seq], [0, 0, 0], [], logits, (), result)
        return result.token_ids

    assert drawn_of(2) == drawn_of(1) == drawn_of(0)
