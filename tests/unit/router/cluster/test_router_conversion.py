"""Pairs whose KV is converted."""

from __future__ import annotations

from diptych.common.compat import CONVERTS
from diptych.router.cluster.compatibility import pair_differences


def test_a_pair_that_converts_may_differ_in_how_kv_lies_and_in_nothing_else():
    prefill = {"model_revision": "a", "block_size": "16", "kv_dtype": "float32", "block_identity_golden": "00"}
    decode = {"model_revision": "a", "block_size": "32", "kv_dtype": "bfloat16", "block_identity_golden": "11"}
    assert len(pair_differences(prefill, decode)) == 3
    assert pair_differences(prefill, {**decode, CONVERTS: "yes"}) == []
    assert len(pair_differences({**prefill, CONVERTS: "yes"}, decode)) == 3, "it is decode that converts"
    other = pair_differences(prefill, {**decode, CONVERTS: "yes", "model_revision": "b"})
    assert other == ["model_revision: prefill a, decode b"]
