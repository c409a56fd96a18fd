from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.reference_fused import gate_mul_ref, rms_norm_ref
from diptych.kernels.triton_matmul import MatmulShape, small_matmul
from diptych.kernels.triton_norm import rms_norm

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(rows, size, columns, *, dtype, device, shape=None, tolerance=1e-5):
    x = torch.randn(rows, 2 * size, device=device).to(dtype)[:, :size]
    weight = (torch.randn(2 * columns, size, device=device) * size**-0.5).to(dtype)
    both = x.double() @ weight.double().T
    for silu, expected in ((False, both), (True, gate_mul_ref(both.float()))):
        got = small_matmul(x, weight, silu=silu, shape=shape).double()
        error = (got - expected).norm() / expected.norm()
        assert error < tolerance, f"silu={silu}: relative error {error:.2e}"


def check_splits(rows, size, columns, *, dtype, device, shape, tolerance):
    """The splits' sum is the product, whoever adds them up: here, a norm, and (see test_triton_fused) a rotation."""
    x = torch.randn(rows, size, device=device).to(dtype)
    weight = (torch.randn(columns, size, device=device) * size**-0.5).to(dtype)
    expected = x.double() @ weight.double().T
    parts = small_matmul(x, weight, shape=shape)
    assert (parts.shape, parts.dtype) == ((shape.splits, rows, columns), torch.float32)
    assert (parts.double().sum(0) - expected).norm() / expected.norm() < tolerance
    residual = torch.randn(rows, columns, device=device).to(dtype)
    scale = torch.rand(columns, device=device).to(dtype) + 0.5
    total = parts.sum(0).to(dtype) + residual
    normed = rms_norm(parts, scale, 1e-5, residual).double()
    assert (residual.double() - total.double()).norm() / total.double().norm() < tolerance
    right = rms_norm_ref(total, scale, 1e-5).double()
    assert (normed - right).norm() / right.norm() < tolerance


@interpreted
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 128, 32), (3, 100, 20), (17, 160, 16)])
def test_splits_small(rows, size, columns):
    shape = MatmulShape(16, 32, 4, 3, splits=2)
    check_splits(rows, size, columns, dtype=torch.float32, device="cpu", shape=shape, tolerance=1e-5)


@interpreted
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 64, 32), (3, 50, 20), (17, 32, 16)])
def test_matmul_small(rows, size, columns):
    check(rows, size, columns, dtype=torch.float32, device="cpu", shape=MatmulShape(16, 32, 4, 3))


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(65, 8), torch.zeros(5, 8)
    with pytest.raises(ValueError, match="65 rows"):
        small_matmul(x, weight)
    with pytest.raises(ValueError, match="does not fit"):
        small_matmul(x[:3], weight.half())
    with pytest.raises(ValueError, match="not gate and up"):
        small_matmul(x[:3], weight, silu=True)
    with pytest.raises(ValueError, match="no splits with silu"):
        small_matmul(x[:3], weight[:4], silu=True, shape=MatmulShape(16, 32, 4, 3, splits=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_matmul_gpu(cuda, rows, dtype):
    for size, columns in ((4096, 6144), (1000, 333), (14336, 4096)):
        check(rows, size, columns, dtype=dtype, device=cuda, tolerance=8e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33])
def test_splits_gpu(cuda, rows):
    for size, columns in ((4096, 6144), (1000, 333), (14336, 4096)):
        shape = MatmulShape(32, 128, 4, 4, splits=4)
        check_splits(rows, size, columns, dtype=torch.bfloat16, device=cuda, shape=shape, tolerance=8e-3)
