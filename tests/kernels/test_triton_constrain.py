"""Rows of logits with what may not be drawn taken out, and draws out of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.triton_constrain import constrained_rows
from diptych.kernels.triton_sample import BAD, NONE_LEFT, sample_rows

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(vocab_size, *, dtype, device):
    torch.manual_seed(1)
    logits = torch.randn(7, vocab_size, device=device).to(dtype)
    rows = torch.tensor([6, 0, 3, 5], dtype=torch.int32, device=device)
    num_words = -(-vocab_size // 32)
    words = torch.randint(-(2**31), 2**31 - 1, (4, num_words), dtype=torch.int64).to(torch.int32).to(device)
    words[2] = 0
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    expected = logits[rows.long()].float().masked_fill(bits.flatten(1)[:, :vocab_size] == 0, float("-inf"))
    out, bad = constrained_rows(logits, rows, words)
    assert torch.equal(out, expected)
    assert not bad.any()
    assert torch.equal(constrained_rows(logits, rows)[0], logits[rows.long()].float())
    logits[5, vocab_size - 1] = float("-inf")  # the model's own: the row is bad, may it be drawn or not
    out, bad = constrained_rows(logits, rows, words)
    ids = sample_rows(out, bad=bad).tolist()
    assert ids == [expected[0].argmax().item(), expected[1].argmax().item(), NONE_LEFT, BAD]


@interpreted
@pytest.mark.parametrize("vocab_size", [300, 4128])
def test_constrain_small(vocab_size):
    check(vocab_size, dtype=torch.float32, device="cpu")


def test_what_does_not_fit_is_refused():
    logits, rows = torch.zeros(3, 40), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit 2 rows of 40 tokens"):
        constrained_rows(logits, rows, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit"):
        constrained_rows(logits, rows.long())
    with pytest.raises(ValueError, match="does not fit 3 rows of 1 chunks"):
        sample_rows(logits, bad=rows.view(2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_constrain_gpu(cuda, dtype):
    check(128_256, dtype=dtype, device=cuda)
