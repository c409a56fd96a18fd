"""What attention kernels share: how they read KV, elements or codes, and what becomes of scores.

Codes of a quantized cache are widened to float16 two at a time, in few instructions. float16 holds every code of all three
dtypes: E4M3 has an instruction for two of them, E5M2 is float16's upper byte, and an integer is the low byte of 1024 + integer.
bfloat16 has none of these.

They are loaded as pairs, 16 bits each, and come out as two tensors: of the even elements and of the odd ones. So a tile that a
product takes across its contiguous dim (V) is read from shared memory by the instruction that transposes 16-bit elements; single
bytes would be read one by one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

_E4M3 = """
{{
.reg .b32 t;
.reg .b16 low, high;
prmt.b32 t, $1, $1, 0x3120;
mov.b32 {{low, high}}, t;
cvt.rn.f16x2.e4m3x2 $0, {half};
}}
"""
_INT8 = """
{{
.reg .b32 t, most;
mov.b32 most, 0x64806480;
xor.b32 t, $1, 0x80808080;
prmt.b32 t, t, 0x64646464, {order};
sub.f16x2 $0, t, most;
}}
"""
_E4M3_EVEN: tl.constexpr = tl.constexpr(_E4M3.format(half="low"))
_E4M3_ODD: tl.constexpr = tl.constexpr(_E4M3.format(half="high"))
_E5M2_EVEN: tl.constexpr = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;")
_E5M2_ODD: tl.constexpr = tl.constexpr("prmt.b32 $0, $1, 0, 0x3414;")
_INT8_EVEN: tl.constexpr = tl.constexpr(_INT8.format(order="0x4240"))
_INT8_ODD: tl.constexpr = tl.constexpr(_INT8.format(order="0x4341"))


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap); tanh(t) as 1 - 2 / (exp(2 t) + 1): right for every t, also where exp ends in infinity."""
    return cap * (1.0 - 2.0 / (tl.exp2(scores / cap * 2.8853900817779268) + 1.0))


@triton.jit
def load_kv(at, mask, dtype: tl.constexpr, MASKED: tl.constexpr):
    """Elements of the pool, or codes, as numbers of q's dtype. Codes fit into any: they have at most seven bits and a sign."""
    if MASKED:
        x = tl.load(at, mask=mask, other=0.0)
    else:
        x = tl.load(at)
    if x.dtype.is_int():
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def add_codes(acc, weights, codes, units, inside, code_dtype: tl.constexpr):
    """acc + the weighted values, fp32. codes: of V, as numbers of q's dtype. units: where the scales of these keys lie.

    A weight times a scale is too small for float16, whose least normal number is 6e-5: with E5M2 a scale is 2e-5 of the largest
    value. There it is lifted by a power of two below the largest code, and the sum of products lowered by it.
    """
    scales = tl.load(units, mask=inside, other=0.0)[None, :]
    if codes.dtype == tl.float16:
        lift: tl.constexpr = 32768.0 if code_dtype == tl.float8e5 else 64.0
        sums = tl.dot((weights * (scales * lift)).to(codes.dtype), codes, input_precision="ieee")
        acc += sums * (1.0 / lift)
    else:
        acc = tl.dot((weights * scales).to(codes.dtype), codes, acc, input_precision="ieee")
    return acc


@triton.jit
def _by_pairs(pairs, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _one(byte, code_dtype: tl.constexpr):
    return byte.to(tl.int8).to(code_dtype, bitcast=True).to(tl.float16)


@triton.jit
def even_odd(pairs, code_dtype: tl.constexpr, ASM: tl.constexpr):
    """Codes 0, 2, 4.. and 1, 3, 5.. as float16. pairs: int16, two codes each. ASM: not in the interpreter."""
    if not ASM:
        even, odd = _one(pairs & 0xFF, code_dtype), _one((pairs >> 8) & 0xFF, code_dtype)
    elif code_dtype == tl.int8:
        even, odd = _by_pairs(pairs, _INT8_EVEN), _by_pairs(pairs, _INT8_ODD)
    elif code_dtype == tl.float8e5:
        even, odd = _by_pairs(pairs, _E5M2_EVEN), _by_pairs(pairs, _E5M2_ODD)
    else:
        even, odd = _by_pairs(pairs, _E4M3_EVEN), _by_pairs(pairs, _E4M3_ODD)
    return even, odd


@triton.jit
def power_of_two(x):
    """The largest one that is not above x, a positive normal number."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def lift_of(x):
    """2^14 / power_of_two(x): it brings x to [2^14, 2^15), near float16's end. x: 2^-112 or more."""
    half: tl.constexpr = 134 << 23  # the exponent's place; half of 14 and of 254, the sum of two exponents' offsets
    return (half - (x.to(tl.int32, bitcast=True) & 0x7F800000) + half).to(tl.float32, bitcast=True)
