from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.bench.kernels.ordered_dot import replaced
from diptych.kernels import triton_lora
from diptych.kernels.reference_fused import gate_mul_ref, lora_ref
from diptych.kernels.triton_lora import LoraShape, lora_expand, lora_gate_mul, lora_shrink
from diptych.kernels.triton_lora_rows import LoraDelta, LoraWeights
from diptych.kernels.triton_norm import gate_mul

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
SMALL = (LoraShape(16, 16, 1), LoraShape(16, 32, 2))
"""One slot in a program, and several."""
PARTS = {"qkv": (40, 16, 16), "o": (50,), "gate_up": (20, 20)}


@pytest.fixture
def small(monkeypatch):
    """Launches of small tiles, and shares of few inputs, so that a small case has several of each."""

    def use(shape):
        monkeypatch.setattr(triton_lora, "lora_shape", lambda rows, slots, *, invariant: shape)

    monkeypatch.setattr(triton_lora, "_SHARE", 64)
    monkeypatch.setattr(triton_lora, "_BLOCK_K", 32)
    return use


def some_weights(slots, parts, rank, inputs, *, dtype=torch.float32, device="cpu"):
    """The last slot is empty; the others leave a part alone, or use a part of the ranks. What kernels may not read is NaN."""
    a = torch.full((slots, len(parts), rank, inputs), float("nan"), device=device)
    b = torch.full((slots, rank, sum(parts)), float("nan"), device=device)
    ranks = torch.zeros((slots, len(parts)), dtype=torch.int32, device=device)
    ends = torch.tensor((0, *parts)).cumsum(0).tolist()
    for slot in range(slots - 1):
        for part in range(len(parts)):
            used = (rank, rank // 2, 0)[(slot + part) % 3]
            ranks[slot, part] = used
            columns = slice(ends[part], ends[part + 1])
            a[slot, part] = 0.0
            b[slot, :, columns] = 0.0
            a[slot, part, :used] = torch.randn(used, inputs, device=device) * inputs**-0.5
            b[slot, :used, columns] = torch.randn(used, parts[part], device=device) * 0.5
    return LoraWeights(a.to(dtype), b.to(dtype).transpose(1, 2), ranks, tuple(parts))


def finite(weights):
    """For the reference, which looks at all of it."""
    return weights.a.nan_to_num(), weights.b.nan_to_num()


def mixed(rows, slots, device="cpu"):
    """Some without an adapter, and runs of one, as prompts have them."""
    of_rows = [(-1, 0, 1, 1, 1, slots - 1, 2 % slots)[i % 7] for i in range(rows // 2)]
    return torch.tensor(of_rows + [1 % slots] * (rows - len(of_rows)), dtype=torch.int32, device=device)


def check_added(rows, inputs, parts, rank, *, slots=3, dtype=torch.float32, device="cpu", invariant=False):
    """Into rows of the model's dtype, and into sums in fp32 of several splits."""
    weights, adapters = some_weights(slots, parts, rank, inputs, dtype=dtype, device=device), mixed(rows, slots, device)
    x, base = (
        torch.randn(rows, 2 * inputs, device=device).to(dtype)[:, :inputs],
        torch.randn(rows, sum(parts), device=device),
    )
    more = lora_ref(x, *finite(weights), adapters, parts)
    delta = lora_shrink(x, weights, adapters, invariant=invariant)
    out, splits = base.to(dtype, copy=True), torch.stack((base, torch.zeros_like(base)))
    before = out.clone()
    lora_expand(out, delta, invariant=invariant)
    lora_expand(splits, delta, invariant=invariant)
    for got, expected in ((out, before.float() + more), (splits.sum(0), base + more)):
        assert (got.float() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    without = adapters < 0
    assert torch.equal(out[without], before[without])
    assert (more.norm() / base.norm()) > 0.1


def check_gate(rows, inputs, size, rank, activation, *, slots=3, dtype=torch.float32, device="cpu", invariant=False):
    parts = (size, size)
    weights, adapters = some_weights(slots, parts, rank, inputs, dtype=dtype, device=device), mixed(rows, slots, device)
    x, base = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(rows, 2 * size, device=device)
    delta = lora_shrink(x, weights, adapters, invariant=invariant)
    more = lora_ref(x, *finite(weights), adapters, parts)
    for gate_up, rounded in ((base.to(dtype), base.to(dtype).float()), (torch.stack((base / 2, base / 2)), base)):
        got = lora_gate_mul(gate_up, delta, activation, dtype=dtype, invariant=invariant)
        expected = gate_mul_ref(rounded + more, activation)
        assert got.dtype == dtype
        assert (got.float() - expected).norm() / expected.norm() < TOLERANCE[dtype]
        without = adapters < 0
        assert torch.equal(got[without], gate_mul(gate_up, activation, dtype)[without])


@interpreted
@pytest.mark.parametrize(("rows", "name", "shape"), [(19, "qkv", SMALL[0]), (1, "qkv", SMALL[1]), (19, "o", SMALL[1])])
def test_adapters_add_their_products(small, rows, name, shape):
    small(shape)
    check_added(rows, 72, PARTS[name], 6, invariant=name == "o")


@interpreted
def test_gate_and_up_with_adapters(small):
    small(SMALL[0])
    check_gate(3, 64, 20, 18, "gelu_tanh")
    small(SMALL[1])
    check_gate(19, 72, 20, 6, "silu")


@interpreted
def test_a_rows_bits_depend_on_no_other_row(small, monkeypatch):
    monkeypatch.setattr(*replaced())
    weights, adapters = some_weights(4, PARTS["gate_up"], 6, 72), mixed(19, 4)
    x, base = torch.randn(19, 72), torch.randn(19, 2 * PARTS["gate_up"][0])
    results = []
    for shape, some_rows in ((SMALL[0], [[*range(19)]]), (SMALL[1], [[7, 2], [18, 17, 11, 1]])):
        small(shape)
        for rows in some_rows:
            at = torch.tensor(rows)
            some, mine = x[at].contiguous(), adapters[at].contiguous()
            delta, out = lora_shrink(some, weights, mine, invariant=True), base[at].contiguous()
            gated = lora_gate_mul(out, delta, "silu", invariant=True)
            lora_expand(out, delta, invariant=True)
            results.append((rows, out, gated))
    _, whole, whole_gated = results[0]
    for rows, out, gated in results[1:]:
        assert torch.equal(out, whole[rows])
        assert torch.equal(gated, whole_gated[rows])


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_that_are_not_finite_reach_their_own_rows_only(small):
    small(SMALL[1])
    weights, adapters = some_weights(4, PARTS["o"], 6, 64), torch.tensor([0, 1, -1, 1], dtype=torch.int32)
    weights.ranks[1] = 6
    weights.a[1], weights.b[1] = float("inf"), float("nan")
    x, out = torch.randn(4, 64), torch.randn(4, 50)
    alone = out[:1].clone()
    lora_expand(alone, lora_shrink(x[:1], weights, adapters[:1]))
    lora_expand(out, lora_shrink(x, weights, adapters))
    torch.testing.assert_close(out[:1], alone)
    assert out[2].isfinite().all()
    assert not out[1].isfinite().any()


def test_what_does_not_fit_is_refused():
    weights, none = some_weights(4, PARTS["o"], 6, 64), torch.full((3,), -1, dtype=torch.int32)
    delta = LoraDelta(torch.zeros(1, 3, 6), weights, none)
    with pytest.raises(ValueError, match="does not fit a"):
        lora_shrink(torch.zeros(3, 65), weights, none)
    with pytest.raises(ValueError, match="3 rows, adapters"):
        lora_shrink(torch.zeros(3, 64), weights, none.long())
    with pytest.raises(ValueError, match="3 rows of 51"):
        lora_expand(torch.zeros(3, 51), delta)
    with pytest.raises(ValueError, match="does not fit a"):
        LoraDelta(torch.zeros(1, 3, 7), weights, none)
    with pytest.raises(ValueError, match="is not of parts"):
        lora_gate_mul(torch.zeros(3, 50), delta, "silu")
    with pytest.raises(ValueError, match="no activation"):
        lora_gate_mul(torch.zeros(3, 50), delta, "relu")
    with pytest.raises(ValueError, match="follow each other"):
        LoraWeights(weights.a, weights.b.contiguous(), weights.ranks, weights.part_outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 300])
def test_lora_gpu(cuda, rows, dtype, invariant):
    for rank in (8, 16, 64):
        for inputs, parts in ((4096, (4096, 1024, 1024)), (576, (576, 192, 192)), (14336, (4096,)), (1000, (333,))):
            check_added(rows, inputs, parts, rank, slots=8, dtype=dtype, device=cuda, invariant=invariant)
        check_gate(rows, 4096, 14336, rank, "silu", slots=8, dtype=dtype, device=cuda, invariant=invariant)


@pytest.mark.gpu
def test_a_rows_bits_depend_on_no_other_row_gpu(cuda):
    """With `invariant`, at every number of rows."""
    parts = (14336, 14336)
    weights, adapters = some_weights(8, parts, 16, 4096, dtype=torch.bfloat16, device=cuda), mixed(300, 8, cuda)
    x, base = torch.randn(300, 4096, device=cuda).bfloat16(), torch.randn(300, sum(parts), device=cuda).bfloat16()
    whole = None
    for rows in (300, 129, 64, 17, 1):
        some, mine, out = x[:rows], adapters[:rows], base[:rows].clone()
        delta = lora_shrink(some, weights, mine, invariant=True)
        gated = lora_gate_mul(out, delta, "silu", invariant=True)
        lora_expand(out, delta, invariant=True)
        whole = whole or (out, gated)
        assert torch.equal(out, whole[0][:rows])
        assert torch.equal(gated, whole[1][:rows])
