"""Batch-invariant kernels: right within rounding, and the same to the bit in any company, chunk, cache and launch.

Through the interpreter a matrix product is summed in ascending order of k, element by element, as one chain of the GPU's
instructions is (`ordered_dot`): what these tests compare is the order in which our kernels ask for sums. That the instructions
keep it, the tests marked `gpu` show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.bench.kernels.cases import LLAMA_8B, Heads, chunk_rows, paged_case
from diptych.bench.kernels.ordered_dot import replaced
from diptych.kernels.reference_fused import gate_mul_ref, paged_attention_dense_ref
from diptych.kernels.triton_invariant_attention import (
    invariant_decode,
    invariant_prefill,
    invariant_rows,
    prefill_tiles,
)
from diptych.kernels.triton_invariant_matmul import (
    InvariantShape,
    chains_of,
    distinct_launches,
    invariant_matmul,
    invariant_shape,
)
from diptych.kernels.triton_norm import rms_norm
from diptych_tests.gpu_shapes import SHAPES, TOLERANCE

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


@pytest.fixture
def ordered_dot(monkeypatch):
    monkeypatch.setattr(*replaced())


# ---- linear layers ----

SMALL_SHAPES = [
    InvariantShape(16, 16, 16, 4, 2),
    InvariantShape(32, 16, 32, 4, 3),
    InvariantShape(16, 32, 64, 8, 3, tma=True),
]


def a_linear(rows, size, columns, dtype=torch.float32, device="cpu"):
    x = torch.randn(rows, size, device=device).to(dtype)
    weight = (torch.randn(2 * columns, size, device=device) * size**-0.5).to(dtype)
    bias = torch.randn(2 * columns, device=device).to(dtype)
    return x, weight, bias


def check_matmul(rows, size, columns, *, dtype, device="cpu", shape=None, tolerance):
    x, weight, bias = a_linear(rows, size, columns, dtype, device)
    product = x.double() @ weight.double().T
    got = {
        "plain": (invariant_matmul(x, weight, shape=shape), product),
        "bias": (invariant_matmul(x, weight, bias, shape=shape), product + bias.double()),
        "silu": (invariant_matmul(x, weight, silu=True, shape=shape), gate_mul_ref(product.float()).double()),
        "chains": (invariant_matmul(x, weight, chains=2, shape=shape).double().sum(0), product),
    }
    for name, (out, expected) in got.items():
        error = (out.double() - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@interpreted
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 64, 32), (3, 300, 20), (17, 288, 16)])
def test_matmul_small(rows, size, columns, shape):
    check_matmul(rows, size, columns, dtype=torch.float32, shape=shape, tolerance=1e-5)


@interpreted
@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_rows_bits_depend_on_the_row_alone(dtype):
    """In any number of rows, at any place among them, and in any launch."""
    x, weight, bias = a_linear(21, 272, 12, dtype)
    for fields in ({}, {"bias": bias}, {"silu": True}, {"chains": 2}):
        alone = {i: invariant_matmul(x[i : i + 1], weight, shape=SMALL_SHAPES[0], **fields) for i in (0, 4, 8, 20)}
        for shape in (*SMALL_SHAPES, None):
            for span in (slice(0, 21), slice(4, 9), slice(20, 21)):
                some = invariant_matmul(x[span], weight, shape=shape, **fields)
                for i in set(alone) & set(range(span.start, span.stop)):
                    row = some[..., i - span.start : i - span.start + 1, :]
                    assert torch.equal(row, alone[i]), f"{fields.keys()}, {shape}, row {i} of {span}"


@interpreted
@pytest.mark.usefixtures("ordered_dot")
def test_the_order_of_sums_is_seen_by_these_tests():
    """With other chains the bits are others, else the test above could not fail."""
    x, weight, _ = a_linear(5, 300, 24)
    one, two = invariant_matmul(x, weight), invariant_matmul(x, weight, chains=2)
    assert not torch.equal(one, two[0] + two[1])
    normed = rms_norm(two, torch.ones(48), 1e-5)
    assert torch.equal(normed[2:3], rms_norm(two[:, 2:3].contiguous(), torch.ones(48), 1e-5))


def test_what_does_not_fit_is_refused():
    x, weight, bias = a_linear(3, 8, 4)
    for call, words in (
        (lambda: invariant_matmul(x, weight.half()), "does not fit"),
        (lambda: invariant_matmul(x, weight[:5], silu=True), "not gate and up"),
        (lambda: invariant_matmul(x, weight, silu=True, chains=2), "the whole sum"),
        (lambda: invariant_matmul(x, weight, bias, chains=2), "the whole sum"),
        (lambda: invariant_matmul(x, weight, bias[:3]), "does not fit 8 columns"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_chains_follow_from_the_weight_and_every_launch_is_compiled_before():
    assert [chains_of(*w) for w in ((4096, 14336), (4096, 4096), (6144, 4096), (4096, 1024))] == [2, 2, 1, 1]
    for columns, silu, chains in ((4096, False, 2), (14336, True, 1), (128256, False, 1), (6144, False, 1)):
        known = {
            (invariant_shape(rows, columns, silu=silu, chains=chains), rows <= 128)
            for rows in distinct_launches(columns, silu=silu, chains=chains, half=True, most_rows=16_384)
        }
        for rows in (*range(1, 600), *range(600, 16_385, 61)):
            assert (invariant_shape(rows, columns, silu=silu, chains=chains), rows <= 128) in known


# ---- attention ----


def attend(case, q, plan, *, split_tokens, tile, window=None, softcap=None, splits=1):
    """Attention of sequences whose last tokens are queries. plan: of each sequence in the call, how many of its last tokens
    one call computes; 1: a decoding row. Returns: outputs, by (sequence, position)."""
    heads, device, out = case.heads, case.kv.device, {}
    rule = {
        "scale": heads.head_dim**-0.5, "window": window, "softcap": softcap, "split_tokens": split_tokens, "tile": tile
    }  # fmt: skip
    decoding = [seq for seq, count in plan.items() if count == 1]
    if decoding:
        queries = torch.stack([q[seq][-1] for seq in decoding])
        lens, rows = (
            torch.tensor([int(t[s]) for s in decoding], dtype=torch.int32, device=device)
            for t in (case.lens, case.rows)
        )
        got = invariant_decode(queries, case.kv, case.tables, rows, lens, splits=splits, **rule)
        out |= {(seq, int(case.lens[seq]) - 1): row for seq, row in zip(decoding, got, strict=True)}
    chunks = [(seq, count) for seq, count in plan.items() if count > 1]
    if chunks:
        counts = [count for _, count in chunks]
        starts = [int(case.lens[seq]) - count for seq, count in chunks]
        table, first = [], 0
        for (seq, count), start in zip(chunks, starts, strict=True):
            table.append([first, count, start, int(case.rows[seq])])
            first += count
        work = prefill_tiles(counts, starts, heads.group, invariant_rows(case.kv.element_size(), heads.group))
        int32 = {"dtype": torch.int32, "device": device}
        got = invariant_prefill(
            torch.cat([q[seq][-count:] for seq, count in chunks]), case.kv, case.tables,
            torch.tensor(table, **int32), torch.tensor(work, **int32).view(-1, 2), **rule,
        )  # fmt: skip
        at = 0
        for (seq, count), start in zip(chunks, starts, strict=True):
            out |= {(seq, start + i): got[at + i] for i in range(count)}
            at += count
    return out


def cut_to(case, lens):
    """The same sequences with fewer tokens."""
    return replace(case, lens=torch.tensor(lens, dtype=torch.int32, device=case.kv.device))


def check_attention(heads, lens, *, block_size, dtype, split_tokens, tile, tolerance, device="cpu", window=None,
                    softcap=None, exact=True):  # fmt: skip
    """Whole prompts against the reference; then chunks behind a cached prefix, and decoding rows alone and in company by one
    program or several, to the bit."""
    case = paged_case(heads, lens, block_size=block_size, dtype=dtype, device=device)
    q = [torch.randn(n, heads.num_q_heads, heads.head_dim, device=device).to(dtype) for n in lens]
    rule = {"split_tokens": split_tokens, "tile": tile, "window": window, "softcap": softcap}
    whole = attend(case, q, dict(enumerate(lens)), **rule)
    for seq, length in enumerate(lens):
        expected = paged_attention_dense_ref(
            q[seq], case.kv, case.table(seq), 0, scale=heads.head_dim**-0.5, window=window, softcap=softcap
        )
        got = torch.stack([whole[seq, i] for i in range(length)]).float()
        error = (got - expected).norm() / expected.norm()
        assert error < tolerance, f"sequence {seq}: relative error {error:.2e}"
    if not exact:
        return
    different = {}

    def compare(name, some):
        for key, row in some.items():
            if not torch.equal(row, whole[key]):
                different.setdefault(name, []).append((key, int((row != whole[key]).sum())))

    for seq, length in enumerate(lens):
        compare("alone", attend(case, q, {seq: length}, **rule))
        for count in sorted({1, 2, length // 3, length - 5} - {0}):
            if 0 < count <= length:
                compare(f"the last {count}", attend(case, q, {seq: count}, **rule))
    for splits in (1, 2, 5):
        compare(
            f"decoding, {splits} programs", attend(case, q, dict.fromkeys(range(len(lens)), 1), splits=splits, **rule)
        )
    # Every position where a tile or a split ends is once the last one.
    for end in sorted(
        {1, tile - 1, tile, tile + 1, split_tokens - 1, split_tokens, split_tokens + 1, 2 * split_tokens}
    ):
        if end <= min(lens):
            shorter = cut_to(case, [end] * len(lens))
            queries = [x[:end] for x in q]
            for splits in (1, 3):
                compare(f"cut to {end}", attend(shorter, queries, {0: 1}, splits=splits, **rule))
            compare(f"cut to {end}, chunk", attend(shorter, queries, {0: end, len(lens) - 1: min(end, 2)}, **rule))
    assert not different, {name: some[:4] for name, some in different.items()}


@interpreted
@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("heads", "dtype", "window", "softcap"),
    [
        (Heads(4, 2, 16), torch.float32, None, None),
        (Heads(3, 1, 20), torch.float32, 21, None),
        (Heads(4, 2, 16), torch.float16, None, None),
        (Heads(2, 1, 16), torch.float16, 37, 5.0),
    ],
    ids=str,
)
def test_attention_small(heads, dtype, window, softcap):
    check_attention(
        heads, [65, 67], block_size=8, dtype=dtype, split_tokens=32, tile=16, window=window, softcap=softcap,
        tolerance=2e-3 if dtype == torch.float16 else 2e-5,
    )  # fmt: skip


@interpreted
def test_padded_rows_are_zero_and_a_tile_must_divide_a_split():
    case = paged_case(Heads(4, 2, 16), [0, 5], block_size=4)
    q = torch.randn(2, 4, 16)
    for splits in (1, 2):
        got = invariant_decode(
            q, case.kv, case.tables, case.rows, case.lens, scale=0.25, splits=splits, split_tokens=32, tile=16
        )
        assert not got[0].any()
        assert got[1].isfinite().all()
    with pytest.raises(ValueError, match="does not divide"):
        invariant_decode(q, case.kv, case.tables, case.rows, case.lens, scale=0.25, split_tokens=40, tile=16)
    with pytest.raises(ValueError, match="splits is 0"):
        invariant_decode(q, case.kv, case.tables, case.rows, case.lens, scale=0.25, splits=0)
    chunks, _ = chunk_rows(case, [0, 5])
    with pytest.raises(ValueError, match="rows of 4 and of 2"):
        invariant_prefill(q, case.kv, case.tables, chunks[:, :3], chunks[:, :2], scale=0.25)


# ---- on a GPU, in the shapes that are launched there ----


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 200, 700])
def test_matmul_gpu(cuda, rows):
    for size, columns in ((4096, 2048), (1000, 333)):
        check_matmul(rows, size, columns, dtype=torch.bfloat16, device=cuda, tolerance=8e-3)
    check_matmul(rows, 256, 64, dtype=torch.float32, device=cuda, tolerance=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_rows_bits_depend_on_the_row_alone_gpu(cuda, dtype):
    """In launches of every kind that a model of 8 billion parameters has: 1 to 64 rows, to 256, and more."""
    big = dtype != torch.float32
    for columns, size, fields in (
        (6144, 4096, {}), (4096, 4096, {"chains": 2}), (14336, 4096, {"silu": True}), (4096, 14336, {"chains": 2}),
        (32_000, 4096, {}),
    ) if big else ((384, 256, {}), (192, 320, {"silu": True})):  # fmt: skip
        x, weight, _ = a_linear(2100 if big else 300, size, columns, dtype, cuda)
        weight = weight if "silu" in fields else weight[:columns]
        whole = invariant_matmul(x, weight, **fields)
        for first, count in ((0, 1), (5, 1), (3, 8), (10, 64), (64, 65), (100, 130), (200, 256), (300, 700)):
            if first + count <= x.shape[0]:
                some = invariant_matmul(x[first : first + count], weight, **fields)
                expected = whole[..., first : first + count, :]
                wrong = int((some != expected).sum())
                assert not wrong, f"{columns} x {size} {fields}: {wrong} of {some.numel()} differ at {count} rows"


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "block_size"), SHAPES, ids=str)
def test_attention_gpu(cuda, heads, dtype, block_size):
    for window in (None, 700):
        check_attention(
            heads, [1300, 1100, 1537], block_size=block_size, dtype=dtype, device=cuda, split_tokens=512,
            tile=32 if heads.head_dim > 128 or dtype == torch.float32 else 64, window=window, tolerance=TOLERANCE[dtype],
        )  # fmt: skip


@pytest.mark.gpu
def test_softcap_gpu(cuda):
    check_attention(
        LLAMA_8B, [1300, 600], block_size=16, dtype=torch.bfloat16, device=cuda, split_tokens=512, tile=64, softcap=20.0,
        tolerance=8e-3,
    )  # fmt: skip
