"""Which library compiles which grammar, and who loads what came of it.

What is compiled begins with one byte that names its backend; then the backend's own bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Protocol

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import MAX_PROPERTIES, Grammar, GrammarKind, Tags, count_properties
from diptych.engine.grammar.program import Program
from diptych.engine.grammar.schema_support import follows, only_xgrammar
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


MANY_PROPERTIES = 64
"""Above this llguidance is the faster one also at every token: 58 us against 158, at a vocabulary of 49,152."""
MOST_PROPERTIES = {"xgrammar": 256, "llguidance": MAX_PROPERTIES}
"""300 take xgrammar longer than the cap of 5 s, and 50 MB."""

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

    def warm_up(self, backend: str) -> None:
        """Import the libraries of `backend` ("auto": of all) and give each the vocabulary. It is seconds of Python code: in a
        process that serves, each launch of a step would wait for its turn with the interpreter.

        Raises: ImportError when a library cannot be used.
        """
        vocabulary = self._vocabulary()
        for name in _MARKS if backend == "auto" else (backend,):
            self._of(name, vocabulary)

    def load(self, compiled: bytes) -> Program:
        return self._of(_BY_MARK[compiled[:1]]).load(compiled[1:])

    def _of(self, name: str, vocabulary: Vocabulary | None = None) -> _Loader:
        with self._lock:
            if name not in self._made:
                make: Callable[[Vocabulary], _Loader] = (
                    _xgrammar().XgrammarLoader if name == "xgrammar" else _llguidance().LlguidanceLoader
                )
                self._made[name] = make(vocabulary or self._vocabulary())
            return self._made[name]


def choose(backend: str, grammar: Grammar) -> str:
    """The backend for this grammar.

    Raises: InvalidRequestError for a JSON schema that is no JSON, and for one that would take the chosen backend too long, before
        it is tried.
    """
    try:
        schemas, tags = _schemas(grammar)
        count = sum(map(count_properties, schemas))
        if backend == "auto":
            exact = all(follows(schema) for schema in schemas)
            # llguidance compiles as it goes: many properties cost it next to nothing before the first token.
            large = count > MANY_PROPERTIES and not (tags is not None and only_xgrammar(tags))
            backend = "xgrammar" if exact and not large else "llguidance"
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"grammar: not JSON: {error}", param="grammar") from None
    most = MOST_PROPERTIES[backend]
    if count > most:
        raise InvalidRequestError(
            f"grammar: {count} properties are more than the {most} that {backend} takes", param="grammar"
        )
    return backend


def _schemas(grammar: Grammar) -> tuple[list[Any], Tags | None]:
    """Parsed. Raises: ValueError, RecursionError."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return [json.loads(grammar.source)], None
    if grammar.kind is not GrammarKind.TAGS:
        return [], None
    tags = Tags.load(grammar.source)
    texts = [*(tag.schema for tag in tags.tags), *([tags.instead] if tags.instead else [])]
    return [json.loads(text) for text in texts], tags
