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


@triton.jit
def _operands(x_ptr, y_ptr, out_ptr, N: tl.constexpr, KIND: tl.constexpr):
    """Operators on blocks of one type and of two, beside numbers and scalars, on either side."""
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(at + y_ptr)
    first, small = tl.load(x_ptr), tl.load(y_ptr).to(tl.int32)
    if KIND == "same":
        out = (x + x) * x - x
    elif KIND == "two types":
        out = (x + y) * y - x
    elif KIND == "integers":
        out = 3 + x * 2 - 1
    elif KIND == "numbers":
        out = 0.5 * x + 1e-3
    elif KIND == "divided":
        out = x / 2 + 7 / (x + 1)
    elif KIND == "scalars":
        out = (first + 1) * 2 + x - small
    elif KIND == "compared":
        out = tl.where((x > 1) & (y <= 2) | (x == first), tl.maximum(x, 1), 0)
    elif KIND == "shapes":
        out = tl.sum(x[:, None] * x[None, :] + first, axis=1)
    elif KIND == "of integers":
        whole = x.to(tl.int32)
        out = (whole // 3 + whole % 5) ^ (whole << 1) & 6
    elif KIND == "moved":
        out = tl.load(x_ptr + (N - 1 - at).to(tl.uint8)) - tl.load(x_ptr + 1)
    else:
        out = x + KIND
    tl.store(out_ptr + at, out.to(tl.float32))


TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8, torch.int64, torch.bool]
KINDS = ["same", "two types", "integers", "numbers", "divided", "scalars", "compared", "shapes", "of integers", "moved"]


def operated(kind, dtype, other):
    """The result, or the error's words, as text."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(0, 5, (8,), generator=generator).to(one) for one in (dtype, other))
    out = torch.full((8,), -9.0)
    try:
        _operands[(1,)](x, y, out, N=8, KIND=kind)
    except InterpreterError as error:
        return str(error)
    return str(out.tolist())  # NaN is NaN


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


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    row, k, column = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + row * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + column)
    tl.store(out_ptr + row * N + column, tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_15_bits_of_a_product_do_not_depend_on_its_rows(dtype):
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 32), (32, 32)))
    whole, parts = torch.zeros(64, 32), torch.zeros(64, 32)
    _dot[(1,)](a, b, whole, M=64, K=32, N=32)
    for first in range(0, 64, 16):
        _dot[(1,)](a[first:], b, parts[first:], M=16, K=32, N=32)
    assert torch.equal(parts, whole)
    expected = torch.zeros(64, 32)
    for k in range(32):
        expected += a[:, k : k + 1].float() * b[k].float()
    assert torch.equal(whole, expected)
    torch.testing.assert_close(whole, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_operands_of_every_type_are_converted_as_before():
    every = [(kind, *pair) for kind in KINDS for pair in zip(TYPES, TYPES[1:] + TYPES[:1], strict=True)]
    every += [
        (number, dtype, dtype)
        for number in (-1, 200, 2**31, 2**40)
        for dtype in (torch.uint8, torch.int8, torch.float16)
    ]
    with quick_interpreter.as_shipped():
        shipped = {one: operated(*one) for one in every}
    assert {one: operated(*one) for one in every} == shipped
    assert sum(found.startswith("[") for found in shipped.values()) > len(every) / 2
    assert {"out of range", "unsigned tensor"} <= {
        words for words in ("out of range", "unsigned tensor") for found in shipped.values() if words in found
    }


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
