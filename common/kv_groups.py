"""Which tokens of which group a hand-off moves, a sequence keeps, and a prefix hit may use. Pure.

The reader of a hand-off derives what must arrive from the format and its own request (`expected_ranges`), never from what the
sender lists: a group that is missing is found before a token is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.kv_format import KvFormat, KvGroup, KvKind


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Tokens [first, end) of the group with this index in `KvFormat.groups`; of a recurrent group its state after `end`."""

    group: int
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


def _step(kv: KvFormat) -> int:
    """Tokens after which the blocks of all groups end."""
    return math.lcm(*(group.block_size for group in kv.groups))


def hit_end(block_size: int, num_tokens: int) -> int:
    """Where the longest hit ends that a prompt of so many tokens may use: its last token is always computed."""
    return max(0, num_tokens - 1) // block_size * block_size


def expected_ranges(kv: KvFormat, first_token: int, end: int, *, reusable: bool = False) -> tuple[GroupRange, ...]:
    """What must arrive so that the token at `end` can be computed, when tokens before `first_token` are held already. One range
    for each group; of a window group from the block on that the next token can see. `reusable`: that the token behind
    `hit_end` can see, so that the same tokens are a hit afterwards: one block more at most."""
    if first_token >= end:
        return ()
    ranges = []
    seen_from = hit_end(_step(kv), end) if reusable else end
    for index, group in enumerate(kv.groups):
        if group.kind is KvKind.RECURRENT:
            first = end - 1
        else:
            first = max(first_token, min(end, group.first_block(seen_from) * group.block_size))
        if first < end:
            ranges.append(GroupRange(index, first, end))
    return tuple(ranges)


def longest_hit(kv: KvFormat, present: Sequence[Sequence[bool]], limit: int) -> int:
    """How many leading tokens may be taken from a prefix cache: the most after which every group has what the next token reads.

    A hit ends where the blocks of all groups end. A full group needs all of its blocks up to there; a window group those that
    reach into the window; a recurrent group the checkpoint at exactly that place.

    Args:
        present: by group, whether its block i is cached; of a recurrent group, whether the state after i + 1 blocks is.
        limit: tokens that may be used at most.
    """
    step = _step(kv)
    best = 0
    # By group: the first block of the run of cached ones that ends before a block.
    starts = [_run_starts(held) for held in present]
    for num_tokens in range(step, limit + 1, step):
        for group, held, start in zip(kv.groups, present, starts, strict=True):
            blocks = num_tokens // group.block_size
            if blocks > len(held):
                return best
            if group.kind is KvKind.RECURRENT:
                if not held[blocks - 1]:
                    break
            elif start[blocks] > group.first_block(num_tokens):
                break
        else:
            best = num_tokens
    return best


def _run_starts(held: Sequence[bool]) -> list[int]:
    """[blocks + 1]: for n, the first block of the run of cached blocks that ends with block n - 1; n where that is missing."""
    starts = [0]
    for index, there in enumerate(held):
        starts.append(starts[-1] if there else index + 1)
    return starts


def most_blocks_held(group: KvGroup, num_tokens: int, chunk: int = 1) -> int:
    """Blocks that a sequence of at most `num_tokens` tokens holds at one time, when it is computed in chunks of at most `chunk`
    tokens: a window group frees what is behind the window after each chunk."""
    all_blocks = -(-num_tokens // group.block_size)
    if not group.window:
        return all_blocks
    return min(all_blocks, -(-(group.window - 1 + chunk) // group.block_size) + 1)


def holds(kv: KvFormat, group_blocks: Sequence[int], num_tokens: int, chunk: int, num_seqs: int = 1) -> bool:
    """Whether empty pools of so many blocks, by group, can hold `num_seqs` sequences of `num_tokens` tokens."""
    return all(
        num_seqs * most_blocks_held(group, num_tokens, chunk) <= blocks
        for group, blocks in zip(kv.groups, group_blocks, strict=True)
    )


UNBOUNDED = 1 << 30
"""Blocks: as many as there may be, and more than any pool has."""


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What a worker's sequences can use of a window group at one time. Its pool has no more than that: longer sequences need more
    blocks of the full groups only.

    Args:
        max_num_seqs, max_num_batched_tokens: see EngineConfig.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def group_blocks(self, kv: KvFormat, num_blocks: int) -> tuple[int, ...]:
        """Blocks of each group's pool. The first group has `num_blocks`, a window group behind it no more than all sequences and
        one chunk can hold."""
        return tuple(
            min(num_blocks, self._most(group)) if index and group.window else num_blocks
            for index, group in enumerate(kv.groups)
        )

    def pool_bytes(self, kv: KvFormat, num_blocks: int, parts: Sequence[KvFormat] = ()) -> int:
        """Bytes of all groups' pools. Args: parts: of `kv`, those of the ranks that are counted; empty: one has everything."""
        counts = {group.name: n for group, n in zip(kv.groups, self.group_blocks(kv, num_blocks), strict=True)}
        return sum(
            counts[group.name] * group.block_bytes(part.shard) for part in parts or (kv,) for group in part.groups
        )

    def most_blocks(self, kv: KvFormat, size_bytes: int, parts: Sequence[KvFormat] = ()) -> int:
        """The largest `num_blocks` whose pools fit into `size_bytes`; 0: not one block of each group. UNBOUNDED for ranks with
        window groups only, whose pools grow no more. Args: parts: see pool_bytes."""
        low, high = 0, 1
        while high < UNBOUNDED and self.pool_bytes(kv, high, parts) <= size_bytes:
            low, high = high, high * 2
        if high >= UNBOUNDED:
            return UNBOUNDED
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool_bytes(kv, middle, parts) <= size_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _most(self, group: KvGroup) -> int:
        held = -(-group.window // group.block_size) + 1
        return self.max_num_seqs * held + -(-self.max_num_batched_tokens // group.block_size)
