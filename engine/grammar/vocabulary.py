"""What a grammar's library must know of a tokenizer: the bytes of every token, and which tokens end an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.text.token_bytes import TokenBytes
from diptych.common.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Args:
    token_bytes: by token id, [vocab_size]; empty: a special token or a hole, which no grammar ever allows.
    end_token_ids: ascending; drawn when the grammar's text is complete.
    encode: text to token ids, no special ones added.
    """

    token_bytes: tuple[bytes, ...]
    end_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def size(self) -> int:
        return len(self.token_bytes)


def vocabulary_of(tokenizer: ModelTokenizer) -> Vocabulary:
    tokens = TokenBytes(tokenizer)
    special = tokenizer.special_token_ids
    table = tuple(b"" if i in special else tokens.of(i) for i in range(tokenizer.vocab_size))
    return Vocabulary(table, tokenizer.eos_token_ids, lambda text: tokenizer.encode(text, False))
