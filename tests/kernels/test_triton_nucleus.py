from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.common.sampling import SamplingParams
from diptych.engine.exec.sampler import _filter
from diptych.kernels.triton_nucleus import row_thresholds

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays, and compares NaN on the way.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(logits, params, *, slack=0):
    """The kept sets against the CPU sampler's filter. slack: tokens that may differ in a row (sums rounded otherwise)."""
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]
    x = logits.float()
    scaled = (x - x.amax(-1, keepdim=True)) / temperatures
    expected = _filter(scaled.clone(), params) > float("-inf")
    shares = torch.tensor([[p.top_p, p.min_p, p.temperature, 0.0] for p in params], device=logits.device)
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=logits.device)
    got = x >= row_thresholds(logits, top_k, shares)[:, None]
    for row, p in enumerate(params):
        if p.greedy:
            assert got[row].all()
        else:
            assert (got[row] != expected[row]).sum() <= slack, f"row {row}: {p}: {got[row].sum()} {expected[row].sum()}"


def params_of(*triples):
    return [SamplingParams(max_tokens=1, temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in triples]


@interpreted
def test_borders_small():
    torch.manual_seed(1)
    logits = torch.randn(7, 300) * 3
    logits[6, :50] = 4.0  # ties at the border stay
    check(
        logits,
        params_of(
            (1.0, 0, 0.8, 0.0), (0.7, 12, 1.0, 0.0), (1.3, 40, 0.5, 0.0), (0.0, 5, 0.5, 0.0), (1.0, 0, 1.0, 0.2),
            (0.9, 20, 0.95, 0.05), (1.0, 7, 1.0, 0.0),
        ),
    )  # fmt: skip


@interpreted
def test_bf16_needs_half_the_steps():
    torch.manual_seed(2)
    check((torch.randn(2, 200) * 3).bfloat16(), params_of((1.0, 0, 0.7, 0.0), (1.0, 9, 0.9, 0.0)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="differ"):
        row_thresholds(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 128_256])
def test_borders_gpu(cuda, dtype, vocab_size):
    torch.manual_seed(3)
    triples = [(t, k, p, m) for t in (0.6, 1.0) for k in (0, 1, 50, 400) for p in (1.0, 0.9, 0.1) for m in (0.0, 0.05)]
    logits = (torch.randn(len(triples), vocab_size, device=cuda) * 2).to(dtype)
    check(logits, params_of(*triples), slack=0 if vocab_size == 1000 else 40)
