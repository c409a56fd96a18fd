"""Bytes of single tokens, joined, are the bytes of the text; and each token begins at its offset."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.text.detokenizer import IncrementalDetokenizer
from diptych.common.text.token_bytes import ByteTokens, TokenBytes
from diptych.common.text.tokenizer import ModelTokenizer

TEXT = "caf\u00e9 \u7a7a \U0001f30d and\nmore"


@pytest.mark.parametrize("model", ["byte_level_model", "sentencepiece_model"])
def test_joined_bytes_are_the_text(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    tokenizer = ModelTokenizer(folder)
    found = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, False)
    joined = b"".join(found.of(token) for token in ids).decode()
    assert joined.removeprefix(" ") == TEXT  # SentencePiece puts a space before the first word
    for token in tokenizer.special_token_ids:
        name = tokenizer.raw.id_to_token(token)
        assert found.of(token) == name.encode()
    assert found.of(10**6) == b""


def characters_of_bytes(data: bytes) -> list[int]:
    """For each byte the index of the character of data.decode("utf-8", "replace") that it belongs to."""
    wrong: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note_where", note)
    text = data.decode("utf-8", "note_where")
    spans, at, bad = [], 0, dict(wrong)
    for index, character in enumerate(text):
        size = bad[at] - at if at in bad else len(character.encode())
        spans += [index] * size
        at += size
    assert len(spans) == len(data)
    return spans


@given(data=st.data())
def test_offsets_in_characters_of_any_tokens(byte_level_model: Path, data: st.DataObject) -> None:
    """Issue 15, 4.9: an offset counted each token that is a part of a character as a character, and special tokens."""
    tokenizer = ModelTokenizer(byte_level_model)
    tokens = TokenBytes(tokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20))
    pieces = [tokens.of(token) if tokens.is_text(token) else b"" for token in ids]
    where = characters_of_bytes(b"".join(pieces))
    offsets = tokens.offsets()
    begins = 0
    for token, piece in zip(ids, pieces, strict=True):
        offset = offsets.push(token)
        if piece:
            assert offset == where[begins], (ids, pieces)
        begins += len(piece)


def test_offsets_of_the_bytes_of_a_surrogate() -> None:
    """The codec held ED A1 back as one character, where the text has two U+FFFD."""
    for cuts in ([b"\xed", b"\xa1", b"a"], [b"a\xed\xa1", b"\x80", b"b"], [b"\xed\xa1\x80", b"c"]):
        where = characters_of_bytes(b"".join(cuts))
        offsets = ByteTokens(lambda token, cuts=cuts: cuts[token]).offsets()
        starts = [sum(map(len, cuts[:index])) for index in range(len(cuts))]
        assert [offsets.push(index) for index in range(len(cuts))] == [where[start] for start in starts]


SAID = [
    "the a\u00e9b",
    "\u7a7a \U0001f30d\u0301 the",
    "\U0001f642\U0001f9d1\u200d\U0001f33e b",
    "e\u0301 a\u0308\u0323 ab",
]


@pytest.mark.parametrize("prompt", ["", "the"])
@pytest.mark.parametrize("text", SAID)
@pytest.mark.parametrize("model", ["byte_level_model", "sentencepiece_model"])
def test_text_from_an_offset_on_begins_with_the_token(
    model: str, text: str, prompt: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = ModelTokenizer(request.getfixturevalue(model))
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, False)
    ids = [min(tokenizer.special_token_ids), *ids[:2], max(tokenizer.special_token_ids), *ids[2:]]
    before = tokenizer.encode(prompt, False)
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    whole = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    offsets = tokens.offsets(before)
    seen = 0
    for token in ids:
        offset = offsets.push(token)
        assert offset >= seen
        seen = offset
        if tokens.is_text(token):
            piece = tokens.of(token)
            if offset == 0 and not whole.startswith(" "):
                piece = piece.removeprefix(b" ")
            begins = len(whole[:offset].encode())
            assert piece in whole.encode()[begins : begins + len(piece) + 3], (whole, token, offset)


def test_a_run_of_bytes_that_is_no_text_counts_as_the_library_writes_it(sentencepiece_model: Path) -> None:
    tokenizer = ModelTokenizer(sentencepiece_model)
    tokens = TokenBytes(tokenizer)
    ids = [
        tokenizer.raw.token_to_id(name) for name in ("a", "<0xE4>", "<0xBD>", "b", "<0xE4>", "<0xBD>", "<0xA0>", "b")
    ]
    text = tokenizer.decode(ids)
    offsets = tokens.offsets()
    found = [offsets.push(token) for token in ids]
    assert text == "a\ufffd\ufffdb\u4f60b"
    assert [text[found[i]] for i in (0, 3, 7)] == ["a", "b", "b"]
    assert found == [0, 1, 1, 3, 4, 4, 4, 5]
