"""llguidance behind the interface of engine/grammar/program.py: it compiles as it goes, within limits of its own, so what
crosses from the compiling process is its own grammar text after one trial."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tags, choices_of
from diptych.engine.grammar.program import SLOW_S, Mask, Matcher, Program, mask_words
from diptych.engine.grammar.schema_support import only_xgrammar
from diptych.engine.grammar.vocabulary import Vocabulary

_WHITESPACE = "[ \\n\\t\\r]{0,16}"


class _Tokenizer:
    """The interface that LLTokenizer needs. Text that a grammar forces is tokenized by the model's tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.special_token_ids = [i for i, token in enumerate(vocabulary.token_bytes) if not token]
        # Special tokens need bytes that no text holds.
        self.tokens = [token or b"\xff<%d>" % i for i, token in enumerate(vocabulary.token_bytes)]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else bytes(text).decode())


def _tokenizer(vocabulary: Vocabulary) -> Any:
    wrapper: Any = _Tokenizer(vocabulary)
    return llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.end_token_ids))


class LlguidanceCompiler:
    """Lives in the compiling process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = _tokenizer(vocabulary)

    def compile(self, grammar: Grammar) -> bytes:
        """Raises: InvalidRequestError naming `grammar`, with the library's reason."""
        try:
            text = _compiled_text(grammar)
        except ValueError as error:
            raise InvalidRequestError(f"grammar: {str(error)[:300]}", param="grammar") from error
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if not matcher.get_error():
            matcher.compute_bitmask()
        if error_text := matcher.get_error():
            raise InvalidRequestError(f"grammar: {_first_line(error_text)}", param="grammar")
        return text.encode()


class LlguidanceProgram:
    """Args: clock: seconds of the calling thread, for giving up what is too slow."""

    def __init__(self, tokenizer: Any, text: str, words: int, clock: Callable[[], float] = time.thread_time) -> None:
        self._tokenizer, self._text, self._words, self._clock = tokenizer, text, words, clock
        self.size_bytes = len(text)

    def matcher(self) -> Matcher:
        return _Matcher(llguidance.LLMatcher(self._tokenizer, self._text, log_level=0), self._words, self._clock)


class _Matcher:
    def __init__(self, matcher: Any, words: int, clock: Callable[[], float]) -> None:
        self._matcher = matcher
        self._clock = clock
        self.num_words = words
        self._row = np.zeros((1, words), dtype=np.int32)
        self.slow = False

    def accept(self, token_id: int) -> bool:
        began = self._clock()
        allowed = bool(self._matcher.consume_token(token_id))
        self.slow |= self._clock() - began > SLOW_S
        return allowed

    def fill(self, mask: Mask) -> None:
        if self._matcher.get_error():
            mask[:] = 0
            return
        began = self._clock()
        fill_next_token_bitmask(self._matcher, self._row)
        mask[:] = self._row[0]
        self.slow |= self._clock() - began > SLOW_S


class LlguidanceLoader:
    """Lives in the worker: makes programs of what the compiling process sends."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = _tokenizer(vocabulary)
        self._words = mask_words(vocabulary.size)

    def load(self, compiled: bytes) -> Program:
        return LlguidanceProgram(self._tokenizer, compiled.decode(), self._words)


def _compiled_text(grammar: Grammar) -> str:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            defaults = _COMPACT if grammar.compact else _JSON_DEFAULTS
            return str(llguidance.LLMatcher.grammar_from_json_schema(source, defaults=defaults))
        case GrammarKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(source))
        case GrammarKind.CHOICE:
            rules = " | ".join(json.dumps(text) for text in choices_of(source))
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: {rules}"))
        case GrammarKind.EBNF:
            return str(llguidance.grammar_from("ebnf" if "::=" in source else "lark", source))
        case GrammarKind.TAGS:
            return str(llguidance.LLMatcher.grammar_from_lark(_lark(Tags.load(source), compact=grammar.compact)))


_JSON_DEFAULTS: Any = {"whitespace_pattern": _WHITESPACE}
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _lark(tags: Tags, *, compact: bool) -> str:
    rules = []
    for i, tag in enumerate(tags.tags):
        rules.append(f"tag_{i}: {json.dumps(tag.begin)} json_{i} {json.dumps(tag.end)}")
        schema = json.loads(tag.schema)
        rules.append(f"json_{i}: %json " + json.dumps({"x-guidance": _JSON_DEFAULTS, **schema}))
    one = "( " + " | ".join(f"tag_{i}" for i in range(len(tags.tags))) + " )"
    if only_xgrammar(tags):
        what = "strict tools" if tags.trigger else "tools and a format together, where calls are bare JSON objects,"
        raise ValueError(f"{what} need the xgrammar backend")
    more = f" ( {json.dumps(tags.separator)} {one} )*" if tags.separator else f" {one}*"
    body = one + (more if tags.several else "")
    head, tail = (f"{json.dumps(text)} " if text else "" for text in (tags.head, tags.tail))
    start = f"{head}{body} {tail}"
    if tags.instead:
        defaults = _COMPACT if compact else _JSON_DEFAULTS
        rules.append("instead: %json " + json.dumps({"x-guidance": defaults, **json.loads(tags.instead)}))
        start = f"instead | {start}"
    return f"start: {start}\n" + "\n".join(rules)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "not understood")[:300]
