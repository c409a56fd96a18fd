"""Upper bound of the bytes of text per token, from tokenizer.json. Pure.

A text of more than this many bytes per token of context cannot fit and is rejected by its length, before seconds are
spent on tokenizing it. The bound must never be too low, so it exists only for tokenizers that drop nothing but what is
counted here: byte-level BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.common.text.tokenizer import TextLimit

_NFC_SHRINKS = 9
"""UTF-8 bytes of a text over those of its NFC form: at most 3 for canonical decomposition, times 3 for composition."""
_MOST_DROPPED = 64
"""Most dropped byte values. Vocabularies made from text lack those that never occur in UTF-8, and some rare ones."""
_KEEPS_ALL = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that only split or add."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """The bound. `bytes_per_token`: most bytes of text. `dropped`: byte values without a token: they vanish from a
    text, and do not count."""

    bytes_per_token: int
    dropped: bytes = b""

    def limit(self, num_tokens: int) -> TextLimit:
        """The limit of a text for this many tokens."""
        return TextLimit(self.bytes_per_token * num_tokens, self.dropped)


def read_text_bound(folder: Path) -> TextBound | None:
    """None: the bound is unknown. The folder's tokenizer.json must have been read by the tokenizers library."""
    return text_bound(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))


def text_bound(tokenizer: Mapping[str, Any]) -> TextBound | None:
    """See read_text_bound. `tokenizer`: the content of tokenizer.json."""
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab")
    cuts = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    shrinks = _shrinks(tokenizer.get("normalizer"))
    added = tokenizer.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, Mapping) or not vocabulary or not shrinks:
        return None
    if not all(_keeps(cut) for cut in cuts) or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if any(cut.get("type") == "ByteLevel" for cut in cuts):
        dropped = bytes(byte for byte, character in enumerate(_byte_characters()) if character not in vocabulary)
        if len(dropped) > _MOST_DROPPED or (dropped and (shrinks > 1 or model.get("unk_token"))):
            return None
        longest = max(map(len, vocabulary))  # a character stands for a byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        dropped = b""
        longest = max(len(token.encode("utf-8", "surrogatepass")) for token in vocabulary)
    else:
        return None
    of_added = (len(str(token.get("content", "")).encode("utf-8", "surrogatepass")) for token in added)
    return TextBound(shrinks * max(longest, *of_added, 1), dropped)


def _parts(step: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or the single step."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [part for inner in step.get(name) or [] for part in _parts(inner, name)]
    return [step]


def _keeps(cut: Mapping[str, Any]) -> bool:
    kind = cut.get("type")
    return kind in _KEEPS_ALL or (kind in ("Split", "Punctuation") and cut.get("behavior", "Isolated") != "Removed")


def _shrinks(normalizer: Any) -> int:
    """How many times shorter the normalizer can make a text; 0: unknown."""
    factor = 1
    for step in _parts(normalizer, "normalizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "NFC":
            factor *= _NFC_SHRINKS
        elif kind == "Replace" and isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str):
            if len(str(step.get("content", "")).encode()) < len(pattern["String"].encode()):
                return 0
        elif kind != "Prepend":
            return 0
    return factor


def _byte_characters() -> list[str]:
    """Characters of the 256 bytes in byte-level vocabularies: printable ones map to themselves, the others to U+0100
    and following."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(rest)) for byte in range(256)]
