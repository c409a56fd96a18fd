"""The table of sampling parameters: each field of SamplingParams is a row. Their ranges are checked only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, check_grammar
from diptych.common.sampling_table import (
    FIRST_VERSION,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    BadWords,
    Biases,
    Check,
    Flag,
    Ids,
    Integer,
    Number,
    Row,
    Seed,
    Stops,
    TopK,
)

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16
"""Of one request, also with best_of and as beams."""
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities at one token's place. `rank`: 1 for the likeliest token.
    `top`: (token id, logprob) of the likeliest ones, best first; as many as were asked for."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class EarlyStopping(Enum):
    """When beam search ends, once beam_width answers are finished."""

    OFF = "false"
    """Ends when no active beam, at its present length, scores better than the worst finished one."""
    ON = "true"
    """Ends at once."""
    NEVER = "never"
    """Ends when no active beam can score better at any length."""


class EarlyStoppingCheck:
    type_name = "bool | str"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> EarlyStopping:
        if isinstance(value, EarlyStopping):
            return value
        if isinstance(value, bool):
            return EarlyStopping.ON if value else EarlyStopping.OFF
        if value == "never":
            return EarlyStopping.NEVER
        raise InvalidRequestError(f'{param} must be true, false or "never"', param=param)


class GrammarCheck:
    type_name = "Grammar"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> Grammar | None:
        return check_grammar(value)


def row(default: Any, check: Check, group: str, text: str, **more: Any) -> Any:
    """A field with its row. See sampling_table.Row."""
    return field(default=default, metadata={"row": Row(check, group, text, **more)})


# fmt: off
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled. Each field is a row of the table; its `text` is the public
    documentation.

    `max_tokens` is final (>= 1): the router has applied the limit of the context. `seed` is always set, so that a retry
    samples the same tokens. `bad_words` are token id sequences whose last token is not sampled after the others.
    `best_of` 0 means n. The end of `grammar` ends the answer, whatever min_tokens and ignore_eos are. Logprobs are the
    model's own, before temperature, penalties and filters; in beam search penalties, bias and bans change them.
    """

    max_tokens: int = row(
        MISSING, Integer(1, 2**31 - 1, "a positive 32-bit number"), "stopping",
        "maximum number of tokens in the answer, at least 1",
        default_text="the rest of the context; 16 in `/v1/completions`", required=True, responses=False)
    seed: int = row(
        0, Seed(), "sampling", "-2^63 to 2^64 - 1; the same seed samples the same tokens; a negative one equals seed + 2^64",
        default_text="random, chosen by the router", required=True)
    temperature: float = row(
        1.0, Number(0.0, 2.0), "sampling", "0 (greedy) to 2", default_text="the model's", required=True)
    top_p: float = row(
        1.0, Number(0.0, 1.0, above=True), "sampling", "above 0, at most 1 (off)", default_text="the model's", required=True)
    top_k: int = row(0, TopK(), "sampling", "0 or -1: off", default_text="the model's", required=True)
    ignore_eos: bool = row(False, Flag(), "stopping", "continue after the model's end-of-text token")
    stop_token_ids: tuple[int, ...] = row(
        (), Ids(MAX_STOP_TOKEN_IDS), "stopping", "token ids that end the answer")
    stop: tuple[str, ...] = row(
        (), Stops(), "stopping", "a string or several, at most 256 bytes each; the answer ends before the first that appears")
    min_p: float = row(0.0, Number(0.0, 1.0), "sampling", "0 (off) to 1", required=True)
    presence_penalty: float = row(
        0.0, Number(-2.0, 2.0), "sampling", "-2 to 2; subtracted from the logits of tokens that occur in the output",
        required=True)
    frequency_penalty: float = row(
        0.0, Number(-2.0, 2.0), "sampling", "-2 to 2; subtracted once per occurrence in the output", required=True)
    repetition_penalty: float = row(
        1.0, Number(0.0, MAX_REPETITION_PENALTY, above=True), "sampling",
        "above 0, at most 10; divides (multiplies, if negative) the logits of tokens in prompt or output; 1 is off",
        required=True)
    logit_bias: tuple[tuple[int, float], ...] = row(
        (), Biases(), "sampling", "token id -> value added to its logit, -100 to 100")
    allowed_token_ids: tuple[int, ...] = row(
        (), Ids(MAX_ALLOWED_TOKEN_IDS), "sampling", "only these token ids are sampled; empty: no limit")
    bad_words: tuple[tuple[int, ...], ...] = row(
        (), BadWords(), "sampling", "at most 128 texts that must not occur in the answer")
    min_tokens: int = row(
        0, Integer(), "stopping", "before this many tokens only max_tokens ends the answer", required=True)
    include_stop_str_in_output: bool = row(
        False, Flag(), "stopping", "the text includes the stop string")
    n: int = row(
        1, Integer(1, MAX_CHOICES), "choices", f"number of choices, at most {MAX_CHOICES}", required=True, responses=False)
    best_of: int = row(
        0, Integer(), "choices", "choices that are computed; the n likeliest are returned; in HTTP not for streams",
        default_text="n", required=True, responses=False)
    logprobs: int | None = row(
        None, Integer(0, MAX_TOP_LOGPROBS), "logprobs",
        "0 to 20; logprobs of each token and of this many likeliest ones at its position; chat bodies: true, and `top_logprobs`",
        responses=False)
    prompt_logprobs: int | None = row(
        None, Integer(0, MAX_TOP_LOGPROBS), "logprobs", "the same for the prompt's tokens; in HTTP not for streams",
        responses=False)
    grammar: Grammar | None = row(None, GrammarCheck(), "constraints", "see the fields of constraints")  # noqa: RUF009 - it never changes
    beam_width: int = row(
        0, Integer(0, MAX_CHOICES), "beam search",
        f"beam search with this many beams, at most {MAX_CHOICES}; the n best answers are returned, nothing is sampled; 0 is off")
    length_penalty: float = row(
        1.0, Number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY), "beam search",
        "-10 to 10; sums of logprobs are divided by the length to this power")
    early_stopping: EarlyStopping = row(  # noqa: RUF009
        EarlyStopping.OFF, EarlyStoppingCheck(), "beam search",
        'true: end once beam_width answers are finished; "never": when no beam can score better at any length; '
        "false: when none can at its present length")
# fmt: on

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def constrained(self) -> bool:
        """Whether the logits are changed before sampling, which needs the request's tokens."""
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
        """Number of choices that are computed."""
        return self.beam_width or self.best_of or self.n


SAMPLING: Mapping[str, Row] = {entry.name: entry.metadata["row"] for entry in fields(SamplingParams)}
"""The rows by name."""
sampling_values = attrgetter(*SAMPLING)
"""All values of a SamplingParams, in the order of the table."""
DEFAULTS: Mapping[str, Any] = {
    entry.name: 1 if entry.default is MISSING else entry.default for entry in fields(SamplingParams)
}
LATER_FIELDS = tuple(name for name, entry in SAMPLING.items() if entry.since != FIRST_VERSION)
"""Parameters that workers of the first version do not know. A worker announces them in its lease and handshake; they are sent
only where they are set, and only to workers that announce them (docs/decisions/mixed-versions.md)."""
_checks = {name: entry.check for name, entry in SAMPLING.items()}
_setters = tuple(getattr(SamplingParams, name).__set__ for name in SAMPLING)
_set_seed = getattr(SamplingParams, "seed").__set__  # noqa: B009 - the slot, not its value


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """A copy with another seed and no checks, in a third of the time of `replace`."""
    new = object.__new__(SamplingParams)
    for put, value in zip(_setters, sampling_values(params), strict=True):
        put(new, value)
    _set_seed(new, seed)
    return new


def check_sampling(*, vocab_size: int, **values: object) -> SamplingParams:
    """Build SamplingParams from untrusted values.

    Args:
        values: by the names of the table; missing ones have their default (max_tokens: 1). `bad_words` are token id
            sequences.
    Raises: InvalidRequestError naming the parameter, for a wrong type, a number that is not finite or out of range, a
        token
        id outside the vocabulary, or too many or too long entries of a list. TypeError for an unknown name.
    """
    made = {**DEFAULTS}
    for name, value in values.items():
        if name not in made:
            raise TypeError(f"unknown sampling parameter {name}")
        if value is not None or made[name] is not None:
            made[name] = _checks[name](value, name, vocab_size)
    params = object.__new__(SamplingParams)
    for put, value in zip(_setters, made.values(), strict=True):
        put(params, value)
    _check_together(params)
    return params


def later_fields(params: SamplingParams) -> frozenset[str]:
    """The parameters of LATER_FIELDS that it sets: only a worker that announces them may get it."""
    return frozenset(name for name in LATER_FIELDS if getattr(params, name) != DEFAULTS[name])


def _check_together(params: SamplingParams) -> None:
    """Raises: InvalidRequestError naming a value that conflicts with another."""
    n, most = params.n, params.max_tokens
    if not 0 <= params.min_tokens <= most:
        raise InvalidRequestError(
            f"min_tokens must be between 0 and max_tokens={most}, got {params.min_tokens}", param="min_tokens"
        )
    if params.best_of and not n <= params.best_of <= MAX_CHOICES:
        raise InvalidRequestError(
            f"best_of must be between n={n} and {MAX_CHOICES}, got {params.best_of}", param="best_of"
        )
    if params.beam_width:
        _check_beam_search(params)
        return
    for name in ("length_penalty", "early_stopping"):
        if getattr(params, name) != DEFAULTS[name]:
            raise InvalidRequestError(f"{name} is for beam search only", param=name)


_IN_BEAM_SEARCH = frozenset({
    "max_tokens", "seed", "ignore_eos", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "include_stop_str_in_output", "n", "logprobs",
    "prompt_logprobs", "beam_width", "length_penalty", "early_stopping",
})  # fmt: skip
"""Parameters that act in beam search, or change nothing there. Any other one is rejected, not ignored."""
_NOT_IN_BEAM_SEARCH = tuple(
    (name, 0.0 if name == "temperature" else DEFAULTS[name]) for name in SAMPLING if name not in _IN_BEAM_SEARCH
)


def _check_beam_search(params: SamplingParams) -> None:
    """Beam search neither samples nor decodes text. Raises: InvalidRequestError naming a value that conflicts with it.
    """
    if not params.n <= params.beam_width <= MAX_CHOICES:
        raise InvalidRequestError(
            f"beam_width must be between n={params.n} and {MAX_CHOICES}, got {params.beam_width}", param="beam_width"
        )
    if params.stop:
        raise InvalidRequestError("stop strings cannot be combined with beam search: use stop_token_ids", param="stop")
    if params.grammar is not None:
        raise InvalidRequestError("grammar cannot be combined with beam search", param="grammar")
    for name, neutral in _NOT_IN_BEAM_SEARCH:
        if getattr(params, name) != neutral:
            off = f"{neutral:g}" if isinstance(neutral, (int, float)) else neutral
            raise InvalidRequestError(
                f"{name} cannot be combined with beam search, which does not sample: leave it out or set it to {off}",
                param=name,
            )
