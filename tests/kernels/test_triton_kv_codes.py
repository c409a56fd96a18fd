"""Attention over a quantized KV cache in Triton, and the kernel that writes it: on the CPU through the interpreter, on a GPU at
real shapes. NaN scales stand in every slot that no sequence owns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton import knobs

from diptych.bench.kernels.cases import LLAMA_8B, Heads, PagedCase, chunk_rows, paged_case
from diptych.kernels.kv_codes import SlotCodec
from diptych.kernels.reference_fused import paged_attention_dense_ref
from diptych.kernels.triton_decode import paged_decode
from diptych.kernels.triton_decode_codes import grain_of, takes_pairs
from diptych.kernels.triton_invariant_attention import invariant_decode, invariant_prefill, invariant_rows
from diptych.kernels.triton_kv import even_odd
from diptych.kernels.triton_prefill import paged_prefill, prefill_rows, prefill_tiles
from diptych.kernels.triton_rope import rope_write
from diptych_tests.gpu_shapes import SHAPES, TOLERANCE

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
SMALL = Heads(4, 2, 16)


@pytest.fixture(params=CODES, ids=str)
def codes(request):
    return request.param


@dataclass
class Quantized:
    """A case whose layer lies in a pool of slots. kv: what its codes and scales stand for, fp32."""

    case: PagedCase
    codes: Tensor
    scales: Tensor
    kv: Tensor


def quantized(case: PagedCase, dtype: torch.dtype) -> Quantized:
    codec = codec_of(case.heads, dtype)
    kv = case.kv
    slots = codec.encode(kv.flatten(0, 2)).view(*kv.shape[:3], codec.slot_bytes)
    pool = torch.zeros((kv.shape[0], 2, *kv.shape[1:3], codec.slot_bytes), dtype=torch.uint8, device=kv.device)
    pool[:, 1] = slots
    layer = pool[:, 1]
    return Quantized(case, codec.codes_of(layer), codec.scales_of(layer), codec.decode(layer, torch.float32))


def codec_of(heads: Heads, dtype: torch.dtype) -> SlotCodec:
    return SlotCodec(heads.num_kv_heads, heads.head_dim, dtype, heads.num_kv_heads * (heads.head_dim + 4))


def queries(some: Quantized, count: int) -> Tensor:
    heads = some.case.heads
    return torch.randn(count, heads.num_q_heads, heads.head_dim, device=some.kv.device).to(some.case.kv.dtype)


def compare(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    if not expected.numel():
        return  # a chunk of no tokens
    error = (got.float() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def check_decode(some: Quantized, attend, *, tolerance: float, window: int | None = None, **kwargs) -> None:
    case, q = some.case, queries(some, len(some.case.lens))
    scale = case.heads.head_dim**-0.5
    got = attend(
        q, some.codes, case.tables, case.rows, case.lens, scale=scale, window=window, scales=some.scales, **kwargs
    )
    for seq, length in enumerate(case.lens.tolist()):
        if length == 0:
            assert not got[seq].any()
            continue
        expected = paged_attention_dense_ref(
            q[seq : seq + 1],
            some.kv,
            case.table(seq),
            length - 1,
            scale=scale,
            window=window,
            softcap=kwargs.get("softcap"),
        )
        compare(got[seq], expected[0], tolerance)


def check_prefill(
    some: Quantized, counts, *, invariant: bool, tolerance: float, window: int | None = None, **kwargs
) -> None:
    case, q = some.case, queries(some, sum(counts))
    heads, scale, size = case.heads, case.heads.head_dim**-0.5, q.element_size()
    rows = invariant_rows(size, heads.group) if invariant else prefill_rows(heads.head_dim, size, heads.group)
    chunks, starts = chunk_rows(case, counts)
    tiles = torch.tensor(prefill_tiles(counts, starts, heads.group, rows), dtype=torch.int32, device=q.device).view(
        -1, 2
    )
    rule = {"scale": scale, "window": window, "scales": some.scales, **kwargs}
    if invariant:
        got = invariant_prefill(q, some.codes, case.tables, chunks, tiles, **rule)
    else:
        got = paged_prefill(q, some.codes, case.tables, chunks, tiles, rows=rows, **rule)
    first = 0
    for seq, (count, start) in enumerate(zip(counts, starts, strict=True)):
        span = slice(first, first + count)
        expected = paged_attention_dense_ref(
            q[span], some.kv, case.table(seq), start, scale=scale, window=window, softcap=kwargs.get("softcap")
        )
        compare(got[span], expected, tolerance)
        first += count


@interpreted
@pytest.mark.parametrize("heads", [SMALL, Heads(3, 1, 20)], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_decode_reads_codes(codes, heads, window):
    some = quantized(paged_case(heads, [19, 0, 1], block_size=4), codes)
    for splits in (1, 3):
        check_decode(some, paged_decode, window=window, splits=splits, tile=16, tolerance=2e-5)
        check_decode(some, invariant_decode, window=window, splits=splits, tile=16, split_tokens=16, tolerance=2e-5)


@interpreted
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("invariant", [False, True])
def test_prefill_reads_codes(codes, window, invariant):
    some = quantized(paged_case(SMALL, [21, 6, 40], block_size=4), codes)
    more = {"split_tokens": 16} if invariant else {}
    check_prefill(some, [21, 1, 9], invariant=invariant, window=window, tile=16, tolerance=2e-5, **more)


@interpreted
def test_softcap_comes_behind_the_scales(codes):
    some = quantized(paged_case(SMALL, [19, 1], block_size=4), codes)
    check_decode(some, paged_decode, softcap=0.5, tile=16, tolerance=2e-5)
    check_prefill(some, [7, 1], invariant=True, softcap=0.5, tile=16, split_tokens=16, tolerance=2e-5)


@interpreted
def test_codes_in_half_precision(codes):
    """Small values, too: a weight times a scale of theirs is below what float16 has."""
    for size in (1.0, 0.01):
        case = paged_case(SMALL, [33], block_size=16, dtype=torch.float16)
        case.kv[:, 1] *= size
        some = quantized(case, codes)
        check_decode(some, paged_decode, splits=2, tile=16, tolerance=2e-3)
        check_decode(some, invariant_decode, splits=2, tile=16, split_tokens=16, tolerance=2e-3)
        check_prefill(some, [33], invariant=False, tile=16, tolerance=2e-3)


def of_any_size(
    heads: Heads, lens, codes: torch.dtype, dtype: torch.dtype, *, device: str = "cpu"
) -> tuple[Quantized, Tensor]:
    """Tokens' heads and rows of q whose magnitudes lie thousands apart; and q."""
    case = paged_case(heads, lens, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(3)
    sizes = torch.randn(case.kv.shape[:-1], generator=generator, device=device)[..., None]
    case.kv.copy_(case.kv.float() * torch.exp(sizes * torch.tensor([1.0, 2.5], device=device)[:, None, None, None] - 4))
    some = quantized(case, codes)
    q = queries(some, len(lens))
    return some, q * torch.exp(2 * torch.randn(*q.shape[:2], 1, generator=generator, device=device)).to(dtype)


def check_any_size(heads: Heads, lens, codes: torch.dtype, dtype: torch.dtype, *, tolerance: float, **kwargs) -> None:
    some, q = of_any_size(heads, lens, codes, dtype, device=kwargs.pop("device", "cpu"))
    case = some.case
    got = paged_decode(q, some.codes, case.tables, case.rows, case.lens, scale=1.0, scales=some.scales, **kwargs)
    for seq, length in enumerate(lens):
        rule = {name: kwargs.get(name) for name in ("window", "softcap")}
        row = q[seq : seq + 1]
        compare(
            got[seq],
            paged_attention_dense_ref(row, some.kv, case.table(seq), length - 1, scale=1.0, **rule)[0],
            tolerance,
        )


@interpreted
@pytest.mark.parametrize(
    ("heads", "rule"),
    [(SMALL, {}), (Heads(3, 1, 20), {"window": 5}), (Heads(12, 1, 64), {"softcap": 30.0, "splits": 3})],
    ids=str,
)
def test_magnitudes_of_tokens_and_queries_may_lie_far_apart_in_half_precision(codes, heads, rule):
    check_any_size(heads, [70, 1, 32], codes, torch.float16, tolerance=2e-3, **rule)
    check_any_size(heads, [70, 1, 32], codes, torch.bfloat16, tolerance=8e-3, **rule)


@interpreted
@pytest.mark.parametrize("part", [0, 1])
def test_a_scale_that_is_not_a_number_is_seen_by_its_readers(codes, part):
    some = quantized(paged_case(SMALL, [40, 40], dtype=torch.bfloat16), codes)
    case = some.case
    some.scales[case.table(0)[1], part, 3, 1] = float("nan")
    q = queries(some, 2)
    got = paged_decode(q, some.codes, case.tables, case.rows, case.lens, scale=1.0, scales=some.scales)
    assert got[0, 2:].isnan().all(), "heads of the second KV head"
    assert not got[0, :2].isnan().any()
    assert not got[1].isnan().any()


def test_pairs_are_read_for_models_in_sixteen_bits():
    some = quantized(paged_case(SMALL, [5], block_size=4), torch.int8)
    q, kv = queries(some, 1), some.codes
    assert not takes_pairs(q, kv), "float32 needs products in float32"
    assert takes_pairs(q.half(), kv)
    room = torch.zeros(kv.shape[0] * kv.stride(0) + 1, dtype=torch.int8)
    assert not takes_pairs(q.half(), room[1:].as_strided(kv.shape, kv.stride())), "pairs are not aligned"


def test_loads_are_as_wide_as_slots_allow():
    for heads, grain in ((SMALL, 8), (Heads(4, 4, 16), 16), (Heads(3, 3, 20), 4), (Heads(2, 2, 64), 8)):
        some = quantized(paged_case(heads, [5], block_size=4), torch.int8)
        assert grain_of(some.codes) == grain, heads


@triton.jit
def _widen_kernel(pairs_ptr, even_ptr, odd_ptr, kind_ptr, ASM: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    even, odd = even_odd(tl.load(pairs_ptr + at), kind_ptr.dtype.element_ty, ASM)
    tl.store(even_ptr + at, even)
    tl.store(odd_ptr + at, odd)


def check_widened(codes: torch.dtype, device: str) -> None:
    """Every code, on both sides of a pair, as float16 exactly. The interpreter is wrong about NaN, and about floating-point
    codes below the least normal one."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    both = torch.stack((every.repeat(4), every.flip(0).repeat(4)), dim=-1)
    even, odd = (torch.empty(1024, dtype=torch.float16, device=device) for _ in range(2))
    kind = torch.empty(1, dtype=codes, device=device)
    _widen_kernel[(1,)](both.view(torch.int16), even, odd, kind, ASM=device != "cpu", num_warps=1)
    for got, column in ((even, 0), (odd, 1)):
        expected = both[:, column].contiguous().view(codes).float()
        sure = torch.ones_like(expected, dtype=torch.bool)
        if device == "cpu" and codes.is_floating_point:
            sure = expected.isfinite() & (expected.abs() >= torch.finfo(codes).smallest_normal)
        torch.testing.assert_close(got.float()[sure], expected[sure], rtol=0, atol=0, equal_nan=True)


@interpreted
def test_every_code_is_widened_exactly(codes):
    check_widened(codes, "cpu")


@interpreted
def test_a_querys_bits_are_the_same_in_decode_and_in_any_chunk(codes):
    """Batch-invariant: alone, and as the last row of chunks."""
    some = quantized(paged_case(SMALL, [40], block_size=4), codes)
    case, q = some.case, queries(some, 9)
    rule = {"scale": 0.25, "scales": some.scales, "tile": 16, "split_tokens": 16}
    alone = invariant_decode(q[-1:], some.codes, case.tables, case.rows, case.lens, splits=2, **rule)
    for count in (1, 4, 9):
        chunks, starts = chunk_rows(case, [count])
        rows = invariant_rows(4, case.heads.group)
        tiles = torch.tensor(prefill_tiles([count], starts, case.heads.group, rows), dtype=torch.int32).view(-1, 2)
        got = invariant_prefill(q[-count:].contiguous(), some.codes, case.tables, chunks, tiles, **rule)
        assert torch.equal(got[-1], alone[0])


def check_write(heads: Heads, codes: torch.dtype, dtype: torch.dtype, *, device: str, scale: float = 1.0) -> None:
    """Codes and scales are the reference's of what is stored without them, to the bit."""
    num_tokens, block_size, codec = 9, 4, codec_of(heads, codes)
    qkv = torch.randn(num_tokens, (heads.num_q_heads + 2 * heads.num_kv_heads) * heads.head_dim, device=device) * scale
    qkv[3, -3:] = float("inf")
    qkv[4] = 0.0
    qkv = qkv.to(dtype)
    angles = torch.rand(64, heads.head_dim // 2, device=device) * 6
    positions = torch.randint(0, 64, (num_tokens,), device=device, dtype=torch.int32)
    slots = torch.randperm(12 * block_size, device=device)[:num_tokens].to(torch.int32)
    slots[0] = -1
    floats = torch.zeros((12, 2, block_size, heads.num_kv_heads, heads.head_dim), dtype=dtype, device=device)
    pool = torch.full((12, 2, block_size, codec.slot_bytes), 7, dtype=torch.uint8, device=device)
    rule = {"num_q_heads": heads.num_q_heads}
    where = (angles.cos(), angles.sin(), positions, slots)
    q = rope_write(qkv.clone(), floats, *where, **rule)
    again = rope_write(qkv.clone(), codec.codes_of(pool), *where, scales=codec.scales_of(pool), dtype=dtype, **rule)
    assert torch.equal(again[1:].nan_to_num(), q[1:].nan_to_num())
    block, offset = (slots[1:] // block_size).long(), (slots[1:] % block_size).long()
    for part in range(2):
        expected = codec.encode(floats[block, part, offset])
        found = pool[block, part, offset]
        assert torch.equal(codec.codes_of(found).float(), codec.codes_of(expected).float())
        torch.testing.assert_close(codec.scales_of(found), codec.scales_of(expected), rtol=0, atol=0, equal_nan=True)
    assert not codec.scales_of(pool[block[3], :, offset[3]]).any(), "zeros"
    assert codec.scales_of(pool[block[2], 1, offset[2]]).isnan().any(), "infinities"
    pool[block, :, offset] = 7
    assert (pool == 7).all(), "a slot of another token was written"
    # The same out of a projection in splits.
    wide = qkv.float()
    splits = torch.stack((wide * 0.5, wide * 0.5))
    other = torch.zeros_like(pool)
    rope_write(splits, codec.codes_of(other), *where, scales=codec.scales_of(other), dtype=dtype, **rule)
    whole = torch.zeros_like(pool)
    rope_write(qkv.clone(), codec.codes_of(whole), *where, scales=codec.scales_of(whole), dtype=dtype, **rule)
    assert torch.equal(other, whole)


@interpreted
@pytest.mark.parametrize(
    ("heads", "dtype", "scale"),
    [  # each pair of two of them; a GPU has all
        (SMALL, torch.float32, 1.0),
        (SMALL, torch.float16, 1e-3),
        (Heads(3, 1, 20), torch.float32, 1e-3),
        (Heads(3, 1, 20), torch.float16, 1.0),
    ],
    ids=str,
)
def test_what_is_written_are_the_references_codes(codes, heads, dtype, scale):
    check_write(heads, codes, dtype, device="cpu", scale=scale)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: a.update(scales=None), "q is torch.float32"),
        (lambda a: a.update(scales=a["scales"][:, :, :2]), "do not fit"),
        (lambda a: a.update(scales=a["scales"].double()), "torch.float64"),
        (lambda a: a.update(scales=a["scales"].repeat(1, 1, 1, 2)[..., ::2]), "contiguous"),
    ],
)
def test_scales_that_do_not_fit_are_refused(spoil, words):
    some = quantized(paged_case(SMALL, [5], block_size=4), torch.int8)
    arguments = {"scales": some.scales}
    spoil(arguments)
    case = some.case
    with pytest.raises(ValueError, match=words):
        paged_decode(queries(some, 1), some.codes, case.tables, case.rows, case.lens, scale=1.0, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "block_size"), SHAPES, ids=str)
def test_attention_over_codes_gpu(cuda, codes, heads, dtype, block_size):
    lens = [1, 17, 1024, 3001, 0, 130]
    some = quantized(paged_case(heads, lens, block_size=block_size, dtype=dtype, device=cuda), codes)
    tolerance = TOLERANCE[dtype] * 1.5
    for window in (None, 100):
        for splits in (1, 5):
            check_decode(some, paged_decode, window=window, splits=splits, tolerance=tolerance)
            check_decode(some, invariant_decode, window=window, splits=splits, tolerance=tolerance)
        for invariant in (False, True):
            check_prefill(some, [1, 17, 300, 70, 0, 9], invariant=invariant, window=window, tolerance=tolerance)


@pytest.mark.gpu
def test_every_code_is_widened_exactly_gpu(cuda, codes):
    check_widened(codes, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [LLAMA_8B, Heads(16, 2, 80), Heads(8, 1, 256)], ids=str)
def test_magnitudes_of_tokens_and_queries_may_lie_far_apart_in_half_precision_gpu(cuda, codes, heads):
    for rule in ({}, {"splits": 3, "window": 100}, {"softcap": 30.0}):
        check_any_size(heads, [1, 17, 1000, 64], codes, torch.float16, tolerance=2e-3, device=cuda, **rule)
        check_any_size(heads, [1, 17, 1000, 64], codes, torch.bfloat16, tolerance=8e-3, device=cuda, **rule)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "block_size"), SHAPES[:6], ids=str)
def test_what_is_written_are_the_references_codes_gpu(cuda, codes, heads, dtype, block_size):
    for scale in (1.0, 1e-3):
        check_write(heads, codes, dtype, device=cuda, scale=scale)


@pytest.mark.gpu
def test_a_querys_bits_are_the_same_in_decode_and_in_any_chunk_gpu(cuda, codes):
    some = quantized(paged_case(LLAMA_8B, [2000], dtype=torch.bfloat16, device=cuda), codes)
    case, q = some.case, queries(some, 700)
    rule = {"scale": 0.1, "scales": some.scales}
    alone = invariant_decode(q[-1:], some.codes, case.tables, case.rows, case.lens, **rule)
    for splits in (2, 4):
        assert torch.equal(
            invariant_decode(q[-1:], some.codes, case.tables, case.rows, case.lens, splits=splits, **rule), alone
        )
    for count in (1, 16, 64, 700):
        chunks, starts = chunk_rows(case, [count])
        rows = invariant_rows(2, case.heads.group)
        flat = prefill_tiles([count], starts, case.heads.group, rows)
        tiles = torch.tensor(flat, dtype=torch.int32, device=cuda).view(-1, 2)
        got = invariant_prefill(q[-count:].contiguous(), some.codes, case.tables, chunks, tiles, **rule)
        assert torch.equal(got[-1], alone[0])
