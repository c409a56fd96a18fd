"""Pairs whose KV is converted."""

from __future__ import annotations

from diptych.common.compat import CONVERTS
from diptych.router.cluster.compatibility import pair_differences


def test_a_pair_that_converts_may_differ_in_how_kv_lies_and_in_nothing_else():
    prefill = {"model_revision": "a", "block_size": "16", "kv_dtype": "float32", "block_identity_golden": "00"}
    decode = {"model_revision": "a", "block_size": "32", "kv_dtype": "bfloat16", "block_identity_golden": "11"}
    assert pair_differences(prefill, decode) == [
        "block_size: prefill 16, decode 32",
        "kv_dtype: prefill float32, decode bfloat16",
    ]
    assert pair_differences(prefill, {**decode, CONVERTS: "yes"}) == []
    assert len(pair_differences({**prefill, CONVERTS: "yes"}, decode)) == 2, "it is decode that converts"
    other = pair_differences(prefill, {**decode, CONVERTS: "yes", "model_revision": "b"})
    assert other == ["model_revision: prefill a, decode b"]


def test_the_golden_key_is_named_where_no_fact_explains_it_alone():
    prefill = {"model_revision": "a", "sampler_version": "1", "block_identity_golden": "00"}
    secret = "block_identity_golden: prefill 00, decode 11"
    assert pair_differences(prefill, {**prefill, "block_identity_golden": "11"}) == [secret]
    other = {**prefill, "block_identity_golden": "11", "sampler_version": "2"}
    assert pair_differences(prefill, other) == [secret, "sampler_version: prefill 1, decode 2"]
    other = {**prefill, "block_identity_golden": "11", "model_revision": "b"}
    assert pair_differences(prefill, other) == ["model_revision: prefill a, decode b"]
