from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.bench.kernels.cases import Heads, chunk_rows, paged_case
from diptych.kernels.reference_fused import paged_attention_dense_ref
from diptych.kernels.triton_prefill import paged_prefill, prefill_rows, prefill_tiles
from diptych_tests.gpu_shapes import SHAPES, TOLERANCE

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(case, counts, *, window=None, softcap=None, rows=16, tile=16, tolerance=2e-5):
    heads, device = case.heads, case.kv.device
    q = torch.randn(sum(counts), heads.num_q_heads, heads.head_dim, device=device).to(case.kv.dtype)
    scale = heads.head_dim**-0.5
    chunks, starts = chunk_rows(case, counts)
    tiles = prefill_tiles(counts, starts, heads.group, rows)
    work = torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2)
    got = paged_prefill(
        q, case.kv, case.tables, chunks, work, scale=scale, softcap=softcap, window=window, rows=rows, tile=tile
    )
    first = 0
    for seq, (count, start) in enumerate(zip(counts, starts, strict=True)):
        span = slice(first, first + count)
        expected = paged_attention_dense_ref(
            q[span], case.kv, case.table(seq), start, scale=scale, window=window, softcap=softcap
        )
        error = (got[span].float() - expected).norm() / expected.norm()
        assert error < tolerance, f"chunk {seq}: {count} tokens after {start}: relative error {error:.2e}"
        first += count


@interpreted
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 20)], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_prefill_small(heads, window):
    check(paged_case(heads, [21, 6, 40], block_size=4), [21, 1, 9], window=window)


@interpreted
@pytest.mark.parametrize(("softcap", "window"), [(0.5, None), (50.0, 5)])
def test_prefill_softcap(softcap, window):
    check(paged_case(Heads(4, 2, 16), [21, 40], block_size=4), [21, 9], window=window, softcap=softcap)


@interpreted
def test_prefill_half_precision():
    check(paged_case(Heads(2, 1, 16), [40], block_size=16, dtype=torch.float16), [23], rows=32, tolerance=2e-3)


def test_tiles_cover_every_token_once_and_the_longest_come_first():
    counts, starts = [10, 1, 7], [0, 500, 30]
    flat = prefill_tiles(counts, starts, group=3, rows=16)
    tiles = list(zip(flat[::2], flat[1::2], strict=True))
    covered = sorted((chunk, token) for chunk, first in tiles for token in range(first, min(first + 5, counts[chunk])))
    assert covered == [(chunk, token) for chunk, count in enumerate(counts) for token in range(count)]
    keys = [starts[chunk] + first for chunk, first in tiles]
    assert keys == sorted(keys, reverse=True)


def test_a_group_that_fits_no_tile_is_refused():
    case = paged_case(Heads(32, 1, 16), [5], block_size=4)
    chunks, _ = chunk_rows(case, [5])
    with pytest.raises(ValueError, match="does not hold a group of 32"):
        paged_prefill(
            torch.zeros(5, 32, 16), case.kv, case.tables, chunks, chunks[:, :2].contiguous(), scale=1.0, rows=16
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "block_size"), SHAPES, ids=str)
def test_prefill_gpu(cuda, heads, dtype, block_size):
    case = paged_case(heads, [700, 1000, 333, 64], block_size=block_size, dtype=dtype, device=cuda)
    tolerance = TOLERANCE[dtype]
    rows = prefill_rows(heads.head_dim, dtype.itemsize, heads.group)
    for window in (None, 100):
        check(case, [700, 300, 1, 50], window=window, rows=rows, tile=None, tolerance=tolerance)
