"""xgrammar and llguidance behind one interface: the same texts fit and the same do not; and the compiling process."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tags
from diptych.engine.grammar import llguidance_backend, xgrammar_backend
from diptych.engine.grammar.backends import Compilers, Loaders
from diptych.engine.grammar.program import Program, allowed_ids, mask_words
from diptych.engine.grammar.vocabulary import Vocabulary
from diptych.router.tools.choice_grammar import Function, calls_or_json, required_calls, strict_calls
from diptych.router.tools.pieces import CallArguments, CallStart, Content
from diptych.router.tools.registry import FORMS, tool_factory

EOS = 256
WORDS = (b"name", b'{"', b'": ', b"tool_call", b" \t", b"\x00\x01", "日本".encode())
TOKENS = (*(bytes([byte]) for byte in range(256)), b"", *WORDS)


def encode(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        word = next((w for w in WORDS if data.startswith(w)), data[:1])
        ids.append(TOKENS.index(word))
        data = data[len(word) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, (EOS,), encode)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request):
    if request.param == "xgrammar":
        return (
            xgrammar_backend.XgrammarCompiler(VOCABULARY),
            xgrammar_backend.XgrammarLoader(VOCABULARY),
        )
    return llguidance_backend.LlguidanceCompiler(VOCABULARY), llguidance_backend.LlguidanceLoader(VOCABULARY)


def fits(program: Program, text: str, *, forced: bool = True) -> bool:
    """Whether the text may be generated token by token and then end. `forced`: forced text uses its canonical tokens."""
    matcher = program.matcher()
    mask = np.zeros(mask_words(VOCABULARY.size), dtype=np.int32)
    for token in encode(text):
        matcher.fill(mask)
        allowed = token in allowed_ids(mask, VOCABULARY.size)
        # llguidance requires the tokenizer's own tokens for forced text, as here
        if allowed or forced:
            assert matcher.accept(token) is allowed
        if not allowed:
            return False
    matcher.fill(mask)
    return EOS in allowed_ids(mask, VOCABULARY.size)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "日本"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES = [
    (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
     ['{"name": "Joe", "age": 7}', '{"name":"é😀","age":120,"tags":["日本","a"]}', '{"name": "", "age": 0, "tags": []}'],
     ['{"name": "Joe"}', '{"name": "Joe", "age": 121}', '{"name": "Joe", "age": 7', '{"name": "\x00\x01", "age": 7}',
      '{"name": "toolong", "age": 7}', '[]', ""]),
    (Grammar(GrammarKind.REGEX, r"[a-z]+@(x|yy)\.com"), ["joe@x.com", "a@yy.com"], ["joe@z.com", "joe@x.comm", "@x.com"]),
    (Grammar(GrammarKind.CHOICE, json.dumps(['say "hi"\n', "日本", "no"])), ['say "hi"\n', "日本", "no"], ["n", "none", "日"]),
    (Grammar(GrammarKind.EBNF, 'root ::= "a" rest\nrest ::= [0-9]+ | "(" root ")"'), ["a1", "a(a(a12))"], ["a", "a(a1", "b"]),
    (Grammar(GrammarKind.EBNF, 'start: "a" DIGITS\nDIGITS: /[0-9]{2}/'), ["a12"], ["a1", "a123"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("grammar", "good", "bad"), CASES, ids=lambda case: getattr(case, "kind", None) and case.kind.value
)
def test_the_same_texts_fit(backend, grammar, good, bad) -> None:
    compiler, loader = backend
    program = loader.load(compiler.compile(grammar))
    assert [text for text in good if not fits(program, text)] == []
    assert [text for text in bad if fits(program, text)] == []


FUNCTIONS = [Function("f", PERSON), Function("g", None)]
CALLS = [("g", "{}"), ("f", '{"name": "Joe", "age": 7}')]


@pytest.mark.parametrize("name", list(FORMS))
def test_promised_calls_are_what_the_parser_reads(backend, name) -> None:
    compiler, loader = backend
    form = FORMS[name]
    program = loader.load(compiler.compile(required_calls(form, FUNCTIONS, several=True)))
    one = loader.load(compiler.compile(required_calls(form, FUNCTIONS, several=False)))

    def written(calls) -> str:
        shown = form.separator.join(form.begin.replace("NAME", n) + arguments + form.end for n, arguments in calls)
        return form.head + shown + form.tail

    both = written(CALLS)
    assert fits(program, both)
    assert fits(program, written(CALLS[:1]))
    assert not fits(one, both)
    assert fits(one, written(CALLS[1:]))
    assert not fits(program, written([("f", "{}")]))
    assert not fits(program, written([("h", "{}")]))
    assert not fits(program, "Hello")
    # A model that has begun to write white space must get out of it again.
    assert fits(program, written([("f", '{"name":' + "\n" * 16 + '"Joe", "age": 7}')]))
    assert not fits(program, written([("f", '{"name":' + "\n" * 17 + '"Joe", "age": 7}')]))
    parser = tool_factory(name)({"f", "g"}, lambda: "id")
    pieces = [*parser.feed(both), *parser.end()]
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = [
        "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == i) for i in range(len(names))
    ]
    assert list(zip(names, arguments, strict=True)) == CALLS
    assert not [piece for piece in pieces if isinstance(piece, Content) and piece.text.strip()]


def test_300_optional_properties_compile_at_once() -> None:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(300)},
        "additionalProperties": False,
    }
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    compiled = Compilers("auto", VOCABULARY).compile(grammar)
    assert len(compiled) < 64 * 1024  # not multiplied: xgrammar makes 50 MB of it
    program = Loaders(lambda: VOCABULARY).load(compiled)
    assert fits(program, '{"p3": 1, "p299": 2}')
    assert not fits(program, '{"p300": 1}', forced=False)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("compact", [False, True])
def test_tools_with_a_format(backend, name, compact) -> None:
    """Calls that fit their schemas, or JSON that fits the format, and nothing else; also when its matcher is rebuilt from the
    tokens so far, as after a hand-off or a preemption."""
    compiler, loader = backend
    form = FORMS[name]
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    wanted = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(place), compact=compact)
    both = calls_or_json(form, FUNCTIONS, wanted, several=True)
    if name == "llama3-json" and isinstance(compiler, llguidance_backend.LlguidanceCompiler):
        with pytest.raises(InvalidRequestError, match="need the xgrammar backend"):
            compiler.compile(both)
        return
    program = loader.load(compiler.compile(both))

    def written(*calls: tuple[str, str]) -> str:
        shown = form.separator.join(form.begin.replace("NAME", n) + arguments + form.end for n, arguments in calls)
        return form.head + shown + form.tail

    good = ['{"city": "Paris"}', written(CALLS[1]), written(*CALLS)]
    for text in good:
        assert fits(program, text), text
    for text in (
        '{"town": 1}',
        "Hello",
        "",
        written(("f", "{}")),
        written(("h", "{}")),
        good[0] + good[1],
        good[1] + good[0],
    ):
        assert not fits(program, text), text
    assert fits(program, '{ "city" : "Paris"}', forced=False) is not compact
    for text in good:
        ids, live = encode(text), program.matcher()
        for count, token in enumerate(ids):
            rebuilt = program.matcher()
            assert all(rebuilt.accept(one) for one in ids[:count])
            masks = [np.zeros(mask_words(VOCABULARY.size), dtype=np.int32) for _ in range(2)]
            live.fill(masks[0])
            rebuilt.fill(masks[1])
            assert (masks[0] == masks[1]).all()
            assert live.accept(token)


def test_compact_json_has_one_space_where_there_is_one(backend) -> None:
    compiler, loader = backend
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON), compact=True)
    program = loader.load(compiler.compile(grammar))
    value = {"name": "Joe", "age": 7, "tags": ["a", "日本"]}
    text = json.dumps(value, ensure_ascii=False)
    assert fits(program, text)
    for other in (json.dumps(value, ensure_ascii=False, indent=1), text.replace(": ", ":"), text + " ", " " + text):
        assert not fits(program, other, forced=False), other


def test_strict_arguments_in_a_free_answer() -> None:
    compiler, loader = xgrammar_backend.XgrammarCompiler(VOCABULARY), xgrammar_backend.XgrammarLoader(VOCABULARY)
    grammar = strict_calls(FORMS["hermes"], [replace(FUNCTIONS[0], strict=True), FUNCTIONS[1]], several=True)
    assert grammar is not None
    assert Tags.load(grammar.source).trigger == "<tool_call>"
    program = loader.load(compiler.compile(grammar))
    call = '<tool_call>\n{"name": "f", "arguments": {"name": "Joe", "age": 7}}\n</tool_call>'
    for text in ("Hello <b>", "", f"Well. {call}", call + call):
        assert fits(program, text), text
    assert not fits(program, call.replace("7", "700"))
    assert strict_calls(FORMS["hermes"], FUNCTIONS, several=True) is None


BROKEN = [
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nothing"}'),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}'),
    Grammar(GrammarKind.JSON_SCHEMA, "{"),
    Grammar(GrammarKind.REGEX, "(a"),
    Grammar(GrammarKind.EBNF, 'root ::= "a" nowhere'),
    Grammar(GrammarKind.EBNF, "???"),
    Grammar(GrammarKind.CHOICE, "{}"),
    Grammar(GrammarKind.TAGS, "{}"),
]


@pytest.mark.parametrize("grammar", BROKEN, ids=lambda grammar: grammar.source)
def test_what_is_broken_is_refused_in_words(backend, grammar) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        backend[0].compile(grammar)
    assert caught.value.param == "grammar"
    assert caught.value.message.startswith("grammar: ")
    assert ".cc:" not in caught.value.message


@pytest.mark.parametrize("computes", [True, False])
def test_only_what_computes_too_long_is_too_slow(backend, computes, monkeypatch) -> None:
    """A thread that stands still, because others have the cores, is not."""
    compiler, loader = backend
    for module in (xgrammar_backend, llguidance_backend):
        monkeypatch.setattr(module, "SLOW_S", 0.02)
    matcher = loader.load(compiler.compile(Grammar(GrammarKind.REGEX, "(ab)*"))).matcher()
    inner, clock = matcher._matcher, time.thread_time if computes else time.perf_counter
    library_accepts = getattr(inner, "accept_token", None) or inner.consume_token

    def accept(token: int) -> bool:
        until = clock() + 0.04
        while (left := until - clock()) > 0:
            if not computes:
                threading.Event().wait(left)
        return library_accepts(token)

    matcher._matcher = SimpleNamespace(accept_token=accept, consume_token=accept)
    assert matcher.accept(encode("a")[0])
    assert matcher.slow is computes


def test_18_3_a_grammar_finds_libraries_and_vocabulary_of_every_backend_there():
    asked = []

    def vocabulary() -> Vocabulary:
        asked.append(1)
        return VOCABULARY

    loaders = Loaders(vocabulary)
    loaders.warm_up("auto")
    assert asked == [1]
    for name in ("xgrammar", "llguidance"):
        compiled = Compilers(name, VOCABULARY).compile(Grammar(GrammarKind.CHOICE, '["a", "b"]'))
        assert fits(loaders.load(compiled), "a")
    assert asked == [1]
