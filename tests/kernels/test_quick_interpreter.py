"""What the tests' own parts of Triton's interpreter leave as it is: results, errors, and triton.language behind a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from diptych_tests import quick_interpreter

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1"),
    # The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@triton.jit
def _pair(x, other, WIDTH: tl.constexpr):
    """Called inside a kernel; a tuple, products of blocks and scalars, and functions of Triton's own modules."""
    top = tl.max(x, axis=1)
    share = tl.sum(tl.exp(x - top[:, None]), axis=1) * WIDTH
    return tl.dot(x, other.T, input_precision="ieee"), share


@triton.jit
def _kernel(x_ptr, y_ptr, out_ptr, sums_ptr, rows, WIDTH: tl.constexpr, WRONG: tl.constexpr):
    first = tl.program_id(0) * 4
    row, column = first + tl.arange(0, 4), tl.arange(0, WIDTH)
    real = (row < rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
    if WRONG:
        x = x + tl.arange(0, 2 * WIDTH)[None, :]
    y = tl.load(y_ptr + column[:, None] * WIDTH + column[None, :]).to(tl.float32)
    total = tl.zeros([4, WIDTH], tl.float32)
    for turn in tl.range(0, rows, 2):
        products, share = _pair(x, y, WIDTH)
        total += products * (turn // 2 - 1) + share[:, None]
    codes = (total * 3).to(tl.int32) % 7
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], total + codes, mask=real)
    tl.store(sums_ptr + row, tl.sum(codes, axis=1), mask=row < rows)


def computed(wrong=False):
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    y = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    out, sums = torch.full((7, 16), 9.0), torch.full((7,), 9, dtype=torch.int32)
    _kernel[(2,)](x, y, out, sums, 7, WIDTH=16, WRONG=wrong)
    return out, sums


def language():
    return {(m.__name__, name): value for m in (tl, tl.math, tl.tensor, tl.dtype) for name, value in vars(m).items()}


def test_parts_are_installed_for_this_triton():
    assert triton.__version__.startswith(quick_interpreter.VERSION), (
        "compare the parts with the new version's, or remove them"
    )
    assert isinstance(interpreter._patch_lang, quick_interpreter._Patches)


def test_results_are_the_same_bits():
    with quick_interpreter.as_shipped():
        assert not isinstance(interpreter._patch_lang, quick_interpreter._Patches)
        shipped = computed()
    for got, expected in zip(computed(), shipped, strict=True):
        assert torch.equal(got, expected)
    assert len(shipped[0].unique()) > 7
    assert len(shipped[1].unique()) > 1


def test_errors_are_the_same_and_the_language_is_left_as_it_was():
    computed()
    before = language()
    with pytest.raises(InterpreterError) as quick:
        computed(wrong=True)
    assert language() == before
    with quick_interpreter.as_shipped(), pytest.raises(InterpreterError) as shipped:
        computed(wrong=True)
    assert str(shipped.value) == str(quick.value)
    assert "incompatible dimensions" in str(quick.value)
    computed()
    assert language() == before
