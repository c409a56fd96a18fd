from __future__ import annotations

import struct

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.engine.exec.sampler import draw_key, uniforms
from diptych.kernels.reference_fused import feed_ids_ref
from diptych.kernels.triton_sample import feed_ids, sample_rows

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def signed(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def check(rows, vocab_size, *, device, dtype=torch.float32):
    torch.manual_seed(rows)
    logits = (torch.randn(rows, vocab_size, device=device) * 4).to(dtype)
    assert torch.equal(sample_rows(logits).long(), logits.argmax(-1))
    keys = [draw_key(11, 0, i) for i in range(rows)]
    temperatures = [0.0 if i % 3 == 0 else 0.3 + 0.4 * i for i in range(rows)]
    words = [
        [struct.unpack("i", struct.pack("f", t))[0], signed(k), signed(k >> 32), 0]
        for k, t in zip(keys, temperatures, strict=True)
    ]
    draws = torch.tensor(words, dtype=torch.int32, device=device)
    limits = torch.full((rows,), float("-inf"), device=device)
    limits[-1] = logits[-1].float().topk(min(vocab_size, 9)).values[-1]
    noise = -torch.log(-torch.log(uniforms(keys, vocab_size, torch.device(device))))
    scale = torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None]
    drawn = (logits.float() / scale + noise).masked_fill(logits.float() < limits[:, None], float("-inf"))
    expected = torch.where(torch.tensor(temperatures, device=device) > 0, drawn.argmax(-1), logits.argmax(-1))
    assert torch.equal(sample_rows(logits, draws, limits).long(), expected)
    logits[0, vocab_size // 2] = float("nan")
    logits[-1, 0] = float("inf")
    ids = sample_rows(logits, draws, limits).tolist()
    assert ids[0] == ids[-1] == -1
    assert ids[1:-1] == expected.tolist()[1:-1]


def check_feed(count, device):
    torch.manual_seed(count)
    ids, drawn = (torch.randint(-1, 1000, (n,), dtype=torch.int32, device=device) for n in (count, 1024))
    sources = torch.randint(-1, 1024, (count,), dtype=torch.int32, device=device)
    sources[count // 2] = -1
    expected = feed_ids_ref(ids, sources, drawn)
    feed_ids(ids, sources, drawn)
    assert torch.equal(ids, expected)


@interpreted
@pytest.mark.parametrize("count", [1, 7, 1100])
def test_feed_small(count):
    check_feed(count, "cpu")
    with pytest.raises(ValueError, match="must be int32"):
        feed_ids(torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))


@interpreted
@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_sample_small(vocab_size):
    check(5, vocab_size, device="cpu")


@interpreted
def test_the_first_of_equal_logits_wins():
    logits = torch.zeros(1, 5000)
    logits[0, [77, 4300]] = 2.0
    assert sample_rows(logits).tolist() == [77]


@pytest.mark.parametrize(
    ("draws", "thresholds", "words"),
    [
        (torch.zeros(2, 4, dtype=torch.int32), None, "come together"),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2), "do not fit 2 rows"),
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3), "do not fit 2 rows"),
    ],
)
def test_what_does_not_fit_is_refused(draws, thresholds, words):
    with pytest.raises(ValueError, match=words):
        sample_rows(torch.zeros(2, 8), draws, thresholds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 49_152, 128_256])
def test_sample_gpu(cuda, dtype, vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(64, vocab_size, device=cuda).to(dtype)
    assert torch.equal(logits.gather(1, sample_rows(logits)[:, None].long())[:, 0], logits.amax(-1))
    if dtype == torch.float32:
        check(37, vocab_size, device=cuda)
