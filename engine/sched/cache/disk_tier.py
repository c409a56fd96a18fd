"""The account of blocks in files: which there are, which are to be written, and which leave. No file is touched here.

offered --take--> writing --written--> held --evict, discard--> removed
                     +------failed--> forgotten

writing + held <= num_blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from diptych.common.request import CacheClaim
from diptych.common.secret import tenant_folder
from diptych.common.tiers import DISK
from diptych.engine.disk_messages import DiskBlock
from diptych.engine.messages import TierEvicted, TierStored
from diptych.engine.sched.cache.eviction import ClaimedLast, OldestUseLastBlockFirst, TierOrder
from diptych.engine.sched.cache.tier_events import TierEvents


class DiskTier:
    """Args: num_blocks: 0: there is no disk, everything is ignored. most_offered: blocks that wait to be written. order: of
    evictions of what nobody claims; None: the blocks that were used longest ago leave first, of one use the last one.
    claim_share: part of the blocks that requests may claim."""

    name = DISK

    def __init__(
        self,
        num_blocks: int,
        most_offered: int = 1 << 16,
        order: TierOrder | None = None,
        claim_share: float = 0.0,
    ) -> None:
        self.num_blocks = num_blocks
        self.is_shared = False
        """As the BlockStore is: what leaves for others is forgotten here, and stays there."""
        self.is_open = False
        """What was found at the start is known, and offers are taken."""
        self._most_offered = most_offered
        self._offered: dict[bytes, tuple[DiskBlock, int]] = {}
        self._writing: dict[bytes, int | None] = {}
        """By key: the use of the block; None: it must not stay."""
        self._held: dict[bytes, DiskBlock] = {}
        unclaimed = OldestUseLastBlockFirst() if order is None else order  # an empty one is false
        self._order = ClaimedLast(unclaimed, int(claim_share * num_blocks))
        self._claims = self._order.claims
        """On blocks that are held, or will be."""
        self._removed: list[DiskBlock] = []
        self._events = TierEvents(self.name)
        self.num_evicted = 0
        """To make room, since the start."""
        self.num_dropped = 0
        """Offered blocks that left the first tier, or were too many, before they could be written."""
        self.errors: Counter[str] = Counter()
        """Blocks that could not be written, and files that are not what they should be, by reason."""

    @property
    def sequence(self) -> int:
        """Of the last event."""
        return self._events.sequence

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of blocks that can be read."""
        return tuple(self._held)

    def knows(self, key: bytes) -> bool:
        """It is held, or will be."""
        return key in self._held or self._writing.get(key) is not None or key in self._offered

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def usage(self) -> float:
        return len(self._held) / self.num_blocks if self.num_blocks else 0.0

    @property
    def has_offers(self) -> bool:
        return bool(self._offered)

    def open(self, found: Sequence[DiskBlock]) -> None:
        """Args: found: what is to leave first comes last."""
        self.is_open = self.num_blocks > 0
        if not self.is_open:
            return
        self._held = {block.key: block for block in found[: self.num_blocks]}
        for place, key in enumerate(self._held):
            self._order.add(key, 0, place)
        self._events.stored(self._held)
        self._remove(found[self.num_blocks :])

    # ---- writing ----

    def offer(self, keys: Iterable[bytes], first: int, tenant: str, use: int) -> None:
        """Blocks `first`, `first` + 1, ... of a prompt entered the prefix cache. Args: use: number of the request."""
        if not self.is_open:
            return
        folder = tenant_folder(tenant)
        for index, key in enumerate(keys, first):
            if key not in self._held and key not in self._writing and key not in self._offered:
                self._offered[key] = DiskBlock(key, folder, index), use
        while len(self._offered) > self._most_offered:
            self._drop(next(iter(self._offered)))

    def take(self, most: int, is_there: Callable[[bytes], bool]) -> list[DiskBlock]:
        """The next blocks to be written, at most `most`; room is made for them. Args: is_there: its KV can be read now."""
        taken: list[DiskBlock] = []
        while self._offered and len(taken) < most:
            key, (block, use) = next(iter(self._offered.items()))
            if not is_there(key):
                self._drop(key)
                continue
            if not self._make_room():
                self._drop(key)
                return taken  # all that there is room for is being written
            del self._offered[key]
            self._writing[key] = use
            taken.append(block)
        return taken

    def written(self, blocks: Sequence[DiskBlock], failed: Sequence[DiskBlock]) -> None:
        """The end of a write of `blocks`; `failed` are not there."""
        lost = {block.key for block in failed}
        for block in blocks:
            use = self._writing.pop(block.key, None)
            if block.key in lost:
                self._claims.gone(block.key, evicted=False)
                continue
            if use is None:
                self._removed.append(block)
                continue
            self._held[block.key] = block
            self._order.add(block.key, use, block.index)
            self._events.stored((block.key,))

    # ---- reading ----

    def run(self, keys: Iterable[bytes]) -> list[DiskBlock]:
        """Those of the longest run of `keys` from its start that can be read."""
        found = []
        for key in keys:
            block = self._held.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def may_have(self, keys: Sequence[bytes], first: int, tenant: str) -> list[DiskBlock]:
        """`run`, and in a shared store all that follows, for others may have written it. Args: first: index of keys[0]."""
        found = self.run(keys)
        if self.is_shared and self.is_open:
            folder = tenant_folder(tenant)
            found += [DiskBlock(key, folder, index) for index, key in enumerate(keys[len(found) :], first + len(found))]
        return found

    def learn(self, blocks: Iterable[DiskBlock], use: int) -> None:
        """They were read from a shared store. Those that were not known, as others have written them, are held from now on. In a
        store of our own what is not known any more has left meanwhile: its file is being removed."""
        for block in blocks if self.is_shared else ():
            if not self.is_open or self.knows(block.key) or not self._make_room():
                continue
            self._held[block.key] = block
            self._order.add(block.key, use, block.index)
            self._events.stored((block.key,))

    def used(self, keys: Sequence[bytes], use: int, session: bytes | None = None) -> None:
        """A request begins with these blocks, wherever it has them from. Args: session: its own; empty: it has none; None: whose
        request it is is not known, or does not matter yet."""
        if self._held:
            self._order.used(keys, use)
        if session is not None:
            self._claims.used(keys, session)

    # ---- claims ----

    def claim(self, keys: Iterable[bytes], tenant: str, wanted: CacheClaim, now: float) -> None:
        """Those that are held, or will be, are claimed from now on. Pass the last block of a sequence first."""
        if self.num_blocks:
            self._claims.make((key for key in keys if self.knows(key)), tenant, wanted, now)

    def expire(self, now: float) -> None:
        """End the claims whose time is over."""
        self._claims.expire(now)

    def close_session(self, session: bytes) -> list[bytes]:
        """End its claims, and let go of the blocks that only it has claimed and used. Returns: their keys."""
        mine = self._claims.close(session)
        for key in mine:
            self.discard(key)
        return mine

    # ---- leaving ----

    def discard(self, key: bytes) -> None:
        """Its content may be wrong, or its file is gone."""
        self._offered.pop(key, None)
        self._claims.gone(key, evicted=False)
        if key in self._writing:
            self._writing[key] = None
        elif (block := self._held.get(key)) is not None:
            self._forget(block)
            self._removed.append(block)

    def give_up(self) -> None:
        """No block stays, and none comes any more."""
        self.is_open = False
        self._claims.clear()
        self._offered.clear()
        self._writing = dict.fromkeys(self._writing)
        for block in list(self._held.values()):
            self._forget(block)
            self._removed.append(block)

    def take_removed(self) -> list[DiskBlock]:
        """Whose files are to be removed, since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def restart(self) -> None:
        """A new epoch of events begins, with all that is held. Nothing that was offered is written: it may be wrong."""
        for key in (*self._offered, *self._writing):
            self._claims.gone(key, evicted=False)
        self._offered.clear()
        self._writing = dict.fromkeys(self._writing)
        self._events.restart()
        self._events.stored(self._held)

    def take_events(self) -> list[TierStored | TierEvicted]:
        return self._events.take()

    def check(self) -> list[str]:
        """The laws that do not hold."""
        out = []
        if set(self._held) != set(self._order):
            out.append(f"disk tier: {len(self._held)} blocks, {len(self._order)} in the order of eviction")
        if len(self._held) + len(self._writing) > self.num_blocks:
            out.append(f"disk tier: held {len(self._held)} + writing {len(self._writing)} > {self.num_blocks}")
        if twice := (self._held.keys() & self._writing.keys()) | (self._held.keys() & self._offered.keys()):
            out.append(f"disk tier: {len(twice)} blocks are held and to be written")
        return out + [f"disk tier: {broken}" for broken in self._claims.violations(self.knows)]

    def _make_room(self) -> bool:
        """For one block."""
        while len(self._held) + len(self._writing) >= self.num_blocks:
            if not self._evict_one():
                return False
        return True

    def _evict_one(self) -> bool:
        key = self._order.pop()
        if key is None:
            return False
        if not self.is_shared:
            self._removed.append(self._held[key])
        self._forget(self._held[key])
        self.num_evicted += 1
        return True

    def _drop(self, key: bytes) -> None:
        """An offered block that is not written."""
        del self._offered[key]
        self._claims.gone(key, evicted=False)
        self.num_dropped += 1

    def _forget(self, block: DiskBlock) -> None:
        self._order.remove(block.key)
        del self._held[block.key]
        self._events.evicted((block.key,))

    def _remove(self, blocks: Sequence[DiskBlock]) -> None:
        self._removed.extend(blocks)
        self.num_evicted += len(blocks)
