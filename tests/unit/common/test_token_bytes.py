"""Bytes of single tokens, joined, are the bytes of the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common.token_bytes import TokenBytes
from diptych.common.tokenizer import ModelTokenizer

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
