"""The compiling process; compiler.py starts it.

    python -m diptych.engine.grammar.process BACKEND MODEL_FOLDER MEMORY_BYTES SECONDS [whole]

whole: import xgrammar with all that it imports. Without it only what compiles is imported; where that fails, the process
becomes this program again with `whole`.

Compiling is the part of structured output that can take for ever or eat all memory; here it can be killed. Frames on stdin
and stdout are a length (4 bytes, big endian) and so many bytes. First a READY frame goes out; then each frame in, JSON of a
grammar, is answered by BEGAN and by one that begins with + (what was compiled) or - (why not).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.grammar.backends import Compilers
from diptych.engine.grammar.vocabulary import vocabulary_of
from diptych.engine.grammar.xgrammar_alone import import_alone

READY, BEGAN = b"READY", b"BEGAN"

_WHOLE = "whole"


def main(backend: str, model: str, memory_bytes: int, most_s: int, imports: str = "") -> None:
    if backend != "llguidance" and imports != _WHOLE:
        try:
            import_alone()
        except (ImportError, AttributeError) as error:
            print(f"xgrammar is imported with torch, it cannot be without: {error}", file=sys.stderr, flush=True)
            os.execv(sys.executable, [*sys.orig_argv, _WHOLE])  # noqa: S606 - this program, once more
    out = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # libraries print; ours is the only word on stdout
    compilers = Compilers(backend, vocabulary_of(ModelTokenizer(model, chat=False)))
    compilers.warm_up()
    os.dup2(quiet, 2)  # and they print pieces of the grammar, which may be private
    limit = _address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(out, READY)
    while (frame := _read(sys.stdin.buffer)) is not None:
        _write(out, BEGAN)
        # Of CPU time. The parent kills us earlier; this is for a parent that is gone.
        signal.setitimer(signal.ITIMER_PROF, most_s)
        answer = _answer(compilers, frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(out, answer)


def _answer(compilers: Compilers, frame: bytes) -> bytes:
    values = json.loads(frame)
    try:
        grammar = Grammar(GrammarKind(values["kind"]), values["source"], compact=values["compact"])
        return b"+" + compilers.compile(grammar)
    except InvalidRequestError as error:
        return b"-" + error.message.encode("utf-8", "replace")
    except MemoryError:
        return b"-grammar: compiling it takes too much memory"


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack(">I", head)
    body = source.read(size)
    return body if len(body) == size else None


def _write(out: BinaryIO, frame: bytes) -> None:
    out.write(struct.pack(">I", len(frame)) + frame)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
