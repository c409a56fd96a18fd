"""Beam search of the whole engine against transformers' own, on a tiny random model and on the real one."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import check_sampling
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, Failed, Finished, TokensOut
from diptych.engine.offline import OfflineEngine

VOCAB = 320
ENDS = list(range(2, VOCAB, 9))
"""So many that answers of every length come up."""
CASES = {
    "plain": {},
    "long answers": {"length_penalty": 2.0},
    "short answers": {"length_penalty": -1.0},
    "sums alone": {"length_penalty": 0.0},
    "first come": {"early_stopping": True},
    "never early": {"early_stopping": "never", "length_penalty": 1.5},
    "one beam": {"beam_width": 1, "n": 1},
    "many beams": {"beam_width": 9, "n": 9},
    "repetition": {"repetition_penalty": 1.3},
    "min tokens": {"min_tokens": 5},
    "bad words": {"bad_words": [[7], [31, 8]]},
}


def load(folder, num_blocks=200):
    runner = TorchModelRunner.load(folder, num_blocks=num_blocks, block_size=8, num_threads=1)
    config = EngineConfig(num_blocks, 8, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True)
    return OfflineEngine(
        LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", 8), clock=FakeClock()
    )


def ours(engine, prompts, **fields):
    """By prompt, the answers, the best first; and the sum of each one's logprobs."""
    params = check_sampling(temperature=0.0, logprobs=0, vocab_size=engine.core._executor.runner.vocab_size, **fields)
    for i, prompt in enumerate(prompts):
        engine.send(EngineRequest(str(i), Prompt(tuple(prompt)), params))
    answers: dict = {str(i): [] for i in range(len(prompts))}
    left = len(prompts)
    while left:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            left -= isinstance(event, Finished)
            if isinstance(event, TokensOut):
                answers[event.attempt].append((list(event.token_ids), sum(e.logprob for e in event.logprobs)))
    return list(answers.values())


def theirs(model, prompt, ends, *, max_tokens, beam_width, n, min_tokens=0, bad_words=None, **fields):
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens or None,
            num_beams=beam_width,
            num_return_sequences=n,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            bad_words_ids=bad_words,
            **fields,
        )
    answers = []
    for row in out[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


@pytest.fixture(scope="module")
def model(tiny_dir):
    torch.set_num_threads(1)
    return transformers.LlamaForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(tiny_dir, model, case):
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 9, 24)]
    fields = {"max_tokens": 10, "beam_width": 4, "n": 3, **CASES[case]}
    got = ours(load(tiny_dir), prompts, stop_token_ids=ENDS, ignore_eos=True, **fields)
    lengths = set()
    for prompt, answers in zip(prompts, got, strict=True):
        want = theirs(model, prompt, ENDS, **fields)
        assert [ids for ids, _ in answers] == want
        lengths.update(map(len, want))
    if case == "many beams":
        assert len(lengths) > 2, "answers of one length prove little"


def test_logprobs_are_those_of_each_token(tiny_dir, model):
    prompt = list(range(20, 32))
    [answers] = ours(load(tiny_dir), [prompt], max_tokens=6, beam_width=3, n=3, ignore_eos=True)
    for ids, total in answers:
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        want = sum(logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids))
        assert total == pytest.approx(want, abs=1e-4)


@pytest.mark.slow
def test_the_real_model_searches_like_transformers(real_model_dir):
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model_dir)
    messages = [{"role": "user", "content": "Name three colours."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    real = transformers.AutoModelForCausalLM.from_pretrained(real_model_dir, dtype=torch.float32).eval()
    fields = {"max_tokens": 16, "beam_width": 3, "n": 2, "length_penalty": 0.8}
    [answers] = ours(load(real_model_dir), [prompt], **fields)
    assert [ids for ids, _ in answers] == theirs(real, prompt, [2], **fields)
