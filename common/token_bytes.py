"""What a single token stands for, as bytes: for logprobs, where a token may be half a character."""

from __future__ import annotations

import re

from diptych.common.detokenizer import byte_table
from diptych.common.tokenizer import ModelTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"


class TokenBytes:
    """Bytes of every token of one tokenizer. A special token stands for its own name."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer.raw)

    def of(self, token_id: int) -> bytes:
        """Empty for an id that is no token."""
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
