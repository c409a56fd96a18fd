"""Layers of tensor-parallel ranks on the compiled kernels, at every width of vectors: what one rank with everything computes, the
same bits in any company and on every rank; and what goes wrong in a sum comes out of the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from diptych.common.compiled import ALL_LANES
from diptych.common.kv_format import Shard
from diptych.common.paths import cache_dir
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import build
from diptych_tests.native_layers import GEMMA2, LLAMA, QWEN3, Layers, Sizes, in_chunks

LENGTH = 41
SLOTS = 2
SIZES = Sizes(heads=8, kv_heads=2, ffn=256)
CLOSE = {"atol": 5e-4, "rtol": 5e-4}
FEATURES = {"llama": (LLAMA, LLAMA), "biases": (QWEN3, QWEN3), "post norms": GEMMA2}
_DEADLINE_S = 30.0


class Ranks:
    """Ranks in threads, which add up in their order."""

    def __init__(self, layers: Layers, degree: int) -> None:
        self._barrier = threading.Barrier(degree, timeout=_DEADLINE_S)
        self._parts = [torch.empty(0)] * degree
        self.layers = [layers.rank(Shard(i, degree), lambda x, i=i: self._sum(i, x)) for i in range(degree)]

    def _sum(self, rank: int, x: Tensor) -> Tensor:
        self._parts[rank] = x
        self._barrier.wait()
        total = self._parts[0].clone()
        for part in self._parts[1:]:
            total += part
        self._barrier.wait()
        return total

    def run(self, work: Callable[[Layers], Tensor]) -> Tensor:
        """The same on every rank. Returns: what all of them return, the same bits."""
        with ThreadPoolExecutor(len(self.layers)) as pool:
            first, *others = pool.map(work, self.layers)
        assert all(torch.equal(other, first) for other in others)
        return first


@pytest.fixture(params=ALL_LANES)
def library(request, compiler):
    return Library(build(cache_dir() / "native", compiler, request.param))


def made(library, name="llama", **kwargs):
    return Layers(library, FEATURES[name], SIZES, num_blocks=64, **kwargs)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", FEATURES)
def test_ranks_compute_what_one_rank_does(library, name, degree):
    """At degree 4 two ranks have the same KV head."""
    layers = made(library, name, loras=SLOTS)
    for slot in (-1, 0):
        expected = layers.reference(layers.sequence(LENGTH).x, slot=slot)
        out = Ranks(layers, degree).run(lambda own, slot=slot: in_chunks(own, 17, LENGTH, slot=slot).output)
        torch.testing.assert_close(out.double(), expected, **CLOSE)


@pytest.mark.parametrize("method", ["bfloat16", "int8", "int4"])
def test_ranks_with_other_weights_are_near_it(library, method):
    """A rank rounds or quantizes its own part of a row."""
    layers = made(library, method=method, codes=torch.bfloat16 if method == "bfloat16" else None)
    expected = layers.reference(layers.sequence(LENGTH).x, degree=2)
    out = Ranks(layers, 2).run(lambda own: in_chunks(own, 17, LENGTH).output)
    assert (out.double() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("method", ["plain", "bfloat16", "int8", "int4"])
def test_ranks_give_the_same_bits_in_any_company(library, method):
    codes = torch.bfloat16 if method == "bfloat16" else None
    ranks = Ranks(made(library, method=method, codes=codes, loras=SLOTS), 2)

    def beside_others(own: Layers) -> Tensor:
        others = [own.sequence(length, seed=length) for length in (5, 40, 23)]
        sequence = own.sequence(LENGTH)
        for one, slot in zip((sequence, *others), (0, -1, 1, 0), strict=True):
            one.slot = slot
        for index in range(LENGTH):
            beside = [(o, min(3, len(o.x) - o.done)) for o in others if index % 2 and o.done < len(o.x)]
            own.run(*beside[:1], (sequence, 1), *beside[1:], threads=1 if index % 8 else 2)
        return sequence.output

    alone = ranks.run(lambda own: in_chunks(own, 1, LENGTH, slot=0).output)
    for chunk in (5, LENGTH):
        assert torch.equal(ranks.run(lambda own, chunk=chunk: in_chunks(own, chunk, LENGTH, slot=0).output), alone)
    assert torch.equal(ranks.run(beside_others), alone)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("method", ["plain", "int4"])
def test_a_sum_over_one_rank_changes_no_bit(library, name, method):
    layers = made(library, name, method=method)
    alone = layers.rank(Shard(), lambda x: x)
    assert torch.equal(in_chunks(alone, 17, LENGTH).output, in_chunks(layers, 17, LENGTH).output)


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("error", [RuntimeError("the ranks are lost"), KeyboardInterrupt()], ids=repr)
def test_what_a_sum_raises_comes_out_of_the_call(library, failing, error):
    """At once: no other sum is asked for."""
    calls = 0

    def all_reduce(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise error
        return x

    own = made(library).rank(Shard(), all_reduce)
    sequence = own.sequence(LENGTH)
    with pytest.raises(type(error)) as caught:
        own.run((sequence, LENGTH))
    assert caught.value is error
    assert calls == failing
    own.run((sequence, 1))
    assert calls == failing + 2 * len(own.features), "the next step is a step like any other"


def test_a_sum_of_another_shape_is_an_error(library):
    own = made(library).rank(Shard(), lambda x: x[:, :1].clone())
    with pytest.raises(RuntimeError, match="shape"):
        own.run((own.sequence(3), 3))
