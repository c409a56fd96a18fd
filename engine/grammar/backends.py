"""Which library compiles which grammar, and who loads what came of it.

What is compiled begins with one byte that names its backend; then the backend's own bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Protocol

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tags
from diptych.engine.grammar.program import Program
from diptych.engine.grammar.schema_support import follows
from diptych.engine.grammar.vocabulary import Vocabulary


class _Compiler(Protocol):
    def compile(self, grammar: Grammar) -> bytes: ...


class _Loader(Protocol):
    def load(self, compiled: bytes) -> Program: ...


def _xgrammar() -> Any:
    from diptych.engine.grammar import xgrammar_backend  # takes seconds

    return xgrammar_backend


def _llguidance() -> Any:
    from diptych.engine.grammar import llguidance_backend

    return llguidance_backend


_MARKS: dict[str, bytes] = {"xgrammar": b"x", "llguidance": b"l"}
_BY_MARK = {mark: name for name, mark in _MARKS.items()}


class Compilers:
    """Of the compiling process: each backend is imported when it is first needed."""

    def __init__(self, backend: str, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._made: dict[str, _Compiler] = {}

    def warm_up(self) -> None:
        self._of("llguidance" if self._backend == "llguidance" else "xgrammar")

    def compile(self, grammar: Grammar) -> bytes:
        """Raises: InvalidRequestError naming `grammar`."""
        name = choose(self._backend, grammar)
        return _MARKS[name] + self._of(name).compile(grammar)

    def _of(self, name: str) -> _Compiler:
        if name not in self._made:
            make: Callable[[Vocabulary], _Compiler] = (
                _xgrammar().XgrammarCompiler if name == "xgrammar" else _llguidance().LlguidanceCompiler
            )
            self._made[name] = make(self._vocabulary)
        return self._made[name]


class Loaders:
    """Of the worker, on any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._made: dict[str, _Loader] = {}
        self._lock = threading.Lock()

    def load(self, compiled: bytes) -> Program:
        return self._of(_BY_MARK[compiled[:1]]).load(compiled[1:])

    def _of(self, name: str) -> _Loader:
        with self._lock:
            if name not in self._made:
                make: Callable[[Vocabulary], _Loader] = (
                    _xgrammar().XgrammarLoader if name == "xgrammar" else _llguidance().LlguidanceLoader
                )
                self._made[name] = make(self._vocabulary())
            return self._made[name]


def choose(backend: str, grammar: Grammar) -> str:
    """The backend for this grammar. Raises: InvalidRequestError for a JSON schema that is no JSON."""
    if backend != "auto":
        return backend
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            exact = follows(json.loads(grammar.source))
        elif grammar.kind is GrammarKind.TAGS:
            tags = Tags.load(grammar.source)
            schemas = [*(tag.schema for tag in tags.tags), *([tags.instead] if tags.instead else [])]
            exact = all(follows(json.loads(schema)) for schema in schemas)
        else:
            exact = True
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"grammar: not JSON: {error}", param="grammar") from None
    return "xgrammar" if exact else "llguidance"
