"""Blocks of requests: what they need, their hits in the prefix cache, growth, and what enters the cache."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.sched.block_pool import BlockPool
from diptych.engine.sched.request import Request, State


class KvCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = enable_prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_at_admission(self, request: Request) -> int:
        """Of all its tokens and the one to come: a request that was just admitted never has to grow at once."""
        return self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))

    def fits(self, request: Request, spare: int = 0) -> bool:
        """Could it be admitted now, leaving `spare` blocks over?"""
        hits = self._hits(request)
        left = self.pool.available - self.pool.num_evictable(hits)
        return self.blocks_at_admission(request) - len(hits) + spare <= left

    def admit(self, request: Request, *, reserve: bool) -> bool:
        """Pin the cached prefix and take (or, with `reserve`, count) the blocks of the rest; False: nothing was taken.

        On success `num_computed` stands at the end of the cached prefix. A hit ends before the last token whose logits are
        needed, so that shared blocks are never written: at most `block_size * ((num_prompt - 1) // block_size)` tokens,
        and after a preemption the same with all tokens.
        """
        hits = self._hits(request)
        self.pool.pin(hits)
        need = self.blocks_at_admission(request) - len(hits)
        if reserve:
            if not self.pool.reserve(need):
                self.pool.release(reversed(hits))
                return False
            request.num_reserved = need
            request.block_ids.extend(hits)
        else:
            blocks = self.pool.allocate(need)
            if blocks is None:
                self.pool.release(reversed(hits))
                return False
            request.block_ids.extend(hits)
            request.block_ids.extend(blocks)
        request.num_computed = len(hits) * self.block_size
        request.num_published = len(hits)
        return True

    def bind(self, request: Request) -> None:
        """Give the reserved blocks their ids."""
        if request.num_reserved:
            request.block_ids.extend(self.pool.bind(request.num_reserved))
            request.num_reserved = 0

    def grow(self, request: Request) -> bool:
        """One more block; False when there is none."""
        block = self.pool.allocate(1)
        if block is None:
            return False
        request.block_ids.extend(block)
        return True

    def publish(self, request: Request) -> None:
        """Enter the blocks that `num_computed` has filled into the prefix cache."""
        full = request.num_computed // self.block_size
        first = request.num_published
        if full <= first or not self._caching:
            return
        keys = request.keys(full)
        for i in range(first, full):
            self.pool.publish(request.block_ids[i], keys[i])
        request.num_published = full

    def free(self, request: Request) -> None:
        self.pool.unreserve(request.num_reserved)
        request.num_reserved = 0
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_published = 0
        request.covered.clear()

    def distrust(self, request: Request) -> None:
        """Nothing that this request read or wrote stays in the prefix cache."""
        self.pool.discard(request.block_ids)

    def check(self, requests: Iterable[Request]) -> list[str]:
        """Full walk: the pool's law, and every reference is some request's."""
        owned: dict[int, int] = {}
        reserved = 0
        out: list[str] = []
        for request in requests:
            reserved += request.num_reserved
            for block in request.block_ids:
                owned[block] = owned.get(block, 0) + 1
            if request.num_reserved and request.state is not State.WAITING_FOR_REMOTE_KV:
                out.append(f"attempt {request.attempt} holds a reservation in state {request.state.value}")
        if reserved != self.pool.counts.reserved:
            out.append(f"blocks: reserved {self.pool.counts.reserved}, by the requests' account {reserved}")
        return out + self.pool.check(owned)

    def _hits(self, request: Request) -> list[int]:
        if not self._caching:
            return []
        known = request.num_tokens if request.state is State.PREEMPTED else request.num_prompt
        limit = (known - 1) // self.block_size
        return self.pool.find(request.keys(limit)[:limit])
