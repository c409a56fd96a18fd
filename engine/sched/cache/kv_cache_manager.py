"""Blocks of requests: how many they need, hits in the prefix cache and the host tier, growth, forks, swaps, and entries
of the cache.

Each KV group has a pool. The table of a full group holds all blocks of a request; that of a window group begins with the
first block that the next token can see, and moves on with `advance`:

    full          |0|1|2|3|4|5|6|7|
    window        . . . . .|5|6|7|     first_blocks = (0, 5)

A prompt's blocks are counted at its admission: those of a full group all have ids at once, of a window group as many are
reserved as one chunk and the window need, and the next chunk uses again what the last one has freed. A freed block that
other requests use is not there again, so a chunk may find fewer blocks than it wants (`cover`)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from diptych.common.kv_format import KvFormat, KvGroup
from diptych.common.kv_groups import hit_end, longest_hit, most_blocks_held
from diptych.engine.messages import BlockCopy, CopyKind, KvMode
from diptych.engine.sched.cache.block_pool import BlockPool
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.cache.eviction import tier_orders
from diptych.engine.sched.cache.host_tier import HostTier
from diptych.engine.sched.requests.request import Request, State


class KvCacheManager:
    """Owns the pools and the tiers below them, and the account of each request: tables, first_blocks, block_end, reserved,
    num_published, shares_tail, swapped.

    Args:
        num_blocks, kv, group_blocks: as in RunnerCapabilities. All groups have blocks of `block_size` tokens.
        max_chunk: tokens of a prompt that one step computes at most.
        tenant_cache_share: part of each pool that one tenant's cached blocks may take.
        claim_share: part of each pool, and of each tier below, that requests may claim.
        tier_eviction: which blocks leave the tiers below first, see `tier_orders`.
        worth_restoring: whether copying so many tokens from the host tier is better than computing them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        kv: KvFormat | None = None,
        group_blocks: Sequence[int] = (),
        max_chunk: int = 1,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        tenant_cache_share: float = 1.0,
        claim_share: float = 0.25,
        tier_eviction: str = "lru",
        worth_restoring: Callable[[int], bool] = lambda num_tokens: True,
    ) -> None:
        self._uses, host_order, disk_order = tier_orders(
            tier_eviction, (num_blocks + num_host_blocks + num_disk_blocks) if num_host_blocks or num_disk_blocks else 0
        )
        self.host = HostTier(num_host_blocks, host_order, claim_share)
        self.disk = DiskTier(num_disk_blocks, order=disk_order, claim_share=claim_share)
        self._kv = kv if kv is not None and not kv.has_one_full_group else None
        """None: one group, which keeps every token."""
        self._groups: tuple[KvGroup | None, ...] = (None,) if self._kv is None else self._kv.groups
        counts = tuple(group_blocks) or (num_blocks,) * len(self._groups)
        self.pools = tuple(
            BlockPool(
                count,
                self.host if index == 0 else None,
                None if tenant_cache_share == 1.0 else int(tenant_cache_share * count),
                disk=self.disk if index == 0 else None,
                claim_share=claim_share,
                group=index,
                announces=index == 0,
                uses=self._uses,
            )
            for index, count in enumerate(counts)
        )
        self.pool = self.pools[0]
        """Of the first group: its cache is the one that is announced."""
        self.slides = any(group is not None and group.window for group in self._groups)
        """There are window groups."""
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._max_chunk = max_chunk
        self._worth_restoring = worth_restoring
        self.restored_tokens = 0

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    @property
    def caches(self) -> bool:
        """The prefix cache is on."""
        return self._caching

    def set_time(self, now: float) -> None:
        """Of what happens from here on; only the ages of blocks and the ends of claims depend on it."""
        for pool in self.pools:
            pool.now = now
        self.host.expire(now)
        self.disk.expire(now)

    @property
    def usage(self) -> float:
        """Part of the fullest pool that requests use or have reserved."""
        counts = [pool.counts for pool in self.pools]
        return max((one.running + one.reserved) / one.total for one in counts)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- admission ----

    def wanted(self, requests: Iterable[Request]) -> list[int]:
        """By group, the blocks that are counted when these are admitted, if no cache saves any."""
        needs = [self._need(request, [0] * self.num_groups, 0) for request in requests]
        return [sum(counts) for counts in zip(*needs, strict=True)]

    def freed_by(self, requests: Sequence[Request], *, reserved: bool = False) -> list[int]:
        """By group, blocks that only these hold. Args: reserved: and those that are reserved for them."""
        out = []
        for index, pool in enumerate(self.pools):
            held: dict[int, int] = {}
            for request in requests:
                for block in request.tables[index]:
                    held[block] = held.get(block, 0) + 1
            count = sum(pool.refs(block) == refs for block, refs in held.items())
            out.append(count + (sum(request.reserved[index] for request in requests) if reserved else 0))
        return out

    def has_room(self, wanted: Sequence[int], gain: Sequence[int] = ()) -> bool:
        """Args: wanted: blocks by group. gain: would be free besides."""
        gain = gain or (0,) * self.num_groups
        return all(w <= pool.available + g for w, pool, g in zip(wanted, self.pools, gain, strict=True))

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request that would not be computed if it were admitted now."""
        return self._hits(request)[0] * self.block_size

    def fits(self, request: Request, spare: Sequence[int] = ()) -> bool:
        """Could it be admitted now, with `spare` blocks of each group left over?"""
        end, hits = self._hits(request)
        need = self._need(request, [len(blocks) for blocks in hits], end)
        for index, pool in enumerate(self.pools):
            left = pool.available - pool.num_evictable(hits[index])
            if need[index] + (spare[index] if spare else 0) > left:
                return False
        return True

    def admit(self, request: Request, *, reserve: bool, is_use: bool = True) -> bool:
        """Pin the cached prefix, restore what follows it in the host tier, and allocate (or, with `reserve`, and in window
        groups, count) the blocks of the rest; False: nothing was allocated.

        On success `num_computed` is the end of the cached prefix; of a swapped request it is unchanged. A hit ends
        before the last token whose logits are needed, so that shared blocks are never written: at most
        `block_size * ((num_prompt - 1) // block_size)` tokens, and after a preemption the same with all tokens.

        Args: is_use: False: it brings KV for a request that follows, and says nothing about whose it is.
        """
        if request.swapped:
            return self._swap_in(request)
        end, hits = self._hits(request)
        num_kept = self.pool.num_kept(hits[0])
        for pool, found in zip(self.pools, hits, strict=True):
            pool.pin(found)
        slots, keys = self._stored_behind(request, end)
        self.host.protect(keys)
        need = self._need(request, [len(found) for found in hits], end)
        if not self.has_room(need):
            self.host.protect(())
            for pool, found in zip(self.pools, hits, strict=True):
                pool.release(reversed(found))
            return False
        for index, (pool, count) in enumerate(zip(self.pools, need, strict=True)):
            group = self._groups[index]
            counted = reserve or (group is not None and group.window > 0)
            # Restored blocks need ids at once, even where the rest is only counted.
            blocks = pool.allocate(len(slots) if counted else count)
            assert blocks is not None, "there was room"
            if counted:
                request.reserved[index] = count - len(slots)
                reserved = pool.reserve(request.reserved[index])  # evicts, too: the slots are still to be read
                assert reserved, "there was room"
            request.tables[index].extend(hits[index])
            request.tables[index].extend(blocks)
        self.host.protect(())
        for slot, block, key in zip(slots, request.block_ids[end:], keys, strict=False):
            self.pool.copy(CopyKind.FROM_HOST, slot, block)
            self.pool.publish(block, key, request.tenant)
        request.seq.first_blocks = self._first_blocks(request, end)
        request.num_published = end + len(slots)
        request.num_computed = request.num_published * self.block_size
        self._set_end(request)
        self.restored_tokens += len(slots) * self.block_size
        if slots:
            request.tier_tokens[self.host.name] = len(slots) * self.block_size
        claim = request.source.claim
        session = b"" if claim is None else claim.session
        if self._uses is not None or self.disk.num_held or self.host.has_claims:
            keys = request.keys(request.num_published)[: request.num_published]
            self._note_use(keys, request.arrival, session if is_use else None)
        if not is_use:
            return True
        for pool, found in zip(self.pools, hits, strict=True):
            pool.hit(found, session, num_kept if pool is self.pool else 0)
        request.num_kept_tokens = num_kept * self.block_size
        return True

    def _note_use(self, keys: Sequence[bytes], use: int, session: bytes | None = None) -> None:
        """See DiskTier.used."""
        if self._uses is not None:
            self._uses.used(keys, use)
        self.host.used(keys, use, session)
        self.disk.used(keys, use, session)

    def copies_of(self, key: bytes) -> list[int] | None:
        """By group, the block of a key in the cache; None: a group has none."""
        blocks = [pool.cached_block(key) for pool in self.pools]
        return None if None in blocks else [block for block in blocks if block is not None]

    def num_cached_blocks(self, keys: Sequence[bytes]) -> int:
        """The block at which the longest prefix of `keys` ends of which every group has what the next token sees."""
        if self._kv is None:
            return len(self.pool.find(keys))
        limit = len(keys)
        for group, pool in zip(self._kv.groups, self.pools, strict=True):
            if not group.window:
                limit = len(pool.find(keys[:limit]))
        present = [[pool.cached_block(key) is not None for key in keys[:limit]] for pool in self.pools]
        return longest_hit(self._kv, present, limit * self.block_size) // self.block_size

    def stored_behind(self, keys: Sequence[bytes], end: int) -> list[int]:
        """Slots of the host tier with the blocks of keys[end:], as many from the first one on as there is room for beside the
        cached ones of keys[:end]; none if computing them is faster than copying them."""
        slots = self.host.find(keys[end:]) if self.host.num_slots else []
        if slots:
            room = self.pool.available - self.pool.num_evictable(self.pool.find(keys[:end]))
            slots = slots[: max(0, room)]
        return slots if slots and self._worth_restoring(len(slots) * self.block_size) else []

    def adopt(self, request: Request, keys: Sequence[bytes], cached: int, slots: Sequence[int] = ()) -> bool:
        """The request owns the blocks of these keys: of the first `cached` those in the cache (see `num_cached_blocks`), of those
        behind them copies of the host tier's `slots`, and of the rest blocks that are reserved. What is not in the cache does not
        enter it. False: there is no room, and nothing was taken."""
        end, stored = len(keys), cached + len(slots)
        firsts = self._first_blocks(request, end)
        found = self._cached_blocks(keys[:cached], firsts, cached)
        counts = [end - first - len(blocks) for first, blocks in zip(firsts, found, strict=True)]
        for pool, blocks, count in zip(self.pools, found, counts, strict=True):
            if count > pool.available - pool.num_evictable(blocks):
                return False
        for pool, blocks in zip(self.pools, found, strict=True):
            pool.pin(blocks)
        self.host.protect(keys[cached:stored])  # they are still to be read when others are evicted for them
        copied = self.pool.allocate(len(slots))
        assert copied is not None, "there was room"
        for index, (pool, blocks, count) in enumerate(zip(self.pools, found, counts, strict=True)):
            request.tables[index].extend(blocks)
            request.reserved[index] = count - (len(slots) if pool is self.pool else 0)
            reserved = pool.reserve(request.reserved[index])
            assert reserved, "there was room"
        self.host.protect(())
        for slot, block in zip(slots, copied, strict=True):
            self.pool.copy(CopyKind.FROM_HOST, slot, block)
        request.block_ids.extend(copied)
        request.seq.first_blocks = firsts
        request.num_published = end
        request.num_computed = stored * self.block_size
        self._set_end(request)
        if self._uses is not None or self.disk.num_held:
            self._note_use(keys, request.arrival)
        return True

    def bind(self, request: Request) -> None:
        """Give the reserved blocks their ids."""
        for index, pool in enumerate(self.pools):
            if request.reserved[index]:
                request.tables[index].extend(pool.bind(request.reserved[index]))
                request.reserved[index] = 0
        self._set_end(request)

    # ---- growth ----

    def needs_block(self, request: Request) -> bool:
        """A decoding request whose next token has no block of its own."""
        return request.shares_tail or request.block_end * self.block_size < len(request.token_ids)

    def grow(self, request: Request) -> bool:
        """Give the request a block of its own for the next token: one more, or a copy of a tail that has other owners;
        False when there is no free block."""
        if request.shares_tail:
            return self._own_tail(request)
        if self._kv is not None:
            return self._reach(request, request.block_end + 1)
        block = self.pool.allocate(1)
        if block is None:
            return False
        request.block_ids.extend(block)
        request.block_end += 1
        return True

    def cover(self, request: Request, end: int) -> int:
        """Give a prompt that is computed the blocks of its tokens before `end`.

        Returns: how far there are blocks; less than `end` where a window group has too few.
        """
        if not self.slides:
            return end
        wanted = self.blocks_for(end)
        for index, pool in enumerate(self.pools):
            reach = request.seq.first_blocks[index] + len(request.tables[index])
            wanted = min(wanted, reach + request.reserved[index] + max(0, pool.available))
        covered = self._reach(request, wanted)
        assert covered, "counted above"
        return min(end, wanted * self.block_size)

    def advance(self, request: Request, *, in_prompt: bool = False) -> None:
        """`num_computed` has risen. Enter the blocks that are full by now into the prefix cache, and free those behind the
        window. While a sequence decodes, calls where a block becomes full are enough.

        Args: in_prompt: by a chunk of a prompt; more may follow."""
        full = request.num_computed // self.block_size
        first = request.num_published
        if full > first and self._caching and not request.converted:
            keys, tenant = request.keys(full), request.tenant
            if self._kv is None:  # every sequence comes here in every 16th step
                table = request.block_ids
                for i in range(first, full):
                    self.pool.publish(table[i], keys[i], tenant)
                self.disk.offer(keys[first:full], first, tenant, request.arrival)
            else:
                for pool, table, begin in zip(self.pools, request.tables, request.seq.first_blocks, strict=True):
                    for i in range(max(first, begin), full):
                        pool.publish(table[i - begin], keys[i], tenant)
                # A file has the blocks of all groups. Of KV that arrives, window blocks in front of the window never were here.
                if max(request.seq.first_blocks) <= first and (not first or self.disk.knows(keys[first - 1])):
                    self.disk.offer(keys[first:full], first, tenant, request.arrival)
            request.num_published = full
            if self._uses is not None:
                self._uses.used(keys[first:full], request.arrival, first)
        if self.slides:
            self._slide(request, in_prompt=in_prompt)

    def fork(self, request: Request, sibling: Request) -> None:
        """The fork owns the computed blocks, too. A request copies a tail that others own before it writes to it."""
        firsts = request.seq.first_blocks
        end = self.blocks_for(request.num_computed)
        for pool, table, other, first in zip(self.pools, request.tables, sibling.tables, firsts, strict=True):
            blocks = table[: end - first]
            pool.pin(blocks)
            other.extend(blocks)
        sibling.seq.first_blocks = firsts
        sibling.num_computed = request.num_computed
        sibling.num_published = request.num_published
        sibling.converted = request.converted
        self._set_end(sibling)
        if request.num_computed % self.block_size:
            request.shares_tail = sibling.shares_tail = True

    def trim(self, request: Request) -> None:
        """Free blocks beyond those of its tokens and the next one: they were counted for forks, or held rejected
        guesses."""
        keep = self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))
        for pool, table, first in zip(self.pools, request.tables, request.seq.first_blocks, strict=True):
            pool.release(reversed(table[keep - first :]))
            del table[keep - first :]
        self._set_end(request)

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

    # ---- the end ----

    def free(self, request: Request) -> None:
        """Its blocks are free, or stay in the cache; those that it claims are claimed from now on."""
        claim = request.source.claim
        if claim is not None and (count := request.num_published):
            keys = request.keys(count)[count - 1 :: -1]
            self.host.claim(filter(self.pool.has, keys), request.tenant, claim, self.pool.now)
            self.disk.claim(keys, request.tenant, claim, self.pool.now)
        for index, (pool, table) in enumerate(zip(self.pools, request.tables, strict=True)):
            pool.unreserve(request.reserved[index])
            request.reserved[index] = 0
            if claim is not None:
                pool.claim(reversed(table), request.tenant, claim)
            pool.release(reversed(table))
            table.clear()
        request.seq.first_blocks = (0,) * self.num_groups
        request.block_end = 0
        request.num_published = 0
        request.shares_tail = False
        self.host.give(request.swapped)
        request.swapped = []

    def invalidate(self, request: Request) -> None:
        """Nothing that this request read or wrote stays in the prefix cache."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.discard(table)
            if self.slides:  # and what is behind the window by now
                keys = request.keys(request.num_published)[: request.num_published]
                pool.discard([block for key in keys if (block := pool.cached_block(key)) is not None])

    def close_session(self, session: bytes) -> int:
        """Free what only this session has claimed. Returns: tokens whose KV is no longer cached."""
        freed = [pool.close_session(session) for pool in self.pools]
        closed = {*self.host.close_session(session), *self.disk.close_session(session)}
        left = [key for key in closed if not self.pool.has(key)]
        for key in left:
            self.host.discard(key)
        return (freed[0] + len(left)) * self.block_size

    def clear(self, *, files: bool = False) -> None:
        """Empty the prefix caches and begin a new epoch; owned blocks stay with their owners. Args: files: give
        the disk tier up."""
        if files:
            self.disk.give_up()
        for pool in self.pools:
            pool.clear()

    def take_copies(self) -> list[BlockCopy]:
        """Copies since the last call; those of a group in the order in which they must be carried out."""
        copies = self.pool.take_copies()
        for pool in self.pools[1:]:
            copies += pool.take_copies()
        return copies

    # ---- the law ----

    def violations(self) -> list[str]:
        """Compare the counters of each pool: O(1)."""
        return [line for pool in self.pools for line in pool.violations()]

    def check(self, requests: Iterable[Request]) -> list[str]:
        """Full walk: each pool's law, and every reference belongs to a request."""
        requests = list(requests)
        swapped: list[int] = []
        out: list[str] = []
        for request in requests:
            swapped.extend(request.swapped)
            out += self._check_request(request)
        for index, pool in enumerate(self.pools):
            owned: dict[int, int] = {}
            for request in requests:
                for block in request.tables[index]:
                    owned[block] = owned.get(block, 0) + 1
            reserved = sum(request.reserved[index] for request in requests)
            if reserved != pool.counts.reserved:
                out.append(f"blocks: reserved {pool.counts.reserved}, by the requests' account {reserved}")
            out += pool.check(owned)
        return out + self.host.check(swapped, self.pool.has) + self.disk.check()

    def _check_request(self, request: Request) -> list[str]:
        out: list[str] = []
        if request.swapped and request.state is not State.PREEMPTED:
            out.append(f"attempt {request.attempt} is swapped out in state {request.state.value}")
        ends = []
        for index, group in enumerate(self._groups):
            first, table = request.seq.first_blocks[index], request.tables[index]
            slides = group is not None and group.window > 0
            legal = request.state is State.WAITING_FOR_REMOTE_KV or (slides and request.state is State.RUNNING)
            if request.reserved[index] and not legal:
                out.append(f"attempt {request.attempt} holds a reservation in state {request.state.value}")
            ends.append(first + len(table))
            if slides and request.state is State.RUNNING:
                assert group is not None
                if first > group.first_block(request.num_computed):
                    out.append(f"attempt {request.attempt} lacks blocks of {group.name} that its next token sees")
                whole = request.num_computed // self.block_size * self.block_size
                if first < group.first_block(self._seen_from(request, whole)):
                    out.append(f"attempt {request.attempt} holds blocks of {group.name} behind the window")
            elif first and not slides:
                out.append(f"attempt {request.attempt} lacks its first blocks")
        if min(ends) != request.block_end:
            out.append(f"attempt {request.attempt}: block_end is {request.block_end}, its tables end at {ends}")
        return out

    # ---- parts ----

    def _need(self, request: Request, num_hits: Sequence[int], end: int) -> list[int]:
        """By group, blocks to be counted at admission, beside `num_hits` cached ones that end at block `end`.

        For all its tokens and the next one, so that a request that was just admitted need not grow at once; and one more
        for each choice that will be forked from it, as far as the pool has them. In a window group as many as it holds
        at one time; of a request whose KV arrives, those that the token behind it can see."""
        total = self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))
        count = request.sampling.num_choices
        forks = 0 if count == 1 or request.mode is KvMode.PREFILL or request.num_outputs else count - 1
        if self._kv is None:
            return [max(total, min(total + forks, self.pool.num_blocks)) - end]
        need = []
        firsts = self._first_blocks(request, end)
        for group, pool, hits, first in zip(self._kv.groups, self.pools, num_hits, firsts, strict=True):
            if _arrives(request) or not group.window:
                wanted = total - first
            else:
                wanted = most_blocks_held(group, (total - first) * self.block_size, self._max_chunk)
            need.append(max(wanted, min(wanted + forks, pool.num_blocks)) - hits)
        return need

    def _first_blocks(self, request: Request, end: int) -> tuple[int, ...]:
        """Where its tables begin when it is admitted with a hit that ends at block `end`."""
        if self._kv is None:
            return (0,)
        num_tokens = end * self.block_size
        if _arrives(request):  # what its own end sees is left in the cache for the same prompt
            num_tokens = max(num_tokens, hit_end(self.block_size, request.kv_target))
        return tuple(group.first_block(num_tokens) if group.window else 0 for group in self._kv.groups)

    def _seen_from(self, request: Request, num_tokens: int) -> int:
        """What the token after so many sees is kept; of a reusable prompt also what the token behind its longest hit sees."""
        if request.mode is KvMode.PREFILL and request.source.reusable:
            return min(num_tokens, hit_end(self.block_size, request.kv_target))
        return num_tokens

    def trim_front(self, request: Request, arrived: Container[tuple[int, int]]) -> None:
        """Free the block of a window group that would only have made a hit of the request's tokens, if it has not arrived: an
        older prefill worker does not send it. Args: arrived: (group, index) of blocks."""
        firsts = list(request.seq.first_blocks)
        for index, (pool, table, needed) in enumerate(
            zip(self.pools, request.tables, self.needed_from(request), strict=True)
        ):
            first = firsts[index]
            if (
                request.num_computed <= first * self.block_size < needed * self.block_size
                and (index, first) not in arrived
            ):
                pool.release(table[:1])
                del table[:1]
                firsts[index] += 1
        request.seq.first_blocks = tuple(firsts)

    def needed_from(self, request: Request) -> tuple[int, ...]:
        """By group, the first block that the token behind its KV sees."""
        return tuple(0 if group is None else group.first_block(request.kv_target) for group in self._groups)

    def _reach(self, request: Request, end: int) -> bool:
        """Give every group's table blocks up to block `end`; False, and none was taken, when there are not that many."""
        missing = [
            max(0, end - first - len(table))
            for first, table in zip(request.seq.first_blocks, request.tables, strict=True)
        ]
        for count, reserved, pool in zip(missing, request.reserved, self.pools, strict=True):
            if count > reserved and count - reserved > pool.available:
                return False
        for index, (count, pool) in enumerate(zip(missing, self.pools, strict=True)):
            bound = min(count, request.reserved[index])
            request.reserved[index] -= bound
            more = pool.allocate(count - bound)
            assert more is not None, "counted above"
            request.tables[index].extend(pool.bind(bound))
            request.tables[index].extend(more)
        self._set_end(request)
        return True

    def _slide(self, request: Request, *, in_prompt: bool) -> None:
        """Free what is behind the window; reserve for the next chunk of a prompt what it can use of that."""
        assert self._kv is not None
        firsts = list(request.seq.first_blocks)
        more_follows = in_prompt and request.num_computed < len(request.token_ids)
        total = self.blocks_for(min(request.num_tokens + 1, request.max_kv_tokens))
        for index, group in enumerate(self._kv.groups):
            if not group.window:
                continue
            pool, table = self.pools[index], request.tables[index]
            gone = group.first_block(self._seen_from(request, request.num_computed)) - firsts[index]
            if gone > 0:
                pool.release(table[:gone])
                del table[:gone]
                firsts[index] += gone
            wanted = 0
            if more_follows:
                most = most_blocks_held(group, (total - firsts[index]) * self.block_size, self._max_chunk)
                wanted = max(0, most - len(table))
            more = wanted - request.reserved[index]
            if more < 0:
                pool.unreserve(-more)
            else:
                more = min(more, max(0, pool.available))
                pool.reserve(more)
            request.reserved[index] += more
        request.seq.first_blocks = tuple(firsts)

    def _set_end(self, request: Request) -> None:
        request.block_end = min(
            first + len(table) for first, table in zip(request.seq.first_blocks, request.tables, strict=True)
        )

    def _own_tail(self, request: Request) -> bool:
        end = request.num_computed // self.block_size
        tails = [
            (pool, table, end - first)
            for pool, table, first in zip(self.pools, request.tables, request.seq.first_blocks, strict=True)
        ]
        shared = [(pool, table, index) for pool, table, index in tails if pool.refs(table[index]) > 1]
        if any(pool.available < 1 for pool, _, _ in shared):
            return False
        for pool, table, index in shared:
            block = pool.allocate(1)
            assert block is not None, "counted above"
            pool.copy(CopyKind.FORK, table[index], block[0])
            pool.release((table[index],))
            table[index] = block[0]
        request.shares_tail = False
        return True

    def _swap_in(self, request: Request) -> bool:
        [need] = self._need(request, [0], 0)
        blocks = self.pool.allocate(need)
        if blocks is None:
            return False
        for slot, block in zip(request.swapped, blocks, strict=False):
            self.pool.copy(CopyKind.FROM_HOST, slot, block)
        # Copies are carried out in order, so the slots may be reused from here on.
        self.host.give(request.swapped)
        request.swapped = []
        request.block_ids.extend(blocks)
        self._set_end(request)
        return True

    def _hits(self, request: Request) -> tuple[int, list[list[int]]]:
        """The block at which the longest cached prefix ends, and by group the cached blocks that the request takes."""
        if not self._caching or request.swapped:
            return 0, [[] for _ in self.pools]
        limit = self._hit_limit(request)
        keys = request.keys(limit)[:limit]
        if self._kv is None:
            found = self.pool.find(keys)
            return len(found), [found]
        end = self.num_cached_blocks(keys)
        return end, self._cached_blocks(keys, self._first_blocks(request, end), end)

    def _cached_blocks(self, keys: Sequence[bytes], firsts: Sequence[int], end: int) -> list[list[int]]:
        """By group, the cached blocks of keys [firsts[group], end)."""
        return [
            [block for key in keys[first:end] if (block := pool.cached_block(key)) is not None]
            for pool, first in zip(self.pools, firsts, strict=True)
        ]

    def _hit_limit(self, request: Request) -> int:
        """Blocks that may come from a cache."""
        known = request.num_tokens
        if request.mode is KvMode.PREFILL and request.source.reusable:
            known = min(known, request.kv_target)  # the block before its end is sent, too
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


def _arrives(request: Request) -> bool:
    """Its KV will come from a prefill worker."""
    return request.mode is KvMode.REMOTE and request.state in (State.WAITING, State.WAITING_FOR_REMOTE_KV)
