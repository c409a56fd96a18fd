"""xgrammar behind the interface of engine/grammar/program.py. Importing it takes seconds: never on a thread that others wait for.

What is compiled in the compiling process crosses to the worker as JSON text of a CompiledGrammar.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tags, choices_of
from diptych.engine.grammar.program import SLOW_S, Mask, Matcher, Program, mask_words
from diptych.engine.grammar.vocabulary import Vocabulary
from diptych.engine.grammar.xgrammar_alone import import_beside_torch

xgrammar = import_beside_torch()

MAX_WHITESPACE = 16
"""Characters of white space in one place of a JSON answer: a small model could write nothing else for ever."""

SEPARATORS = (", ", ": ")
"""Of a compact JSON text: as Python writes it, and as the other servers' backends have it."""

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_JSON, _TEXT = b"j", b"t"
"""Which of the two vocabularies: the first byte of what is compiled."""
JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.TAGS)


def _info(vocabulary: Vocabulary, *, for_json: bool) -> Any:
    """for_json: leave out tokens with control characters that JSON texts must not hold: xgrammar allows them in strings of a
    bounded length."""
    tokens = vocabulary.token_bytes
    return xgrammar.TokenizerInfo(
        [b"" if for_json and _CONTROL.search(token) else token for token in tokens],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.end_token_ids),
    )


class XgrammarCompiler:
    """Lives in the compiling process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compilers = {
            mark: xgrammar.GrammarCompiler(
                _info(vocabulary, for_json=mark == _JSON), max_threads=1, cache_enabled=False
            )
            for mark in (_JSON, _TEXT)
        }

    def compile(self, grammar: Grammar) -> bytes:
        """Raises: InvalidRequestError naming `grammar`, with the library's reason."""
        mark = _JSON if grammar.kind in JSON_KINDS else _TEXT
        try:
            compiled = _compile(self._compilers[mark], grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"grammar: {reason(str(error))}", param="grammar") from error
        return mark + str(compiled.serialize_json()).encode()


def _compile(compiler: Any, grammar: Grammar) -> Any:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return compiler.compile_json_schema(source, **_json_options(grammar))
        case GrammarKind.REGEX:
            return compiler.compile_regex(source)
        case GrammarKind.CHOICE:
            rules = " | ".join(_literal(text) for text in choices_of(source))
            return compiler.compile_grammar(f"root ::= {rules}")
        case GrammarKind.EBNF:
            if "::=" in source:
                return compiler.compile_grammar(source)
            return compiler.compile_lark(source)
        case GrammarKind.TAGS:
            tags = Tags.load(source)
            shown = json.dumps(_structural_tag(tags))
            if not tags.instead:
                return compiler.compile_structural_tag(shown)
            plain = xgrammar.Grammar.from_json_schema(tags.instead, **_json_options(grammar))
            return compiler.compile_grammar(xgrammar.Grammar.union(plain, xgrammar.Grammar.from_structural_tag(shown)))


def _json_options(grammar: Grammar) -> dict[str, Any]:
    if grammar.compact:
        return {"any_whitespace": False, "separators": SEPARATORS, "strict_mode": False}
    return {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE, "strict_mode": False}


class XgrammarProgram:
    """Args: clock: seconds of the calling thread, for giving up what is too slow."""

    def __init__(self, compiled: Any, clock: Callable[[], float] = time.thread_time) -> None:
        self._compiled = compiled
        self._clock = clock
        self.size_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        num_words = mask_words(self._compiled.tokenizer_info.vocab_size)
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), num_words, self._clock)


class _Matcher:
    def __init__(self, matcher: Any, num_words: int, clock: Callable[[], float]) -> None:
        self._matcher = matcher
        self.num_words = num_words
        self._clock = clock
        self.slow = False

    def accept(self, token_id: int) -> bool:
        began = self._clock()
        allowed = bool(self._matcher.accept_token(token_id))
        self.slow |= self._clock() - began > SLOW_S
        return allowed

    def fill(self, mask: Mask) -> None:
        if self._matcher.is_terminated():
            mask[:] = 0
            return
        began = self._clock()
        if not self._matcher.fill_next_token_bitmask(mask.reshape(1, -1)):
            mask[:] = -1
        self.slow |= self._clock() - began > SLOW_S


class XgrammarLoader:
    """Lives in the worker: makes programs of what the compiling process sends."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._infos = {mark: _info(vocabulary, for_json=mark == _JSON) for mark in (_JSON, _TEXT)}

    def load(self, compiled: bytes) -> Program:
        info = self._infos[compiled[:1]]
        return XgrammarProgram(xgrammar.CompiledGrammar.deserialize_json(compiled[1:].decode(), info))


def reason(text: str) -> str:
    """The library's own words, without its time stamps and file names."""
    line = next((line for line in text.splitlines() if line.strip()), "not understood")
    return line.split("] ", 1)[-1].split(".cc:", 1)[-1].split(": ", 1)[-1][:300] if ".cc:" in line else line[:300]


def _literal(text: str) -> str:
    """A text in EBNF."""
    out = []
    for char in text:
        if char in '"\\':
            out.append("\\" + char)
        elif char.isprintable():
            out.append(char)
        else:
            out.append(f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")
    return '"' + "".join(out) + '"'


def _structural_tag(tags: Tags) -> dict[str, Any]:
    shown = [
        {
            "type": "tag",
            "begin": tag.begin,
            "content": {
                "type": "json_schema",
                "json_schema": json.loads(tag.schema),
                "max_whitespace_cnt": MAX_WHITESPACE,
            },
            "end": tag.end,
        }
        for tag in tags.tags
    ]
    body: dict[str, Any]
    if tags.trigger:
        body = {
            "type": "triggered_tags",
            "triggers": [tags.trigger],
            "tags": shown,
            "stop_after_first": not tags.several,
        }
    else:
        body = {
            "type": "tags_with_separator",
            "tags": shown,
            "separator": tags.separator,
            "at_least_one": True,
            "stop_after_first": not tags.several,
        }
    parts = [_text(tags.head), body, _text(tags.tail)]
    elements = [part for part in parts if part is not None]
    return {
        "type": "structural_tag",
        "format": body if len(elements) == 1 else {"type": "sequence", "elements": elements},
    }


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": text} if text else None
