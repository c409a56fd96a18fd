"""Sampling keywords of the SDK, written by docs/make_sampling.py: change SAMPLING in common/sampling.py instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling options. All keywords are optional; None means not given.

    Args:
        max_tokens: maximum number of tokens in the answer, at least 1. Default: the rest of the context; 16 in
            `/v1/completions`.
        seed: -2^63 to 2^64 - 1; the same seed samples the same tokens; a negative one equals seed + 2^64. Default:
            random, chosen by the router.
        temperature: 0 (greedy) to 2. Default: the model's.
        top_p: above 0, at most 1 (off). Default: the model's.
        top_k: 0 or -1: off. Default: the model's.
        ignore_eos: continue after the model's end-of-text token. Default: false.
        stop_token_ids: token ids that end the answer; at most 256. Default: none.
        stop: a string or several, at most 256 bytes each; the answer ends before the first that appears. Default:
            none.
        min_p: 0 (off) to 1. Default: 0.
        presence_penalty: -2 to 2; subtracted from the logits of tokens that occur in the output. Default: 0.
        frequency_penalty: -2 to 2; subtracted once per occurrence in the output. Default: 0.
        repetition_penalty: above 0, at most 10; divides (multiplies, if negative) the logits of tokens in prompt or
            output; 1 is off. Default: 1.
        logit_bias: token id -> value added to its logit, -100 to 100; at most 1024. Default: none.
        allowed_token_ids: only these token ids are sampled; empty: no limit; at most 16384. Default: none.
        bad_words: at most 128 texts that must not occur in the answer. Default: none.
        min_tokens: before this many tokens only max_tokens ends the answer. Default: 0.
        include_stop_str_in_output: the text includes the stop string. Default: false.
        n: number of choices, at most 16. Default: 1.
        best_of: choices that are computed; the n likeliest are returned; in HTTP not for streams. Default: n.
        logprobs: 0 to 20; logprobs of each token and of this many likeliest ones at its position; chat bodies:
            true, and `top_logprobs`. Default: none.
        prompt_logprobs: the same for the prompt's tokens; in HTTP not for streams. Default: none.
        beam_width: beam search with this many beams, at most 16; the n best answers are returned, nothing is
            sampled; 0 is off. Default: 0.
        length_penalty: -10 to 10; sums of logprobs are divided by the length to this power. Default: 1.
        early_stopping: true: end once beam_width answers are finished; "never": when no beam can score better at
            any length; false: when none can at its present length. Default: false.
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
