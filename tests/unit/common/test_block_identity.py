"""Two blocks have one identity only where everything that decides their KV is the same."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.block_identity import KEY_BYTES, BlockHasher, IdentityHeader, block_keys, golden_key

BASE = IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "adapter", b"salt")
TOKENS = list(range(40))
OTHERS = {
    "key": IdentityHeader(bytes(31) + b"\1", "model", "tokenizer", "float16", 16, "adapter", b"salt"),
    "model": IdentityHeader(bytes(32), "model2", "tokenizer", "float16", 16, "adapter", b"salt"),
    "tokenizer": IdentityHeader(bytes(32), "model", "tokenizer2", "float16", 16, "adapter", b"salt"),
    "dtype": IdentityHeader(bytes(32), "model", "tokenizer", "float32", 16, "adapter", b"salt"),
    "adapter": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "adapter2", b"salt"),
    "no adapter": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "", b"salt"),
    "salt": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "adapter", b"salt2"),
    "no salt": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "adapter"),
    # the same bytes, parted elsewhere
    "model | tokenizer": IdentityHeader(bytes(32), "modelt", "okenizer", "float16", 16, "adapter", b"salt"),
    "adapter | salt": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "adapters", b"alt"),
    "salt as adapter": IdentityHeader(bytes(32), "model", "tokenizer", "float16", 16, "salt", b"adapter"),
}
_text = st.text("ab", max_size=3)
_headers = st.builds(
    IdentityHeader,
    st.just(bytes(32)),
    _text,
    _text,
    st.sampled_from(("float16", "float32")),
    st.just(4),
    _text,
    st.binary(max_size=3),
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


@pytest.mark.parametrize(("key", "block_size"), [(bytes(31), 16), (bytes(32), 0)])
def test_a_header_that_could_not_be_told_apart_is_refused(key, block_size):
    with pytest.raises(ValueError, match="must be|not 32"):
        IdentityHeader(key, "m", "t", "float16", block_size)
