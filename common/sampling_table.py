"""Rows of the table of sampling parameters, and the checks of their values. The fields of
`common.sampling.SamplingParams` are the table.

A row defines the check of the range, the field of the proto message, the fields of the HTTP bodies, the keyword of the
SDK and their documentation. docs/architecture.md says how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from diptych.common.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STOP_STRING_BYTES = 256
MAX_SEED = 2**64 - 1
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
FIRST_VERSION = "0.1"


class Check(Protocol):
    """Converts an untrusted value to a checked one. It is not called for None (the default). `type_name`: type
    annotation of the client's value. Raises: InvalidRequestError naming the parameter."""

    @property
    def type_name(self) -> str: ...

    def __call__(self, value: Any, param: str, vocab_size: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One sampling parameter. Its name, default and internal type are those of the field that holds the row.

    Args:
        check: the check of its value.
        group: section of the documentation.
        text: effect, in one or two sentences of Markdown, for clients.
        default_text: the default in words, if it differs from the field's.
        required: a proto message inside the cluster without it is rejected; else its absence means the default. Only
            for
            parameters of the first protocol: senders of an older version do not send the others.
        responses: the Responses API accepts it under this name.
        since: the version that introduced it. Workers announce the rows of later versions than the first.
    """

    check: Check
    group: str
    text: str
    default_text: str = ""
    required: bool = False
    responses: bool = True
    since: str = FIRST_VERSION

    @property
    def at_most(self) -> int:
        """Most entries of a list; 0: not a list."""
        return getattr(self.check, "at_most", 0)

    @property
    def scalar(self) -> bool:
        return self.check.type_name in ("float", "int", "bool")


def number(value: object, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{param} must be a number", param=param)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise InvalidRequestError(f"{param} must be finite", param=param)
    return found


def integer(value: object, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{param} must be an integer", param=param)
    return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` (or above it) to `high`."""

    low: float
    high: float
    above: bool = False
    type_name = "float"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> float:
        found = number(value, param)
        if not self.low <= found <= self.high or (self.above and found == self.low):
            between = f"above {self.low:g} and at most" if self.above else f"between {self.low:g} and"
            raise InvalidRequestError(f"{param} must be {between} {self.high:g}, got {found:g}", param=param)
        return found + 0.0  # -0.0 becomes 0.0


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `low` to `high`. `range_text`: the range in words, for the error."""

    low: float = -math.inf
    high: float = math.inf
    range_text: str = ""
    type_name = "int"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> int:
        found = integer(value, param)
        if not self.low <= found <= self.high:
            range_text = self.range_text or f"between {self.low} and {self.high}"
            raise InvalidRequestError(f"{param} must be {range_text}, got {found}", param=param)
        return found


class Flag:
    type_name = "bool"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> bool:
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{param} must be true or false", param=param)
        return value


class Seed:
    """Two's complement: -1 is 2**64 - 1."""

    type_name = "int"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> int:
        found = integer(value, param)
        if not -(2**63) <= found <= MAX_SEED:
            raise InvalidRequestError(f"{param} must be between -2**63 and 2**64 - 1", param=param)
        return found & MAX_SEED


class TopK:
    type_name = "int"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> int:
        found = integer(value, param)
        if not -1 <= found < 2**31:
            range_text = "-1 or 0 (off) or a positive 32-bit number"
            raise InvalidRequestError(f"{param} must be {range_text}, got {found}", param=param)
        return max(found, 0)


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids of the vocabulary."""

    at_most: int
    type_name = "Sequence[int]"

    def __call__(self, value: object, param: str, vocab_size: int, /) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequestError(f"{param} must be a list", param=param)
        if len(value) > self.at_most:  # checked first: looking at each of millions would block the event loop
            raise InvalidRequestError(f"{param} takes at most {self.at_most} token ids, got {len(value)}", param=param)
        ids = tuple(integer(i, param) for i in value)
        if any(not 0 <= i < vocab_size for i in ids):
            raise InvalidRequestError(f"{param} must be below the vocabulary size {vocab_size}", param=param)
        return ids


class Stops:
    type_name = "str | Sequence[str]"
    at_most = MAX_STOP_STRINGS

    def __call__(self, value: object, param: str, vocab_size: int, /) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequestError("stop must be a string or a list of strings", param=param)
        if len(value) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(value)}", param=param)
        for text in value:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop must hold non-empty strings", param=param)
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise InvalidRequestError("stop holds a lone surrogate: not valid Unicode text", param=param) from None
            if size > MAX_STOP_STRING_BYTES:
                raise InvalidRequestError(f"a stop string is at most {MAX_STOP_STRING_BYTES} bytes", param=param)
        return tuple(value)


class Biases:
    """A mapping {token id: bias}, whose keys may be digits (JSON keys are strings), or pairs."""

    type_name = "Mapping[int, float]"
    at_most = MAX_LOGIT_BIAS
    _bias = Number(-100.0, 100.0)
    _token = Ids(1)

    def __call__(self, value: object, param: str, vocab_size: int, /) -> tuple[tuple[int, float], ...]:
        if isinstance(value, Mapping):
            pairs: list[tuple[object, object]] = list(value.items())
        elif isinstance(value, (list, tuple)) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
            pairs = [(p[0], p[1]) for p in value]
        else:
            raise InvalidRequestError(f"{param} must map token ids to numbers", param=param)
        if len(pairs) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"{param} takes at most {MAX_LOGIT_BIAS} entries, got {len(pairs)}", param=param)
        out: dict[int, float] = {}
        for key, bias in pairs:
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
                key = int(key)
            (token,) = self._token((key,), param, vocab_size)
            if token in out:
                raise InvalidRequestError(f"{param} names token {token} twice", param=param)
            out[token] = self._bias(bias, param, vocab_size)
        return tuple(sorted(out.items()))


class BadWords:
    """Token id sequences; texts have been tokenized before."""

    type_name = "Sequence[str]"
    at_most = MAX_BAD_WORDS
    _word = Ids(MAX_BAD_WORD_TOKENS)

    def __call__(self, value: object, param: str, vocab_size: int, /) -> tuple[tuple[int, ...], ...]:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequestError(f"{param} must be a list", param=param)
        if len(value) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"{param} takes at most {MAX_BAD_WORDS} words, got {len(value)}", param=param)
        words = tuple(self._word(word, param, vocab_size) for word in value)
        if not all(words):
            raise InvalidRequestError(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", param=param)
        return words
