"""Upper bound of a token's bytes of text: never too low."""

from __future__ import annotations

import copy
import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from diptych.common.errors import PromptTooLongError
from diptych.common.text.tokenizer import TextLimit
from diptych.router.preprocess.text_bound import TextBound, read_text_bound, text_bound

_PIECES = ["a", " ", "\n", "é", "日本", "\U0001f600", "0", "  ", "ab" * 40, "e\u0301", "\u212b", "<end>", "\t"]


def byte_level(*more: str, normalizer: object = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *more])}
    merges = [(half, rest) for half, rest in (("a", "b"), ("ab", "ab"), ("abab", "abab")) if half + rest in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "\u2581", "a", "b", "ab", "\u2581ab"]
    merges = [("a", "b"), ("\u2581", "ab")]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


SOUND = {
    "byte level": (byte_level(), 5),
    "byte level with merges": (byte_level("ab", "abab", "abababab"), 8),
    "byte level, composed": (byte_level("ab", "abab", "abababab", normalizer=normalizers.NFC()), 72),
    "byte fallback": (byte_fallback(), 6),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_text_has_fewer_tokens(name: str, tmp_path) -> None:
    tokenizer, expected = SOUND[name]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    bound = read_text_bound(tmp_path)
    assert bound == TextBound(expected)
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices(_PIECES, k=rng.randrange(1, 30)))
        bound.limit(len(tokenizer.encode(text).ids)).check(text.encode(), "prompt")


def changed(**parts: object) -> dict:
    whole = json.loads(byte_level("ab").to_str())
    for path, value in parts.items():
        at = whole
        *names, last = path.split("__")
        for name in names:
            at = at[int(name) if name.isdecimal() else name]
        at[last] = value
    return whole


@pytest.mark.parametrize(
    "whole",
    [
        changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(normalizer={"type": "NFKC"}),
        changed(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
        changed(normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}),
        changed(pre_tokenizer={"type": "Whitespace"}),
        changed(pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
        changed(pre_tokenizer=None),
        changed(added_tokens__0__lstrip=True),
        changed(added_tokens__0__rstrip=True),
        changed(model__vocab={"a": 0}),
        changed(model__type="WordPiece"),
        changed(model__type="Unigram", model__vocab=[["a", 0.0]]),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(whole: dict) -> None:
    assert text_bound(whole) is None


def test_a_long_added_token_counts() -> None:
    whole = copy.deepcopy(changed())
    whole["added_tokens"][0]["content"] = "日" * 50
    assert text_bound(whole) == TextBound(150)


def test_bytes_that_vanish_do_not_count() -> None:
    """A vocabulary made of text alone spells no byte that the text had not."""
    whole = changed()
    del whole["model"]["vocab"]["\u0104"]  # byte 0x04
    bound = text_bound(whole)
    assert bound == TextBound(5, b"\x04")
    text = "\x04" * 1000 + "a"
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    assert len(tokenizer.encode(text).ids) == 1
    bound.limit(1).check(text.encode(), "prompt")
    with pytest.raises(PromptTooLongError, match="6 bytes of text; more than 5"):
        bound.limit(1).check(text.encode() + b"b" * 5, "prompt")


def test_a_text_of_its_own_limit_passes() -> None:
    TextLimit(4).check(b"abcd", "prompt")
    with pytest.raises(PromptTooLongError):
        TextLimit(4).check(b"abcde", "prompt")
