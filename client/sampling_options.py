"""Sampling keywords of the SDK, written by docs/make_sampling.py: change SAMPLING in common/sampling.py instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling, and the end of the answer. All keywords are optional; None means not given.

    Args:
        max_tokens: most tokens of the answer, at least 1. Default: what the context leaves; 16 in
            `/v1/completions`.
        seed: -2^63 to 2^64 - 1; the same seed draws the same tokens, a negative one those of seed + 2^64. Default:
            drawn by the router.
        temperature: 0 (greedy) to 2. Default: the model's.
        top_p: above 0, at most 1 (off). Default: the model's.
        top_k: 0 or -1: off. Default: the model's.
        ignore_eos: go on after the model's end-of-text token. Default: false.
        stop_token_ids: token ids that end the answer; at most 256. Default: none.
        stop: a string or several, 256 bytes each; text is cut before the first that appears; at most 16. Default:
            none.
        min_p: 0 (off) to 1. Default: 0.
        presence_penalty: -2 to 2; subtracted from the logits of tokens among the outputs. Default: 0.
        frequency_penalty: -2 to 2; subtracted once per occurrence among the outputs. Default: 0.
        repetition_penalty: above 0, at most 10; divides (multiplies, if negative) the logits of tokens in prompt or
            outputs; 1 is off. Default: 1.
        logit_bias: token id -> what is added to its logit, -100 to 100; at most 1024. Default: none.
        allowed_token_ids: nothing else is drawn; empty: no such limit; at most 16384. Default: none.
        bad_words: at most 128 texts that the answer does not hold. Default: none.
        min_tokens: tokens before which nothing but max_tokens ends the answer. Default: 0.
        include_stop_str_in_output: the text ends with the stop string instead of before it. Default: false.
        n: number of choices, at most 16. Default: 1.
        best_of: choices that are computed, of which the n likeliest come back; whole answers only in HTTP. Default:
            n.
        logprobs: 0 to 20; of each token and of so many of the likeliest ones at its place; chat bodies: true, and
            `top_logprobs`. Default: none.
        prompt_logprobs: the same of the prompt's tokens; whole answers only in HTTP. Default: none.
        beam_width: beam search with so many beams, at most 16, of which the n best answers come back; it draws
            nothing; 0 is off. Default: 0.
        length_penalty: -10 to 10; sums of logprobs are divided by the length to this power. Default: 1.
        early_stopping: true: end once beam_width answers are finished; "never": only when no beam can better them,
            however long it becomes; false: when none can at its present length. Default: false.
    """

    max_tokens: int | None
    seed: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    stop: str | Sequence[str] | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    min_tokens: int | None
    include_stop_str_in_output: bool | None
    n: int | None
    best_of: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
