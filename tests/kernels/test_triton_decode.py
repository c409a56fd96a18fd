"""Paged decode in Triton against the reference: on the CPU through the interpreter, on a GPU at real shapes.

NaN stands in every slot that no sequence owns: a kernel that reads past a sequence's end cannot hide it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.bench.kernels.cases import Heads, paged_case
from diptych.kernels.reference import paged_attention_ref
from diptych.kernels.reference_fused import paged_attention_dense_ref
from diptych.kernels.triton_decode import choose_splits, paged_decode
from diptych_tests.gpu_shapes import SHAPES, TOLERANCE

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(case, *, window=None, softcap=None, splits=1, tile=16, tolerance=2e-5):
    heads = case.heads
    q = torch.randn(len(case.lens), heads.num_q_heads, heads.head_dim, device=case.kv.device).to(case.kv.dtype)
    scale = heads.head_dim**-0.5
    got = paged_decode(
        q,
        case.kv,
        case.tables,
        case.rows,
        case.lens,
        scale=scale,
        softcap=softcap,
        window=window,
        splits=splits,
        tile=tile,
    )
    for seq, length in enumerate(case.lens.tolist()):
        if length == 0:
            assert not got[seq].any()
            continue
        expected = paged_attention_dense_ref(
            q[seq : seq + 1], case.kv, case.table(seq), length - 1, scale=scale, softcap=softcap, window=window
        )
        error = (got[seq].float() - expected[0]).norm() / expected.norm()
        assert error < tolerance, f"sequence {seq} of {length} tokens: relative error {error:.2e}"


@interpreted
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 20), Heads(2, 2, 8)], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_small(heads, window, splits):
    check(paged_case(heads, [19, 0, 1], block_size=4), window=window, splits=splits)


@interpreted
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_decode_softcap(softcap):
    check(paged_case(Heads(4, 2, 16), [19, 0, 1], block_size=4), softcap=softcap, window=7, splits=2)


@interpreted
def test_decode_half_precision():
    check(paged_case(Heads(4, 2, 16), [33], block_size=16, dtype=torch.float16), splits=2, tolerance=2e-3)


@interpreted
def test_the_dense_reference_is_the_loop():
    case = paged_case(Heads(6, 2, 8), [13], block_size=4)
    case.pool.nan_to_num_(0.0)
    q = torch.randn(3, 6, 8)
    slow = paged_attention_ref(q, case.pool, 1, case.table(0).tolist(), 10, scale=0.3, window=4)
    fast = paged_attention_dense_ref(q, case.kv, case.table(0), 10, scale=0.3, window=4)
    torch.testing.assert_close(fast.double(), slow, atol=1e-5, rtol=1e-5)


def test_splits_fill_the_gpu_and_vanish_when_it_is_full():
    assert choose_splits(1, 8, 528) == 32
    assert choose_splits(8, 8, 528) == 8
    assert choose_splits(64, 8, 528) == 1
    assert choose_splits(4096, 8, 528) == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: a.update(q=a["q"].half()), "torch.float16"),
        (lambda a: a.update(q=a["q"][:, :3]), "do not divide"),
        (lambda a: a.update(q=a["q"][:, :, :8]), "does not fit"),
        (lambda a: a.update(tables=a["tables"].long()), "int32"),
        (lambda a: a.update(lens=a["lens"][:1]), "lengths"),
    ],
)
def test_what_does_not_fit_is_refused(spoil, words):
    case = paged_case(Heads(4, 2, 16), [5, 6], block_size=4)
    arguments = {"q": torch.zeros(2, 4, 16), "tables": case.tables, "lens": case.lens}
    spoil(arguments)
    with pytest.raises(ValueError, match=words):
        paged_decode(arguments["q"], case.kv, arguments["tables"], case.rows, arguments["lens"], scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "block_size"), SHAPES, ids=str)
def test_decode_gpu(cuda, heads, dtype, block_size):
    lens = [1, 17, 1024, 3001, 0, 130]
    case = paged_case(heads, lens, block_size=block_size, dtype=dtype, device=cuda)
    tolerance = TOLERANCE[dtype]
    for window in (None, 100):
        for splits in (1, 5):
            check(case, window=window, splits=splits, tile=None, tolerance=tolerance)
