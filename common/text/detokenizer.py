"""Incremental detokenization, and stop strings in the text. Pure: no I/O, no clock.

`IncrementalDetokenizer` returns text that no later token can change: all pieces and the flush, joined, equal byte for
byte what decoding the output adds to the decoded prompt. `StopChecker` cuts that text at a stop string.
`RequestDetokenizer` combines the two.

The winning stop string does not depend on how the text was cut into tokens. Text is read character by character, and
the first stop string to be *complete* wins; of several that end at the same character the longest, which starts
earliest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer, decoders

from diptych.common.text.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"
_LOOK_BACK = 64
"""Tokens of a prompt among which one with text is looked for."""


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Text of one output, without special tokens. The first one of a tokenizer builds a table (tens of milliseconds).

    Args:
        prompt: tokens that the output follows: SentencePiece cuts a leading space at the beginning of a text only.
    """

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int] = ()) -> None:
        table = byte_table(tokenizer.raw)
        self._decoder: _Decoder = _WindowDecoder(tokenizer, prompt) if table is None else _ByteLevelDecoder(table)

    def push(self, token_id: int) -> str:
        """The text completed by this token; "" while a character is incomplete."""
        return self._decoder.push(token_id)

    def flush(self) -> str:
        """The rest, at the end of the output; call it last."""
        return self._decoder.flush()


# ---- byte-level BPE (Llama 3, Qwen, SmolLM2): a token is a few bytes ----


class _ByteLevelDecoder:
    """Bytes in, UTF-8 out: constant work a token; only an incomplete character is held back."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._table[token_id] if token_id < len(self._table) else b"")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 maps to itself, the other bytes to U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=8)
def byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """Bytes of every token id, b"" for special tokens and unused ids; None when the decoder is not plain byte level."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    alphabet = _byte_of_char()
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for token, i in vocab.items():
        if i in special:
            continue
        try:
            table[i] = bytes(alphabet[char] for char in token)
        except KeyError:  # an added token outside the alphabet is its literal text
            table[i] = token.encode()
    return table


# ---- any other decoder (Llama 2, Mistral: SentencePiece with byte fallback) ----


class _WindowDecoder:
    """Decodes a window of tokens with the library: the last piece returned, as context, and the tokens since.

    A run of byte tokens is held until it ends: the library turns the whole run into U+FFFD if any byte of it is
    invalid.
    """

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = _byte_fallback_ids(tokenizer.raw)
        # Not a byte: the output's bytes would join its run.
        last = (token_id for token_id in reversed(prompt[-_LOOK_BACK:]) if token_id not in self._byte_ids)
        self._ids = [token_id for token_id in last if self._has_text(token_id)][:1]
        self._context = len(self._ids)  # leading ids of the window whose text was returned
        self._context_text = self._tokenizer.decode(self._ids)

    def _has_text(self, token_id: int) -> bool:
        return (
            token_id not in self._tokenizer.special_token_ids and self._tokenizer.raw.id_to_token(token_id) is not None
        )

    def push(self, token_id: int) -> str:
        # A token without text is not added to the window: it would split a run of bytes, or stand where a leading space
        # is cut.
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        if not self._byte_ids and text.endswith(_REPLACEMENT):
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        return self._give_out(self._tokenizer.decode(self._ids))

    def _give_out(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new or not self._context:
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._context_text = self._tokenizer.decode(self._ids)
        return new


@lru_cache(maxsize=8)
def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in found if i is not None)


# ---- stop strings ----


class StopChecker:
    """Cuts a stream of text before the first stop string (rule at the top of the file). `stops`: non-empty strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns: text that can be sent now, and the stop string that ended it, if any.

        A possible beginning of a stop string is held back; the stop string and what follows it are never returned.
        """
        if self._hit is not None:
            raise RuntimeError(f"text after the stop string {self._hit!r}")
        if not self._stops or not text:
            return text, None
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self._hit = min(hits)
            self._held = ""
            return text[:at], self._hit
        for n in range(min(self._max_held, len(text)), 0, -1):
            if text[-n:] in self._prefixes:
                self._held = text[-n:]
                return text[:-n], None
        self._held = ""
        return text, None

    def flush(self) -> str:
        """The held-back text, when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held


# ---- both ----


@dataclass(frozen=True, slots=True)
class TextPiece:
    """`text` may be sent; `stop` is the stop string that ended the output right after it, if any."""

    text: str
    stop: str | None = None


class RequestDetokenizer:
    """Text of one request's output. Push nothing after a piece with a stop string.

    A resumed request pushes the tokens sent before and discards their text. This restores held-back characters and half
    a stop string.
    """

    def __init__(self, tokenizer: ModelTokenizer, stops: tuple[str, ...] = (), *, prompt: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        self._stops = StopChecker(stops)

    def push(self, token_id: int) -> TextPiece:
        return TextPiece(*self._stops.push(self._detokenizer.push(token_id)))

    def finish(self) -> TextPiece:
        """The held-back text, at an end for another reason than a stop string. It can complete a stop string."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return TextPiece(text, stop) if stop is not None else TextPiece(text + self._stops.flush())
