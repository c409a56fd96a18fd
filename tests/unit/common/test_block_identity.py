"""Two blocks have one identity only where everything that decides their KV is the same."""

import re
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.block_identity import (
    GOLDEN_TOKENS,
    KEY_BYTES,
    BlockHasher,
    IdentityHeader,
    block_keys,
    golden_key,
    header_of_request,
    identity_facts,
    identity_of,
)
from diptych.common.compat import Compat, as_strings, identified
from diptych.common.errors import InvalidRequestError
from diptych.common.kv_format import KvFormat, KvGroup, KvKind, full_format, windowed_format
from diptych.common.request import Prompt
from diptych.router.placement.placer import PromptBlocks

BASE = IdentityHeader(
    bytes(32), "model", "tokenizer", "float16", 16, "adapter", b"salt", "fp8", "bfloat16", "triton-1", "triton"
)
TOKENS = list(range(40))
OTHERS = {
    "key": replace(BASE, key=bytes(31) + b"\1"),
    "model": replace(BASE, model_revision="model2"),
    "tokenizer": replace(BASE, tokenizer_revision="tokenizer2"),
    "KV rule": replace(BASE, kv_rule="float32"),
    "adapter": replace(BASE, adapter="adapter2"),
    "no adapter": replace(BASE, adapter=""),
    "salt": replace(BASE, salt=b"salt2"),
    "no salt": replace(BASE, salt=b""),
    "method": replace(BASE, method="plain"),
    "compute dtype": replace(BASE, compute_dtype="float32"),
    "attention": replace(BASE, attention_version="triton-2"),
    "back end": replace(BASE, backend="torch"),
    # the same bytes, parted elsewhere
    "attention | back end": replace(BASE, attention_version="triton-1t", backend="riton"),
    "model | method": replace(BASE, model_revision="modelf", method="p8"),
    "method | dtype": replace(BASE, method="fp8b", compute_dtype="float16"),
    "adapter | tokenizer": replace(BASE, adapter="adaptert", tokenizer_revision="okenizer"),
    "tokenizer | salt": replace(BASE, tokenizer_revision="tokenizers", salt=b"alt"),
    "salt as adapter": replace(BASE, adapter="salt", salt=b"adapter"),
}
_text = st.text("ab", max_size=2)
_headers = st.builds(
    IdentityHeader,
    st.just(bytes(32)),
    _text,
    _text,
    st.sampled_from(("float16", "float32")),
    st.just(4),
    _text,
    st.binary(max_size=2),
    _text,
    _text,
    _text,
    _text,
)


@pytest.mark.parametrize(("one", "other"), list(combinations(["base", *OTHERS], 2)))
def test_any_difference_gives_other_blocks(one, other):
    headers = {"base": BASE, **OTHERS}
    assert not set(block_keys(headers[one], TOKENS)) & set(block_keys(headers[other], TOKENS))


@settings(max_examples=200, deadline=None)
@given(_headers, _headers)
def test_no_two_headers_collide(one, other):
    assert (block_keys(one, [1, 2, 3, 4]) == block_keys(other, [1, 2, 3, 4])) == (one == other)


def test_a_block_is_named_by_all_tokens_up_to_its_end():
    keys = block_keys(BASE, TOKENS)
    assert [len(key) for key in keys] == [KEY_BYTES] * 2
    assert block_keys(BASE, [*TOKENS[:16], 99, *TOKENS[17:]])[0] == keys[0]
    assert block_keys(BASE, [*TOKENS[:16], 99, *TOKENS[17:]])[1] != keys[1]
    assert block_keys(BASE, [99, *TOKENS[1:]])[1] != keys[1]
    slowly = BlockHasher(BASE)
    for token in TOKENS:
        slowly.update([token])
    assert (slowly.keys, slowly.num_tokens) == (keys, len(TOKENS))


def test_the_golden_key_is_the_same_for_every_tenant_and_not_for_every_adapter():
    assert golden_key(BASE) == golden_key(OTHERS["salt"])
    assert golden_key(BASE) != golden_key(OTHERS["adapter"])


# ---- of one request ----

BARE = replace(BASE, adapter="", salt=b"")
FRENCH, GERMAN = "0f" * 16, "a1" * 16


def test_prompts_that_differ_in_their_adapter_only_never_share_a_key():
    """Drill: both sides of the wire named blocks by the salt alone, each in its own line."""
    keys = [
        set(block_keys(header_of_request(BARE, Prompt(TOKENS, b"t", adapter)), TOKENS))
        for adapter in ("", FRENCH, GERMAN)
    ]
    assert all(not one & other for one, other in combinations(keys, 2))


def test_a_prompt_without_an_adapter_is_named_as_before():
    assert header_of_request(BARE, Prompt(TOKENS)) is BARE
    assert header_of_request(BARE, Prompt(TOKENS, b"salt")) == replace(BARE, salt=b"salt")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (Prompt((1,), adapter="klingon"), "adapter"),
        (Prompt((1,), adapter=FRENCH.upper()), "adapter"),
        (Prompt((1,), adapter=FRENCH + "0"), "adapter"),
        (Prompt((1,), media=(b"png",)), "media"),
    ],
)
def test_what_has_no_identity_is_refused_and_not_left_out(prompt, param):
    with pytest.raises(InvalidRequestError) as error:
        header_of_request(BARE, prompt)
    assert error.value.param == param
    with pytest.raises(InvalidRequestError):
        PromptBlocks(prompt).keys(BARE)


CALLERS = {"engine/sched/scheduler.py", "router/placement/placer.py"}
BY_HAND = re.compile(r"\breplace\(\s*[\w.]*(?:header|identity)\b[^)]*\b(?:salt|adapter)=|\.with_salt\(")


def test_no_other_code_makes_the_header_of_a_request():
    """So that the adapter of a request is never left out."""
    root = Path(__file__).resolve().parents[3]
    calls, by_hand = set(), []
    for room in ("client", "decode", "engine", "kvtransfer", "prefill", "router", "rpc", "worker", "common"):
        for path in sorted((root / room).rglob("*.py")):
            text, name = path.read_text(), str(path.relative_to(root))
            if name == "common/block_identity.py":
                continue
            if "header_of_request(" in text:
                calls.add(name)
            by_hand += [f"{name}: {line}" for line in text.splitlines() if BY_HAND.search(line)]
    assert (calls, by_hand) == (CALLERS, [])
    assert BY_HAND.search("own = replace(header, salt=prompt.cache_salt)")


@pytest.mark.parametrize(("key", "block_size"), [(bytes(31), 16), (bytes(32), 0)])
def test_an_ambiguous_header_is_refused(key, block_size):
    with pytest.raises(ValueError, match="must be|not 32"):
        IdentityHeader(key, "m", "t", "float16", block_size)


# ---- values, not layout ----


def test_workers_with_unequal_blocks_name_the_same_tokens_alike():
    tokens = list(range(200))
    keys = {size: block_keys(replace(BASE, block_size=size), tokens) for size in (8, 16, 24, 32)}
    at = {size: {(i + 1) * size: key for i, key in enumerate(found)} for size, found in keys.items()}
    for one, other in combinations(at, 2):
        common = at[one].keys() & at[other].keys()
        assert common
        assert all(at[one][position] == at[other][position] for position in common)
    assert len({key for found in at.values() for key in found.values()}) == len(
        {p for found in at.values() for p in found}
    )


def compat(kv: KvFormat, **changes: str) -> Compat:
    facts = {
        "model": "m", "model_revision": "r", "tokenizer_revision": "t", "compute_dtype": "float32",
        "attention_version": "a", "sampler_version": "s", "backend": "native", "method": "plain",
    }  # fmt: skip
    return Compat(kv=kv, **facts | changes)


def kv(heads: int = 2, block_size: int = 16, dtype: str = "float32", **changes: object) -> KvFormat:
    return full_format(2, heads, 4, block_size=block_size, dtype=dtype, **changes)


def test_the_layout_of_kv_is_no_part_of_its_identity():
    golden = {
        identified(compat(some), bytes(32))[1].block_identity_golden
        for some in (kv(), kv(block_size=32), kv(order="block-major-hnd"))
    }
    assert len(golden) == 1


VALUES = {
    "base": compat(kv()),
    "weights": compat(kv(), model_revision="r2"),
    "tokenizer": compat(kv(), tokenizer_revision="t2"),
    "method": compat(kv(), method="fp8"),
    "compute dtype": compat(kv(), compute_dtype="bfloat16"),
    "attention": compat(kv(), attention_version="a2"),
    "back end": compat(kv(), backend="torch"),
    "KV dtype": compat(kv(dtype="bfloat16")),
    "KV scales": compat(kv(dtype="int8", scale_dtype="float32")),
    "scale dtype": compat(kv(dtype="int8", scale_dtype="float16")),
    "no scales": compat(kv(dtype="int8")),
    "window": compat(windowed_format([0, 8], 2, 4, block_size=16, dtype="float32")),
    "another window": compat(windowed_format([0, 9], 2, 4, block_size=16, dtype="float32")),
    "window elsewhere": compat(windowed_format([8, 0], 2, 4, block_size=16, dtype="float32")),
    "dtype by layer": compat(
        KvFormat(
            (
                KvGroup(KvKind.FULL, (0,), 2, (4, 4), "float32", 16),
                KvGroup(KvKind.WINDOW, (1,), 2, (4, 4), "bfloat16", 16, window=8),
            )
        )
    ),
}


@pytest.mark.parametrize(("one", "other"), list(combinations(VALUES, 2)))
def test_workers_that_compute_other_bits_share_no_key(one, other):
    headers = [identified(VALUES[name], bytes(32))[0] for name in (one, other)]
    assert not set(block_keys(headers[0], TOKENS)) & set(block_keys(headers[1], TOKENS))


def test_every_field_of_the_header_but_the_block_size_changes_the_keys():
    for field in fields(IdentityHeader):
        if not field.init or field.name == "block_size":
            continue
        value = getattr(BASE, field.name)
        other = value[:-1] + (b"x" if isinstance(value, bytes) else "x")
        assert block_keys(replace(BASE, **{field.name: other}), TOKENS) != block_keys(BASE, TOKENS), field.name


def test_a_lease_gives_the_workers_header_back():
    for some in VALUES.values():
        header, full = identified(some, bytes(32))
        facts = as_strings(full)
        assert identity_of(bytes(32), facts, block_size=16) == header
        assert identity_facts(header).items() <= {**facts, "block_size": "16"}.items()
        for name in ("model_revision", "kv_rule", "method", "compute_dtype", "attention_version", "backend"):
            assert identity_of(bytes(32), {k: v for k, v in facts.items() if k != name}, block_size=16) is None


def test_golden_vectors():
    """The same on every machine and in every release that does not say otherwise."""
    tokens = [(7 * i + 3) % 50_000 for i in range(64)]
    header, full = identified(VALUES["base"], bytes(range(32)))
    assert [key.hex() for key in block_keys(header, tokens)[:2]] == GOLDEN[:2]
    assert block_keys(BASE, tokens)[-1].hex() == GOLDEN[2]
    assert full.block_identity_golden.hex() == GOLDEN[3]
    assert full.block_identity_golden == block_keys(replace(header, block_size=1), range(GOLDEN_TOKENS))[-1]
    assert full.kv.value_rule == "2xfull:float32"
    assert VALUES["window elsewhere"].kv.value_rule == "1xwindow-8:float32,1xfull:float32"
    assert VALUES["KV scales"].kv.value_rule == "2xfull:int8/float32-per-token-head"


# by blake3 over the parts by hand
GOLDEN = [
    "1366c43da005d2ab320323df152890b1",
    "f0fbe935f242b02b047a1284e40385f4",
    "c58d07e677b76e6d2b6fa89a3b8cd86e",
    "e03f0e5f525137a56462eafca9158cfd",
]
