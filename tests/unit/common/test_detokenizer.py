from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from diptych.common.text.detokenizer import IncrementalDetokenizer, RequestDetokenizer, StopChecker
from diptych.common.text.tokenizer import ModelTokenizer

REPLACEMENT = "\ufffd"
TEXTS = [
    "plain words",
    "你好，世界！こんにちは 안녕",
    "🙂👩‍👩‍👧‍👦🎉",
    "a\ufffdb\ufffd\ufffd",
    "tab\tand  spaces ",
    "\x00\x7f é",
]


@pytest.fixture(scope="module", params=["byte_level_model", "sentencepiece_model"])
def tokenizer(request: pytest.FixtureRequest) -> ModelTokenizer:
    return ModelTokenizer(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def byte_level(byte_level_model: Path) -> ModelTokenizer:
    return ModelTokenizer(byte_level_model)


def stream(tokenizer: ModelTokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or ())
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_joined_stream_equals_the_full_decode_for_any_tokens(
    tokenizer: ModelTokenizer, data: st.DataObject
) -> None:
    any_id = st.integers(0, tokenizer.vocab_size + 3)  # a padded vocabulary has ids without a token
    few = st.sampled_from([0, 2, 3, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0x41, 3 + 0xF0, 259, 260, 264, 266, 271])
    ids = data.draw(st.lists(st.one_of(any_id, few), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_8_the_stream_is_what_the_output_adds_to_the_prompt(tokenizer: ModelTokenizer, data: st.DataObject) -> None:
    some_id = st.integers(0, tokenizer.vocab_size + 3)
    byte_ids = {tokenizer.raw.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    prompt = data.draw(st.lists(some_id.filter(lambda i: i not in byte_ids), max_size=5))
    ids = data.draw(st.lists(some_id, max_size=10))
    if isinstance(tokenizer.raw.decoder, decoders.ByteLevel):  # there a prompt may end within a character
        prompt = tokenizer.encode("the a")
    before = tokenizer.decode(prompt)
    assert before + "".join(stream(tokenizer, ids, prompt)) == tokenizer.decode([*prompt, *ids])


def test_8_the_first_words_space_is_there_after_a_prompt_and_not_at_the_beginning(sentencepiece_model: Path) -> None:
    tokenizer = ModelTokenizer(sentencepiece_model)
    ids = tokenizer.encode("the a", add_special_tokens=False)
    prompt = tokenizer.encode("the")
    assert "".join(stream(tokenizer, ids, prompt)) == " the a"
    assert "".join(stream(tokenizer, ids, [*prompt, tokenizer.eos_token_ids[0]])) == " the a"
    assert "".join(stream(tokenizer, ids, [1])) == "the a"  # nothing but a special token before it
    detokenizer = RequestDetokenizer(tokenizer, (" a",), prompt=prompt)
    pieces = [detokenizer.push(i) for i in ids]
    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == (" the", " a")


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=30))
def test_text_survives_streaming(byte_level: ModelTokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_a_broken_character(tokenizer: ModelTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


def test_a_character_comes_out_with_its_last_token(byte_level: ModelTokenizer) -> None:
    table = {bytes([b]): byte_level.raw.token_to_id(c) for b, c in zip(b"\xe9\xbe\x98", "é¾ĺ", strict=True)}
    ids = [table[bytes([b])] for b in "龘".encode()]
    assert stream(byte_level, ids) == ["", "", "龘", ""]
    assert stream(byte_level, ids[:2]) == ["", "", REPLACEMENT]
    assert stream(byte_level, [*ids[:2], *ids]) == ["", "", REPLACEMENT, "", "龘", ""]


def test_special_tokens_are_left_out_and_do_not_disturb(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("the a", add_special_tokens=False)
    with_special = [1, ids[0], 2, 0, *ids[1:], 2]
    assert "".join(stream(tokenizer, with_special)) == tokenizer.decode(with_special)


def test_a_run_of_byte_tokens_waits_for_its_end(sentencepiece_model: Path) -> None:
    tokenizer = ModelTokenizer(sentencepiece_model)
    e4, bd, a0, ff, word = 3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0xFF, 261
    assert stream(tokenizer, [word, e4, bd, a0, word]) == ["the", "", "", "", "你the", ""]
    assert stream(tokenizer, [word, e4, bd, a0, ff, word])[-2] == 4 * REPLACEMENT + "the"


# ---- stop strings ----


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    checker, out = StopChecker(stops), []
    for piece in pieces:
        text, hit = checker.push(piece)
        out.append(text)
        if hit is not None:
            return "".join(out), hit
    return "".join([*out, checker.flush()]), None


def by_definition(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None, max_examples=100)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_cut_is_the_definition_whatever_the_pieces(stops: tuple[str, ...], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_definition(stops, "".join(pieces))


@settings(deadline=None, max_examples=100)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
)
def test_only_what_may_begin_a_stop_string_is_held(stops: tuple[str, ...], pieces: list[str]) -> None:
    checker, seen, out = StopChecker(stops), "", ""
    for piece in pieces:
        seen += piece
        text, hit = checker.push(piece)
        out += text
        if hit is not None:
            return
        held = seen[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_documented_rule() -> None:
    assert run(("abcd", "bc"), ["xabc", "d"]) == ("xa", "bc")
    assert run(("bc", "abc"), ["xabc"]) == ("x", "abc")
    assert run(("END",), ["the E", "N", "d", " EN"]) == ("the ENd EN", None)
    assert run((), ["a", "b"]) == ("ab", None)


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(("x",))
    assert checker.push("axb") == ("a", "x")
    with pytest.raises(RuntimeError, match="after the stop"):
        checker.push("c")


def test_a_request_cuts_a_stop_string_that_spans_tokens(byte_level: ModelTokenizer) -> None:
    ids = byte_level.encode("one 你好 END two")
    detokenizer = RequestDetokenizer(byte_level, ("好 END",))
    out, stop = "", None
    for token_id in ids:
        piece = detokenizer.push(token_id)
        out, stop = out + piece.text, piece.stop
        if stop:
            break
    assert (out, stop) == ("one 你", "好 END")


def test_the_end_releases_what_was_held(byte_level: ModelTokenizer) -> None:
    ids = byte_level.encode("abc 好 EN")
    detokenizer = RequestDetokenizer(byte_level, ("END",))
    out = "".join(detokenizer.push(token_id).text for token_id in ids)
    assert out == "abc 好 "
    assert detokenizer.finish().text == "EN"
    broken = RequestDetokenizer(byte_level, (REPLACEMENT,))
    assert broken.push(byte_level.encode("你")[0]).stop is None or len(byte_level.encode("你")) == 1


def test_half_a_character_at_the_end_can_complete_a_stop_string(byte_level: ModelTokenizer) -> None:
    first_byte = byte_level.raw.token_to_id("ä")  # 0xE4
    detokenizer = RequestDetokenizer(byte_level, (REPLACEMENT,))
    assert detokenizer.push(first_byte).text == ""
    piece = detokenizer.finish()
    assert (piece.text, piece.stop) == ("", REPLACEMENT)
