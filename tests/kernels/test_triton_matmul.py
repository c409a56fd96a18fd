from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.reference_fused import gate_mul_ref
from diptych.kernels.triton_matmul import MatmulShape, small_matmul

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_matmul_gpu(cuda, rows, dtype):
    for size, columns in ((4096, 6144), (1000, 333), (14336, 4096)):
        check(rows, size, columns, dtype=dtype, device=cuda, tolerance=8e-3 if dtype == torch.bfloat16 else 2e-3)
