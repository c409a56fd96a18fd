"""Blocks of requests: how many they need, hits in the prefix cache and the host tier, growth, forks, swaps, and entries
of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diptych.engine.messages import CopyKind, KvMode
from diptych.engine.sched.block_pool import BlockPool
from diptych.engine.sched.host_tier import HostTier
from diptych.engine.sched.request import Request, State


class KvCacheManager:
    """Owns the pool and the host tier, and the account of each request: block_ids, num_reserved, num_published,
    shares_tail, swapped.

    Args:
        worth_restoring: whether copying so many tokens from the host tier is better than computing them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        num_host_blocks: int = 0,
        tenant_quota: int | None = None,
        worth_restoring: Callable[[int], bool] = lambda num_tokens: True,
    ) -> None:
        self.host = HostTier(num_host_blocks)
        self.pool = BlockPool(num_blocks, self.host, tenant_quota)
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._worth_restoring = worth_restoring
        self.restored_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_at_admission(self, request: Request) -> int:
        """For all its tokens and the next one, so that a request that was just admitted need not grow at once; and one
        more for each choice that will be forked from it, as far as the pool has them."""
        need = self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))
        count = request.sampling.num_choices
        if count == 1 or request.mode is KvMode.PREFILL or request.num_outputs:
            return need
        return max(need, min(need + count - 1, self.pool.num_blocks))

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request that would not be computed if it were admitted now."""
        return len(self._hits(request)) * self.block_size

    def fits(self, request: Request, spare: int = 0) -> bool:
        """Could it be admitted now, with `spare` blocks left over?"""
        hits = self._hits(request)
        left = self.pool.available - self.pool.num_evictable(hits)
        return self.blocks_at_admission(request) - len(hits) + spare <= left

    def admit(self, request: Request, *, reserve: bool) -> bool:
        """Pin the cached prefix, restore what follows it in the host tier, and allocate (or, with `reserve`, count) the
        blocks of the rest; False: nothing was allocated.

        On success `num_computed` is the end of the cached prefix; of a swapped request it is unchanged. A hit ends
        before the last token whose logits are needed, so that shared blocks are never written: at most
        `block_size * ((num_prompt - 1) // block_size)` tokens, and after a preemption the same with all tokens.
        """
        if request.swapped:
            return self._swap_in(request)
        hits = self._hits(request)
        self.pool.pin(hits)
        slots, keys = self._stored_behind(request, len(hits))
        self.host.protect(keys)
        need = self.blocks_at_admission(request) - len(hits)
        # Restored blocks need ids at once, even where the rest is only counted.
        blocks = self.pool.allocate(len(slots) if reserve else need) if need <= self.pool.available else None
        if blocks is None:
            self.host.protect(())
            self.pool.release(reversed(hits))
            return False
        if reserve:
            request.num_reserved = need - len(slots)
            reserved = self.pool.reserve(request.num_reserved)  # evicts, too: the slots are still to be read
            assert reserved, "counted above"
        self.host.protect(())
        for slot, block, key in zip(slots, blocks, keys, strict=False):
            self.pool.copy(CopyKind.FROM_HOST, slot, block)
            self.pool.publish(block, key, request.tenant)
        request.block_ids.extend(hits)
        request.block_ids.extend(blocks)
        request.num_published = len(hits) + len(slots)
        request.num_computed = request.num_published * self.block_size
        self.restored_tokens += len(slots) * self.block_size
        return True

    def bind(self, request: Request) -> None:
        """Give the reserved blocks their ids."""
        if request.num_reserved:
            request.block_ids.extend(self.pool.bind(request.num_reserved))
            request.num_reserved = 0

    def needs_block(self, request: Request) -> bool:
        """A decoding request whose next token has no block of its own."""
        return request.shares_tail or len(request.block_ids) * self.block_size < len(request.token_ids)

    def grow(self, request: Request) -> bool:
        """Give the request a block of its own for the next token: one more, or a copy of a tail that has other owners;
        False when there is no free block."""
        if request.shares_tail:
            return self._own_tail(request)
        block = self.pool.allocate(1)
        if block is None:
            return False
        request.block_ids.extend(block)
        return True

    def fork(self, request: Request, sibling: Request) -> None:
        """The fork owns the computed blocks, too. A request copies a tail that others own before it writes to it."""
        blocks = request.block_ids[: self.blocks_for(request.num_computed)]
        self.pool.pin(blocks)
        sibling.block_ids.extend(blocks)
        sibling.num_computed = request.num_computed
        sibling.num_published = request.num_published
        sibling.converted = request.converted
        if request.num_computed % self.block_size:
            request.shares_tail = sibling.shares_tail = True

    def trim(self, request: Request) -> None:
        """Free blocks beyond those of its tokens and the next one: they were counted for forks, or held rejected
        guesses."""
        keep = self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))
        self.pool.release(reversed(request.block_ids[keep:]))
        del request.block_ids[keep:]

    def swap_out(self, request: Request) -> bool:
        """Copy its computed KV to the host tier and free its blocks; False: no room there, nothing has changed."""
        count = self.blocks_for(request.num_computed)
        slots = self.host.take(count)
        if not count or slots is None:
            return False
        for block, slot in zip(request.block_ids, slots, strict=False):
            self.pool.copy(CopyKind.TO_HOST, block, slot)
        self.free(request)
        request.swapped = slots
        return True

    def publish(self, request: Request) -> None:
        """Enter the blocks that are full by `num_computed` into the prefix cache."""
        full = request.num_computed // self.block_size
        first = request.num_published
        if full <= first or not self._caching or request.converted:
            return
        keys = request.keys(full)
        for i in range(first, full):
            self.pool.publish(request.block_ids[i], keys[i], request.tenant)
        request.num_published = full

    def free(self, request: Request) -> None:
        self.pool.unreserve(request.num_reserved)
        request.num_reserved = 0
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_published = 0
        request.shares_tail = False
        self.host.give(request.swapped)
        request.swapped = []

    def invalidate(self, request: Request) -> None:
        """Nothing that this request read or wrote stays in the prefix cache."""
        self.pool.discard(request.block_ids)

    def check(self, requests: Iterable[Request]) -> list[str]:
        """Full walk: the pool's law, and every reference belongs to a request."""
        owned: dict[int, int] = {}
        reserved = 0
        swapped: list[int] = []
        out: list[str] = []
        for request in requests:
            reserved += request.num_reserved
            swapped.extend(request.swapped)
            for block in request.block_ids:
                owned[block] = owned.get(block, 0) + 1
            if request.num_reserved and request.state is not State.WAITING_FOR_REMOTE_KV:
                out.append(f"attempt {request.attempt} holds a reservation in state {request.state.value}")
            if request.swapped and request.state is not State.PREEMPTED:
                out.append(f"attempt {request.attempt} is swapped out in state {request.state.value}")
        if reserved != self.pool.counts.reserved:
            out.append(f"blocks: reserved {self.pool.counts.reserved}, by the requests' account {reserved}")
        return out + self.host.check(swapped) + self.pool.check(owned)

    def _own_tail(self, request: Request) -> bool:
        index = request.num_computed // self.block_size
        shared = request.block_ids[index]
        if self.pool.refs(shared) > 1:
            block = self.pool.allocate(1)
            if block is None:
                return False
            self.pool.copy(CopyKind.FORK, shared, block[0])
            request.block_ids[index] = block[0]
            self.pool.release((shared,))
        request.shares_tail = False
        return True

    def _swap_in(self, request: Request) -> bool:
        blocks = self.pool.allocate(self.blocks_at_admission(request))
        if blocks is None:
            return False
        for slot, block in zip(request.swapped, blocks, strict=False):
            self.pool.copy(CopyKind.FROM_HOST, slot, block)
        # Copies are carried out in order, so the slots may be reused from here on.
        self.host.give(request.swapped)
        request.swapped = []
        request.block_ids.extend(blocks)
        return True

    def _hits(self, request: Request) -> list[int]:
        if not self._caching or request.swapped:
            return []
        limit = self._hit_limit(request)
        return self.pool.find(request.keys(limit)[:limit])

    def _hit_limit(self, request: Request) -> int:
        """Blocks that may come from a cache."""
        known = request.num_tokens if request.was_admitted else request.num_prompt
        if request.prompt_logprobs_from is not None:
            known = request.prompt_logprobs_from  # the row before that token must be computed
        return (known - 1) // self.block_size

    def _stored_behind(self, request: Request, num_hits: int) -> tuple[list[int], list[bytes]]:
        """Slots and keys of the blocks that follow the hits, if copying them is worth it."""
        if not self.host.num_slots or not self._caching:
            return [], []
        keys = request.keys(limit := self._hit_limit(request))[num_hits:limit]
        slots = self.host.find(keys)
        if not slots or not self._worth_restoring(len(slots) * self.block_size):
            return [], []
        return slots, keys[: len(slots)]
