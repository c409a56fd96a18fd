"""Kernels that read a projection and add what adapters add to it: with t of each row's slot, and with t of all slots behind the
projection's own columns, as one product of the joined weight makes them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels import triton_lora_rows
from diptych.kernels.reference_fused import gate_mul_ref, lora_ref, rms_norm_ref
from diptych.kernels.triton_lora import lora_expand, lora_gate_mul, lora_shrink
from diptych.kernels.triton_lora_rows import LoraDelta, LoraWeights
from diptych.kernels.triton_norm import rms_norm
from diptych.kernels.triton_rope import rope_write

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SLOTS = 3
NAN = float("nan")


class Case:
    """A projection of random rows: row i has slot i % 4 - 1; slot 2 leaves the last part alone, slot 1 uses fewer ranks."""

    def __init__(self, rows, inputs, parts, rank, *, dtype=torch.float32, device="cpu"):
        self.dtype, outputs = dtype, sum(parts)
        self.adapters = (torch.arange(rows, dtype=torch.int32, device=device) % 4 - 1).contiguous()
        ranks = torch.full((SLOTS, len(parts)), rank, dtype=torch.int32, device=device)
        ranks[1], ranks[2, -1] = max(1, rank // 3), 0
        known = torch.arange(rank, device=device) < ranks[:, :, None]  # [slots, parts, rank]
        a = torch.randn(SLOTS, len(parts), rank, inputs, device=device) * inputs**-0.5
        b = torch.randn(SLOTS, rank, outputs, device=device) * 0.5
        sizes = torch.tensor(parts, device=device)
        known_b = known.repeat_interleave(sizes, dim=1).transpose(1, 2)  # [slots, rank, outputs]
        self.x = torch.randn(rows, inputs, device=device).to(dtype)
        self.base = torch.randn(rows, outputs, device=device)
        a, b = a.to(dtype), b.to(dtype)
        self.more = lora_ref(self.x, a * known[..., None], (b * known_b).transpose(1, 2), self.adapters, parts)
        # What no adapter fills is read by nobody.
        a, b = a.masked_fill(~known[..., None], NAN), b.masked_fill(~known_b, NAN)
        self.weights = LoraWeights(a, b.transpose(1, 2), ranks, tuple(parts))
        self._t = self.x.float() @ a.float().reshape(-1, inputs).T
        """Of all slots."""

    def forms(self):
        """What readers get: rows and sums of several splits, with t behind them; rows, with t of each row's own slot."""
        outputs = self.base.shape[1]
        whole = torch.cat((self.base, self._t), 1)
        for joined in (whole.to(self.dtype), torch.stack((whole / 4, whole * 0.75))):
            t = (joined if joined.dim() == 3 else joined[None])[..., outputs:]
            yield joined[..., :outputs], LoraDelta(t, self.weights, self.adapters)
        yield self.base.to(self.dtype), lora_shrink(self.x, self.weights, self.adapters)

    def rounded(self, out):
        return out.sum(0) if out.dim() == 3 else out.float()

    def near(self, got, expected):
        return (got.float() - expected).norm() / expected.norm() < TOLERANCE[self.dtype]


def bare(out):
    """Without its neighbours in memory."""
    return out.clone().contiguous()


def check_expand(case):
    for out, delta in case.forms():
        before = bare(out)
        lora_expand(out, delta)
        assert case.near(case.rounded(out), case.rounded(before) + case.more)
        without = case.adapters < 0
        assert torch.equal(out[..., without, :], before[..., without, :])


def check_gate(case):
    for out, delta in case.forms():
        expected = gate_mul_ref(case.rounded(out) + case.more)
        assert case.near(lora_gate_mul(out, delta, "silu", dtype=case.dtype), expected)


def check_norm(case):
    size = case.base.shape[1]
    weight = torch.randn(size, device=case.x.device).to(case.dtype)
    for out, delta in case.forms():
        first = torch.randn(case.base.shape, device=case.x.device).to(case.dtype)
        residual, plain = first.clone(), first.clone()
        got = rms_norm(out, weight, 1e-5, residual, offset=1.0, delta=delta)
        total = case.rounded(out) + case.more + first.float()
        assert case.near(residual, total)
        assert case.near(got, rms_norm_ref(total, weight, 1e-5, 1.0))
        none = rms_norm(bare(out), weight, 1e-5, plain, offset=1.0)
        without = case.adapters < 0
        assert torch.equal(residual[without], plain[without])
        assert case.near(got[without], none[without].float())  # on a GPU other threads add up the squares


def check_rope(case, num_q_heads, num_kv_heads, head_dim):
    device, rows = case.x.device, case.x.shape[0]
    angles = torch.randn(rows, head_dim // 2, device=device)  # of each position, of which every row has its own
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    at = torch.arange(rows, dtype=torch.int32, device=device)

    def written(qkv, delta):
        kv = torch.zeros(rows, 2, 4, num_kv_heads, head_dim, device=device, dtype=case.dtype)
        q = rope_write(qkv, kv, cos, sin, at, at * 4 + 1, num_q_heads=num_q_heads, dtype=case.dtype, delta=delta)
        return q.clone(), kv

    without = case.adapters < 0
    for out, delta in case.forms():
        same = written(bare(out), None)
        expected = written((case.rounded(out) + case.more).to(case.dtype), None)
        got = written(out, delta)
        for mine, theirs, none in zip(got, expected, same, strict=True):
            assert case.near(mine, theirs.float())
            assert torch.equal(mine[without], none[without])
    hidden = torch.full_like(at, -1)  # a padded row, which is skipped
    kv = torch.zeros(rows, 2, 4, num_kv_heads, head_dim, device=device, dtype=case.dtype)
    for out, delta in case.forms():
        rope_write(out, kv, cos, sin, at, hidden, num_q_heads=num_q_heads, dtype=case.dtype, delta=delta)
        assert not kv.any()


@interpreted
@pytest.mark.parametrize("ranks", [2, 16])
def test_readers_add_what_adapters_add(monkeypatch, ranks):
    """With all ranks at once, and a few at a time."""
    monkeypatch.setattr(triton_lora_rows, "_MOST_RANKS", ranks)
    check_norm(Case(5, 24, (40,), 5))
    check_rope(Case(5, 24, (3 * 8, 8, 8), 5), 3, 1, 8)


@interpreted
def test_products_of_all_slots_are_told_apart():
    check_expand(Case(5, 24, (40, 8, 8), 5))
    check_gate(Case(5, 24, (20, 20), 5))


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_that_are_not_finite_reach_their_own_rows_only():
    case = Case(4, 24, (40,), 4)
    case.weights.b[0], case.weights.a[0] = NAN, float("inf")
    for out, delta in case.forms():
        got = rms_norm(out, torch.ones(40), 1e-5, delta=delta)
        assert got.isfinite().all(1).tolist() == [True, False, True, True]


def test_a_delta_of_another_projection_is_refused():
    case = Case(3, 24, (40,), 4)
    out, delta = next(case.forms())
    with pytest.raises(ValueError, match="3 rows of 41"):
        rms_norm(torch.zeros(3, 41), torch.ones(41), 1e-5, delta=delta)
    with pytest.raises(ValueError, match="2 rows of 40"):
        lora_expand(out[:2], delta)
    turns, at = torch.zeros(4, 4), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 rows of 40"):  # of one part, not of three
        rope_write(out, torch.zeros(1, 2, 4, 1, 8), turns, turns, at, at, num_q_heads=3, delta=delta)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_readers_gpu(cuda, dtype, rank):
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows in (1, 16, 64, 128):
        check_norm(Case(rows, 4096, (4096,), rank, dtype=dtype, device=cuda))
        check_rope(Case(rows, 1024, (6144 - 2048, 1024, 1024), rank, dtype=dtype, device=cuda), 32, 8, 128)
        check_rope(Case(rows, 576, (576, 192, 192), rank, dtype=dtype, device=cuda), 9, 3, 64)
        check_expand(Case(rows, 576, (4096, 1024, 1024), rank, dtype=dtype, device=cuda))
        check_gate(Case(rows, 576, (14336, 14336), rank, dtype=dtype, device=cuda))
    check_norm(Case(64, 64, (8192,), rank, dtype=dtype, device=cuda))
    check_norm(Case(64, 64, (576,), rank, dtype=dtype, device=cuda))
    check_expand(Case(300, 576, (576, 192, 192), rank, dtype=dtype, device=cuda))
