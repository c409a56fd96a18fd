"""Sampling parameters after every default was filled in; the one place where their ranges are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from diptych.common.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_SEED = 2**64 - 1


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    `max_tokens` is final (>= 1): the router has filled in what the context allows. `seed` is always set, so that a retry
    draws the same tokens. `top_k` 0 and `top_p` 1.0 switch the filter off; `temperature` 0.0 is greedy.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _number(value: object, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{param} must be a number", param=param)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequestError(f"{param} must be finite", param=param)
    return number


def _integer(value: object, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{param} must be an integer", param=param)
    return value


def check_sampling(
    *,
    temperature: object = 1.0,
    top_p: object = 1.0,
    top_k: object = 0,
    seed: object = 0,
    max_tokens: object = 1,
    ignore_eos: object = False,
    stop_token_ids: object = (),
    stop: object = (),
    vocab_size: int,
) -> SamplingParams:
    """Build SamplingParams from untrusted values.

    Raises: InvalidRequestError naming the parameter, for a wrong type, a number that is not finite or out of range, a
        token id outside the vocabulary, or too many or too long stop strings.
    """
    t = _number(temperature, "temperature")
    if not 0.0 <= t <= 2.0:
        raise InvalidRequestError(f"temperature must be between 0 and 2, got {t:g}", param="temperature")
    p = _number(top_p, "top_p")
    if not 0.0 < p <= 1.0:
        raise InvalidRequestError(f"top_p must be above 0 and at most 1, got {p:g}", param="top_p")
    k = _integer(top_k, "top_k")
    if not -1 <= k < 2**31:
        raise InvalidRequestError(f"top_k must be -1 or 0 (off) or a positive 32-bit number, got {k}", param="top_k")
    s = _integer(seed, "seed")
    if not 0 <= s <= MAX_SEED:
        raise InvalidRequestError("seed must be between 0 and 2**64 - 1", param="seed")
    m = _integer(max_tokens, "max_tokens")
    if not 1 <= m < 2**31:
        raise InvalidRequestError(f"max_tokens must be a positive 32-bit number, got {m}", param="max_tokens")
    if not isinstance(ignore_eos, bool):
        raise InvalidRequestError("ignore_eos must be true or false", param="ignore_eos")
    if not isinstance(stop_token_ids, (list, tuple)):
        raise InvalidRequestError("stop_token_ids must be a list", param="stop_token_ids")
    ids = tuple(_integer(i, "stop_token_ids") for i in stop_token_ids)
    if any(not 0 <= i < vocab_size for i in ids):
        raise InvalidRequestError(f"stop_token_ids must be below the vocabulary size {vocab_size}", param="stop_token_ids")
    if not isinstance(stop, (list, tuple)):
        raise InvalidRequestError("stop must be a string or a list of strings", param="stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop must hold non-empty strings", param="stop")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("stop holds a lone surrogate: not valid Unicode text", param="stop") from None
        if size > MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(f"a stop string is at most {MAX_STOP_STRING_BYTES} bytes", param="stop")
    return SamplingParams(
        max_tokens=m,
        seed=s,
        temperature=t + 0.0,  # -0.0 means 0.0
        top_p=p,
        top_k=max(k, 0),
        ignore_eos=ignore_eos,
        stop_token_ids=ids,
        stop=tuple(stop),
    )
