"""Owners of KV blocks: reference counts, the free list, the prefix cache and reservations.

A block is in exactly one place:

    free ----allocate----> running (refs > 0) ----release, has a key----> cached (refs == 0, evictable, LRU)
     ^                        |  ^                                          |   |
     |                        |  +-----------------pin (a hit)--------------+   |
     +----release, no key-----+                                                 |
     +------------------------------------evict---------------------------------+

An evicted block's bytes may go to the host tier: `take_copies` has the copies in order, and the engine carries them out
before anything is computed or written. With a quota, a tenant that exceeds it evicts its own cached blocks. The order of
evictions, which claims of requests change, is that of engine.sched.cache.retention.

A reservation is a count of free blocks without ids: `reserve` makes room for it by evicting, so

    free + running + cached + reserved == total

holds at every moment, and binding a reservation can never fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from diptych.common.request import CacheClaim
from diptych.common.tiers import DEVICE, TierDump, in_order
from diptych.engine.messages import (
    BlockCopy,
    BlockCounts,
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    CacheDump,
    CacheEvent,
    CopyKind,
)
from diptych.engine.sched.cache.block_ages import BlockAges
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.cache.eviction import Uses
from diptych.engine.sched.cache.host_tier import HostTier
from diptych.engine.sched.cache.retention import Claims, EvictionOrder
from diptych.engine.stats import ClaimStats


class BlockPool:
    """Blocks 0 .. num_blocks-1 of a KV pool. Every method is O(blocks named), `check` alone walks them all.

    Args:
        host, disk: the tiers below; None: it has no such tier.
        tenant_quota: cached blocks (not used by a request) that one tenant may have; None: no limit.
        claim_share: part of the blocks that requests may claim.
        group: index of the KV group whose blocks these are.
        announces: entries of the prefix cache and evictions are events.
        uses: of blocks, for the order in which tiers below evict; None: that needs none.
    """

    def __init__(
        self,
        num_blocks: int,
        host: HostTier | None = None,
        tenant_quota: int | None = None,
        *,
        disk: DiskTier | None = None,
        claim_share: float = 0.25,
        group: int = 0,
        announces: bool = True,
        uses: Uses | None = None,
    ) -> None:
        self._uses = uses
        self.num_blocks = num_blocks
        self._group = group
        self._announces = announces
        self.host = host or HostTier(0)
        self.disk = disk or DiskTier(0)
        self.ages = BlockAges(num_blocks)
        self._copies: list[BlockCopy] = []
        self._quota = tenant_quota
        self._tenants: dict[int, str] = {}
        """With a quota: the tenant of each block with a key."""
        self._cached_of: dict[str, EvictionOrder[int]] = {}
        """With a quota: a tenant's evictable blocks."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._evictable: EvictionOrder[int] = EvictionOrder()
        self._claims: Claims[int] = Claims(int(claim_share * num_blocks), self._moved)
        self._num_kept = 0
        self._passed_until = -math.inf
        """The latest time since which an evicted block without a claim was idle: claimed ones that are older were passed over."""
        self._num_running = 0
        self._reserved = 0
        self.epoch = 0
        self.sequence = 0
        """Of the last cache event; the first one of an epoch has 1."""
        self._stored: list[bytes] = []
        self._evicted: list[bytes] = []
        self._events: list[CacheEvent] = []

    # ---- counts ----

    @property
    def available(self) -> int:
        """Blocks that `allocate` or `reserve` could return now."""
        return len(self._free) + len(self._evictable) - self._reserved

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free) - self._reserved,
            running=self._num_running,
            cached=len(self._evictable),
            reserved=self._reserved,
        )

    def refs(self, block: int) -> int:
        return self._refs[block]

    # ---- owning ----

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each; None (and nothing taken) when there are not that many."""
        if count > len(self._free) + len(self._evictable) - self._reserved:
            return None
        self._make_room(count)
        return self._take(count)

    def reserve(self, count: int) -> bool:
        if count > self.available:
            return False
        self._make_room(count)
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        assert 0 <= count <= self._reserved, f"unreserve({count}) of {self._reserved}"
        self._reserved -= count

    def bind(self, count: int) -> list[int]:
        """Turn `count` reserved blocks into owned ones."""
        self.unreserve(count)
        return self._take(count)

    def pin(self, blocks: Iterable[int]) -> None:
        """One more reference on blocks that are running or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                self._leave_cache(block)
                self.ages.reused(block)
                self._num_running += 1
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. The order is that of eviction: pass the last block of a sequence first."""
        for block in blocks:
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} released more often than owned"
            self._refs[block] = refs
            if refs == 0:
                self._num_running -= 1
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._enter_cache(block)

    def _take(self, count: int) -> list[int]:
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        self._num_running += count
        return taken

    def _make_room(self, count: int) -> None:
        while len(self._free) - self._reserved < count:
            block = next(iter(self._evictable))
            if block not in self._claims:
                self._passed_until = max(self._passed_until, self.ages.idle_since(block))
            self._evict(block)

    def _evict(self, block: int) -> None:
        self._claims.gone(block, evicted=True)
        self._leave_cache(block)
        self.ages.evicted(block)
        key = self._keys[block]
        assert key is not None
        if self.host.num_slots:
            _, use, index = (1, 0, 0) if self._uses is None else self._uses.of(key)
            if (slot := self.host.store(key, use, index)) is not None:
                self.copy(CopyKind.TO_HOST, block, slot)
        self._forget_key(block)
        self._free.append(block)

    def _enter_cache(self, block: int) -> None:
        level = self._claims.level(block)
        self._evictable.add(block, level)
        self.ages.released(block)
        if self._quota is None:
            return
        mine = self._cached_of.setdefault(self._tenants[block], EvictionOrder())
        mine.add(block, level)
        if len(mine) > self._quota:
            self._evict(next(iter(mine)))

    def _leave_cache(self, block: int) -> None:
        self._evictable.remove(block)
        if self._quota is not None:
            tenant = self._tenants[block]
            mine = self._cached_of[tenant]
            mine.remove(block)
            if not mine:
                del self._cached_of[tenant]

    # ---- claims ----

    @property
    def now(self) -> float:
        """Set before each step; ages and claims are measured by it."""
        return self.ages.now

    @now.setter
    def now(self, now: float) -> None:
        self.ages.now = now
        self._claims.expire(now)

    def claim(self, blocks: Iterable[int], tenant: str, claim: CacheClaim) -> None:
        """Those that are cached, or will be once they are released, are claimed from now on. Pass the last block of a sequence
        first."""
        self._claims.make((b for b in blocks if self._keys[b] is not None), tenant, claim, self.now)

    def close_session(self, session: bytes) -> int:
        """End its claims, and free the blocks that only it has claimed and nobody uses. Returns: how many."""
        mine = [block for block in self._claims.close(session) if self._refs[block] == 0]
        self.discard(mine)
        return len(mine)

    def num_kept(self, blocks: Iterable[int]) -> int:
        """Of blocks that are to be pinned, those that are here because of their claims: an eviction has passed them over, and
        taken a block that was idle for less time."""
        if not len(self._claims):
            return 0
        since, refs, claims = self.ages.idle_since, self._refs, self._claims
        return sum(not refs[block] and block in claims and since(block) < self._passed_until for block in blocks)

    def hit(self, blocks: Iterable[int], session: bytes, num_kept: int) -> None:
        """A request of this session, or of none, uses these. Args: num_kept: of them, before they were pinned."""
        self._num_kept += num_kept
        self._claims.used(blocks, session)

    @property
    def claims(self) -> ClaimStats:
        return self._claims.stats(self._num_kept)

    def _moved(self, block: int, level: int) -> None:
        if block not in self._evictable:
            return
        orders = [self._evictable]
        if self._quota is not None:
            orders.append(self._cached_of[self._tenants[block]])
        for order in orders:
            order.remove(block)
            order.add(block, level)

    # ---- copies ----

    def copy(self, kind: CopyKind, src: int, dst: int) -> None:
        """The runner is to copy a block, after the copies before and before anything else."""
        self._copies.append(BlockCopy(kind, src, dst, self._group))

    def take_copies(self) -> list[BlockCopy]:
        """Copies since the last call, in the order in which they must be carried out."""
        if not self._copies:
            return []
        copies, self._copies = self._copies, []
        return copies

    # ---- prefix cache ----

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run of `keys` from its start. Takes no reference: pin them."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cached_block(self, key: bytes) -> int | None:
        """The block of a key in the cache. Takes no reference: pin it."""
        return self._by_key.get(key)

    def has(self, key: bytes) -> bool:
        """It is in the cache."""
        return key in self._by_key

    def num_evictable(self, blocks: Iterable[int]) -> int:
        return sum(1 for block in blocks if self._refs[block] == 0)

    def publish(self, block: int, key: bytes, tenant: str = "") -> None:
        """Enter an owned block, full and trusted, into the prefix cache. A key that is there already keeps its
        block."""
        assert self._refs[block] > 0, f"block {block} enters the cache without an owner"
        if key in self._by_key or self._keys[block] is not None:
            return
        self._keys[block] = key
        self._by_key[key] = block
        self.ages.stored(block)
        if self._quota is not None:
            self._tenants[block] = tenant
        if not self._announces:
            return
        if self._evicted:
            self._flush_cache_events()
        self._stored.append(key)

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache, because their content may be wrong; owners keep them."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                continue
            self.host.discard(key)
            self.disk.discard(key)
            if self._refs[block] == 0:
                self._leave_cache(block)
                self._free.append(block)
            self._forget_key(block)

    def clear(self) -> None:
        """Empty the prefix cache and begin a new epoch; owned blocks stay with their owners, and files stay."""
        self._flush_cache_events()
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._claims.clear()
        self._cached_of.clear()
        self._tenants.clear()
        self.host.clear()
        self.disk.restart()
        self.epoch += 1
        self.sequence = 0
        self._events.append(CacheCleared(self.epoch))

    def take_events(self) -> list[CacheEvent]:
        """Entries and evictions since the last call, in order."""
        self._flush_cache_events()
        events, self._events = self._events, []
        return events

    def dump(self) -> CacheDump:
        """The cache as of `sequence`. Call `take_events` first, so that no event is outstanding."""
        self._flush_cache_events()
        dumps = {
            DEVICE: TierDump(self.sequence, tuple(self._by_key)),
            self.host.name: TierDump(self.host.sequence, self.host.keys),
            self.disk.name: TierDump(self.disk.sequence, self.disk.keys),
        }
        return CacheDump(self.epoch, in_order(dumps, TierDump()))

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._claims.gone(block, evicted=False)
        self._keys[block] = None
        self._tenants.pop(block, None)
        del self._by_key[key]
        if not self._announces:
            return
        if self._stored:
            self._flush_cache_events()
        self._evicted.append(key)

    def _flush_cache_events(self) -> None:
        # At most one of the two lists is filled: that keeps a key that leaves and comes back in the right order.
        if self._stored:
            self.sequence += 1
            self._events.append(BlocksStored(self.sequence, tuple(self._stored)))
            self._stored.clear()
        if self._evicted:
            self.sequence += 1
            self._events.append(BlocksEvicted(self.sequence, tuple(self._evicted)))
            self._evicted.clear()

    # ---- the law ----

    def violations(self) -> list[str]:
        """Compare the counters: O(1). Empty: the law holds."""
        c = self.counts
        out = []
        if c.free + c.running + c.cached + c.reserved != c.total:
            out.append(
                f"blocks: free {c.free} + running {c.running} + cached {c.cached} + reserved {c.reserved} != {c.total}"
            )
        if min(c.free, c.running, c.cached, c.reserved) < 0:
            out.append(f"blocks: a count is negative: {c}")
        return out

    def check(self, owned: dict[int, int] | None = None) -> list[str]:
        """Walk every block. O(num_blocks).

        Args:
            owned: block -> number of references that the requests hold by their own account.
        Returns: violations, one sentence each.
        """
        out = self.violations()
        free = set(self._free)
        if len(free) != len(self._free):
            out.append("blocks: the free list names a block twice")
        for block in () if self._in_order(free, owned) else range(self.num_blocks):
            refs, key = self._refs[block], self._keys[block]
            places = (block in free) + (refs > 0) + (block in self._evictable)
            if places != 1:
                out.append(f"block {block} is in {places} places (refs {refs})")
            if block in free and key is not None:
                out.append(f"block {block} is free and has a key")
            if block in self._evictable and key is None:
                out.append(f"block {block} is evictable and has no key")
            if self._quota is not None and block in self._evictable:
                mine = self._cached_of.get(self._tenants.get(block, ""))
                if mine is None or block not in mine or len(mine) > self._quota:
                    out.append(f"block {block}: its tenant's account is wrong")
            if key is not None and self._by_key.get(key) != block:
                out.append(f"block {block}: its key is not in the index")
            if owned is not None and owned.get(block, 0) != refs:
                out.append(f"block {block}: {refs} references counted, {owned.get(block, 0)} held by requests")
        if len(self._by_key) != self.num_blocks - self._keys.count(None):
            out.append("blocks: the key index and the keys differ in number")
        if self.num_blocks - self._refs.count(0) != self._num_running:
            out.append("blocks: the running counter is wrong")
        return out + self._claims.violations(lambda block: self._keys[block] is not None)

    def _in_order(self, free: set[int], owned: dict[int, int] | None) -> bool:
        """Whether a walk would find nothing. Whole sets are compared: a tenth of its time."""
        running = {block: refs for block, refs in enumerate(self._refs) if refs}
        keys = {block: key for block, key in enumerate(self._keys) if key is not None}
        cached = self._evictable.items()
        return (
            self._quota is None
            and len(free) + len(running) + len(cached) == self.num_blocks
            and free | running.keys() | cached == set(range(self.num_blocks))
            and min(running.values(), default=1) > 0
            and free.isdisjoint(keys)
            and cached <= keys.keys()
            and dict(zip(keys.values(), keys, strict=True)) == self._by_key
            and len(keys) == len(self._by_key)
            and (owned is None or owned == running)
        )
