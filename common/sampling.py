"""Sampling parameters after every default was filled in; the one place where their ranges are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, check_grammar

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STOP_STRING_BYTES = 256
MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class EarlyStopping(Enum):
    """When beam search is over, once beam_width answers are finished."""

    OFF = "false"
    """When no living beam, at its present length, scores better than the worst of them."""
    ON = "true"
    """At once."""
    NEVER = "never"
    """When no living beam can, however long it becomes."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    `max_tokens` is final (>= 1): the router has filled in what the context allows. `seed` is always set, so that a retry
    draws the same tokens. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch the filter off; `temperature` 0.0 is greedy.

    Args:
        presence_penalty, frequency_penalty: subtracted from the logits of tokens among the outputs: once, and once per
            occurrence. repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or outputs.
        logit_bias: (token id, what is added to its logit).
        allowed_token_ids: nothing else is ever drawn; empty: no such limit.
        bad_words: token id sequences whose last token is not drawn after the others.
        min_tokens: outputs before which neither EOS nor a stop token is drawn and no stop string is looked for.
        include_stop_str_in_output: the text ends with the stop string instead of before it.
        n: choices that are given out. best_of: choices that are computed, of which the n likeliest count; 0: n.
        grammar: what the answer must look like; its end is the answer's end, whatever min_tokens and ignore_eos say.
        logprobs, prompt_logprobs: None: none; k: of the token itself and of the k likeliest at its place. They are the
            model's own, before temperature, penalties and filters.
        beam_width: beam search with so many beams, of which the n best answers are given out; 0: off. length_penalty: an
            answer's sum of logprobs is divided by its length to this power. Penalties, bias and bans change the logprobs.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.OFF

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def constrained(self) -> bool:
        """Something changes the logits before the draw: it needs the request's tokens."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
            or self.grammar
        )

    @property
    def num_choices(self) -> int:
        """Choices that are computed."""
        return self.beam_width or self.best_of or self.n


_values = attrgetter(*(field.name for field in fields(SamplingParams)))
_setters = tuple(getattr(SamplingParams, field.name).__set__ for field in fields(SamplingParams))
_set_seed = getattr(SamplingParams, "seed").__set__  # noqa: B009 - the slot, not its value


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """The same values, already checked, with another seed: slot by slot, in a third of the time that `replace` takes."""
    new = object.__new__(SamplingParams)
    for put, value in zip(_setters, _values(params), strict=True):
        put(new, value)
    _set_seed(new, seed)
    return new


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


def _ids(value: object, param: str, vocab_size: int, at_most: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{param} must be a list", param=param)
    if len(value) > at_most:  # before anything looks at each: millions of them would hold up the event loop
        raise InvalidRequestError(f"{param} takes at most {at_most} token ids, got {len(value)}", param=param)
    ids = tuple(_integer(i, param) for i in value)
    if any(not 0 <= i < vocab_size for i in ids):
        raise InvalidRequestError(f"{param} must be below the vocabulary size {vocab_size}", param=param)
    return ids


def _between(value: object, param: str, low: float, high: float) -> float:
    number = _number(value, param)
    if not low <= number <= high:
        raise InvalidRequestError(f"{param} must be between {low:g} and {high:g}, got {number:g}", param=param)
    return number + 0.0  # -0.0 means 0.0


def _count(value: object, param: str, low: int, high: int) -> int:
    number = _integer(value, param)
    if not low <= number <= high:
        raise InvalidRequestError(f"{param} must be between {low} and {high}, got {number}", param=param)
    return number


def _flag(value: object, param: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{param} must be true or false", param=param)
    return value


def _early_stopping(value: object) -> EarlyStopping:
    if isinstance(value, EarlyStopping):
        return value
    if isinstance(value, bool):
        return EarlyStopping.ON if value else EarlyStopping.OFF
    if value == "never":
        return EarlyStopping.NEVER
    raise InvalidRequestError('early_stopping must be true, false or "never"', param="early_stopping")


def _check_beam_search(params: SamplingParams) -> None:
    """Beam search draws nothing, and knows no text. Raises: InvalidRequestError naming what does not go with it."""
    if not params.beam_width:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", EarlyStopping.OFF)):
            if getattr(params, name) != neutral:
                raise InvalidRequestError(f"{name} is for beam search only", param=name)
        return
    if not params.n <= params.beam_width <= MAX_CHOICES:
        raise InvalidRequestError(
            f"beam_width must be between n={params.n} and {MAX_CHOICES}, got {params.beam_width}", param="beam_width"
        )
    for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("best_of", 0)):
        if getattr(params, name) != neutral:
            raise InvalidRequestError(
                f"{name} does not go with beam search, which draws nothing: leave it out or set it to {neutral:g}",
                param=name,
            )
    if params.stop:
        raise InvalidRequestError("stop strings do not go with beam search: use stop_token_ids", param="stop")
    if params.grammar is not None:
        raise InvalidRequestError("grammar does not go with beam search", param="grammar")


def _stops(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("stop must be a string or a list of strings", param="stop")
    if len(value) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(value)}", param="stop")
    for text in value:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop must hold non-empty strings", param="stop")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("stop holds a lone surrogate: not valid Unicode text", param="stop") from None
        if size > MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(f"a stop string is at most {MAX_STOP_STRING_BYTES} bytes", param="stop")
    return tuple(value)


def _biases(value: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """From {token id: bias}, whose keys may be digits (JSON has no other keys), or from pairs."""
    param = "logit_bias"
    if isinstance(value, Mapping):
        pairs: list[tuple[object, object]] = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
        pairs = [(p[0], p[1]) for p in value]
    else:
        raise InvalidRequestError("logit_bias must map token ids to numbers", param=param)
    if len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(pairs)}", param=param)
    out: dict[int, float] = {}
    for key, bias in pairs:
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        (token,) = _ids((key,), param, vocab_size, 1)
        if token in out:
            raise InvalidRequestError(f"logit_bias names token {token} twice", param=param)
        out[token] = _between(bias, param, -100.0, 100.0)
    return tuple(sorted(out.items()))


def _bad_words(value: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    param = "bad_words"
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError("bad_words must be a list", param=param)
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(value)}", param=param)
    words = tuple(_ids(word, param, vocab_size, MAX_BAD_WORD_TOKENS) for word in value)
    if not all(words):
        raise InvalidRequestError(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", param=param)
    return words


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
    min_p: object = 0.0,
    presence_penalty: object = 0.0,
    frequency_penalty: object = 0.0,
    repetition_penalty: object = 1.0,
    logit_bias: object = (),
    allowed_token_ids: object = (),
    bad_words: object = (),
    min_tokens: object = 0,
    include_stop_str_in_output: object = False,
    n: object = 1,
    best_of: object = 0,
    logprobs: object = None,
    prompt_logprobs: object = None,
    grammar: object = None,
    beam_width: object = 0,
    length_penalty: object = 1.0,
    early_stopping: object = False,
    vocab_size: int,
) -> SamplingParams:
    """Build SamplingParams from untrusted values.

    Args:
        bad_words: as token id sequences; whoever knows the tokenizer has made them.
    Raises: InvalidRequestError naming the parameter, for a wrong type, a number that is not finite or out of range, a
        token id outside the vocabulary, or too many or too long entries of a list.
    """
    p = _number(top_p, "top_p")
    if not 0.0 < p <= 1.0:
        raise InvalidRequestError(f"top_p must be above 0 and at most 1, got {p:g}", param="top_p")
    k = _integer(top_k, "top_k")
    if not -1 <= k < 2**31:
        raise InvalidRequestError(f"top_k must be -1 or 0 (off) or a positive 32-bit number, got {k}", param="top_k")
    s = _integer(seed, "seed")
    if not -(2**63) <= s <= MAX_SEED:
        raise InvalidRequestError("seed must be between -2**63 and 2**64 - 1", param="seed")
    s &= MAX_SEED  # in two's complement: -1 is 2**64 - 1
    m = _integer(max_tokens, "max_tokens")
    if not 1 <= m < 2**31:
        raise InvalidRequestError(f"max_tokens must be a positive 32-bit number, got {m}", param="max_tokens")
    r = _number(repetition_penalty, "repetition_penalty")
    if not 0.0 < r <= MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            f"repetition_penalty must be above 0 and at most {MAX_REPETITION_PENALTY:g}, got {r:g}",
            param="repetition_penalty",
        )
    least = _integer(min_tokens, "min_tokens")
    if not 0 <= least <= m:
        raise InvalidRequestError(f"min_tokens must be between 0 and max_tokens={m}, got {least}", param="min_tokens")
    choices = _count(n, "n", 1, MAX_CHOICES)
    best = _integer(best_of, "best_of")
    if best and not choices <= best <= MAX_CHOICES:
        raise InvalidRequestError(f"best_of must be between n={choices} and {MAX_CHOICES}, got {best}", param="best_of")
    params = SamplingParams(
        max_tokens=m,
        seed=s,
        temperature=_between(temperature, "temperature", 0.0, 2.0),
        top_p=p,
        top_k=max(k, 0),
        ignore_eos=_flag(ignore_eos, "ignore_eos"),
        stop_token_ids=_ids(stop_token_ids, "stop_token_ids", vocab_size, MAX_STOP_TOKEN_IDS),
        stop=_stops(stop),
        min_p=_between(min_p, "min_p", 0.0, 1.0),
        presence_penalty=_between(presence_penalty, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_between(frequency_penalty, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=r,
        logit_bias=_biases(logit_bias, vocab_size),
        allowed_token_ids=_ids(allowed_token_ids, "allowed_token_ids", vocab_size, MAX_ALLOWED_TOKEN_IDS),
        bad_words=_bad_words(bad_words, vocab_size),
        min_tokens=least,
        include_stop_str_in_output=_flag(include_stop_str_in_output, "include_stop_str_in_output"),
        n=choices,
        best_of=best,
        logprobs=None if logprobs is None else _count(logprobs, "logprobs", 0, MAX_TOP_LOGPROBS),
        prompt_logprobs=(
            None if prompt_logprobs is None else _count(prompt_logprobs, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
        ),
        grammar=check_grammar(grammar),
        beam_width=_count(beam_width, "beam_width", 0, MAX_CHOICES),
        length_penalty=_between(length_penalty, "length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        early_stopping=_early_stopping(early_stopping),
    )
    _check_beam_search(params)
    return params
