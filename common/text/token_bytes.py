"""The bytes of single tokens, for logprobs: a token may be half a character. And the text offset of each output token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from diptych.common.text.detokenizer import IncrementalDetokenizer, byte_table
from diptych.common.text.tokenizer import ModelTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"
_REPLACEMENT = "\ufffd"


class TextOffsets(Protocol):
    def push(self, token_id: int) -> int:
        """Character index, in the text of all pushed tokens, at which the token's text begins. A token that continues a
        character has that character's index; one without text has the index of the next character."""


class Tokens(Protocol):
    """All tokens of one tokenizer."""

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an id that is no token. A special token gives its name."""

    def is_text(self, token_id: int) -> bool:
        """False: the token adds no text to an output."""

    def offsets(self, prompt: Sequence[int] = ()) -> TextOffsets:
        """Of the tokens of one output. `prompt`: what it follows."""
        ...


class TokenBytes:
    """The tokens of a ModelTokenizer."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer.raw)

    def of(self, token_id: int) -> bytes:
        if self._table is not None and token_id < len(self._table) and self._table[token_id]:
            return self._table[token_id]
        text: str | None = self._tokenizer.raw.id_to_token(token_id)
        if text is None:
            return b""
        if self._table is None and token_id not in self._tokenizer.special_token_ids:
            if match := _BYTE.fullmatch(text):
                return bytes([int(match[1], 16)])
            text = text.replace(_WORD_START, " ")
        return text.encode()

    def is_text(self, token_id: int) -> bool:
        return token_id not in self._tokenizer.special_token_ids and bool(self.of(token_id))

    def offsets(self, prompt: Sequence[int] = ()) -> TextOffsets:
        if self._table is not None:
            return _ByteOffsets(self)
        return _WindowOffsets(self._tokenizer, self, prompt)


class ByteTokens:
    """Tokens that are plain bytes. `special`: ids that are left out of texts."""

    def __init__(self, of: Callable[[int], bytes], special: Collection[int] = ()) -> None:
        self.of = of
        self._special = special

    def is_text(self, token_id: int) -> bool:
        return token_id not in self._special and bool(self.of(token_id))

    def offsets(self, prompt: Sequence[int] = ()) -> TextOffsets:
        return _ByteOffsets(self)


class _ByteOffsets:
    """Offsets where the text is the UTF-8 of the bytes."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.text = _CharacterCount()

    def push(self, token_id: int) -> int:
        return self.text.push(self._tokens.of(token_id) if self._tokens.is_text(token_id) else b"")


class _CharacterCount:
    """Counts the characters of a byte stream."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.whole = 0

    def push(self, piece: bytes) -> int:
        """Index of the character that the piece's first byte belongs to."""
        begins, goes_on = self.whole, self._is_within()
        text = self._decode(piece[:1])
        if goes_on and _REPLACEMENT in text:
            # The preceding half character became U+FFFD: this byte does not belong to it.
            begins += len(text) - (0 if self._is_within() else 1)
        self.whole += len(text) + len(self._decode(piece[1:]))
        return begins

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        pending = self._decoder.getstate()[0]
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            # The beginning of a surrogate: the codec waits for its last byte, though UTF-8 has no surrogates.
            self._decoder.reset()
            text += 2 * _REPLACEMENT
        return text

    def _is_within(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._decoder.getstate()[0])


class _WindowOffsets:
    """Offsets of text decoded as in common/text/detokenizer.py: by the library, a run of byte tokens as a whole."""

    def __init__(self, tokenizer: ModelTokenizer, tokens: Tokens, prompt: Sequence[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        self._name = tokenizer.raw.id_to_token
        self._tokens = tokens
        self._whole = 0
        self._run = b""
        self._characters = _CharacterCount()
        """Counts the current run."""

    def push(self, token_id: int) -> int:
        text = self._detokenizer.push(token_id)
        if not self._tokens.is_text(token_id):
            return self._whole + self._characters.whole
        piece = self._tokens.of(token_id)
        if _BYTE.fullmatch(self._name(token_id) or ""):
            self._run += piece
            return self._whole + self._characters.push(piece)
        begins = self._whole + _characters_of_run(self._run)
        self._whole += len(text)
        self._run = b""
        self._characters = _CharacterCount()
        return begins


def _characters_of_run(run: bytes) -> int:
    """The library makes U+FFFD of each byte of a run that is not UTF-8."""
    try:
        return len(run.decode())
    except UnicodeDecodeError:
        return len(run)
