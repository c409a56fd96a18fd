"""Paged pools with fragmented block tables, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """num_q_heads is a multiple of num_kv_heads."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


LLAMA_8B = Heads(32, 8, 128)


@dataclass(slots=True)
class PagedCase:
    """A pool in which every sequence owns scattered blocks; the rest is NaN, so that reading it is detected.

    Args:
        pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        kv: the view of one layer, [num_blocks, 2, block_size, num_kv_heads, head_dim].
        tables: [num_seqs + 1, max_blocks], int32; entries past a sequence's end name no block (-1).
        rows: [num_seqs], int32: the row of `tables` of each sequence, not in order.
        lens: [num_seqs], int32.
    """

    heads: Heads
    pool: Tensor
    kv: Tensor
    tables: Tensor
    rows: Tensor
    lens: Tensor

    @property
    def block_size(self) -> int:
        return self.kv.shape[2]

    def table(self, seq: int) -> Tensor:
        """Blocks of one sequence, [number of its blocks]."""
        used = -(-int(self.lens[seq]) // self.block_size)
        return self.tables[int(self.rows[seq]), :used]


def paged_case(
    heads: Heads,
    lens: Sequence[int],
    *,
    block_size: int = 16,
    num_layers: int = 2,
    layer: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    poison: bool = True,
    spare_blocks: int = 3,
) -> PagedCase:
    """KV of `lens` tokens in `layer`. poison: fill unowned parts with NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = [-(-length // block_size) for length in lens]
    num_blocks = sum(counts) + spare_blocks
    shape = (num_blocks, num_layers, 2, block_size, heads.num_kv_heads, heads.head_dim)
    fill = float("nan") if poison else 0.0
    pool = torch.full(shape, fill, dtype=dtype, device=device)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(lens) + 1, max([*counts, 1])), -1, dtype=torch.int32)
    rows = torch.arange(len(lens), 0, -1, dtype=torch.int32)
    for seq, count in enumerate(counts):
        tables[int(rows[seq]), :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    kv = pool[:, layer]
    for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
        if not count:
            continue
        own = tables[int(rows[seq]), :count].long().to(device)
        values = torch.randn((count, *kv.shape[1:]), generator=generator, dtype=torch.float32, device=device)
        if poison and length % block_size:
            values[-1, :, length % block_size :] = float("nan")
        kv[own] = values.to(dtype)
    return PagedCase(
        heads, pool, kv, tables.to(device), rows.to(device), torch.tensor(lens, dtype=torch.int32).to(device)
    )


def chunk_rows(case: PagedCase, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
    """`chunks` of paged_prefill for the last counts[i] tokens of each sequence, and the tokens computed before each."""
    rows, starts, first = [], [], 0
    for seq, count in enumerate(counts):
        start = int(case.lens[seq]) - count
        rows.append([first, count, start, int(case.rows[seq])])
        starts.append(start)
        first += count
    return torch.tensor(rows, dtype=torch.int32, device=case.kv.device), starts
