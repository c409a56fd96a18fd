"""Files of KV: the workers of some schedules keep blocks on disks, and start again with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from handoff_sim import reference
from handoff_sim.client import draw_ask
from handoff_sim.disks import Disk, Path, SimBlockStore, SimFolder
from handoff_sim.engine import BLOCK
from handoff_sim.laws import Law

from diptych.engine.messages import UnpackRange
from diptych.kvtransfer.disk.block_file import HEAD_BYTES, block_named, head_of
from diptych.worker.reads.block_pulls import SOURCE_ATTEMPT

if TYPE_CHECKING:
    from handoff_sim.engine import SimEngine
    from handoff_sim.links import Node
    from handoff_sim.nodes import WorkerNode
    from handoff_sim.world import World

    from diptych.engine.sched.cache.block_pool import BlockPool

_LATEST_S = 1.5
_MODEL, _OTHER_MODEL, _FOREIGN = (bytes([number]) * 16 for number in range(3))
"""Identities: of this cluster's folders, of those of a worker that starts again with another model, of no worker."""
_SOME_S = (0.1, 0.5, 2.0)


def has_files(seed: int) -> bool:
    """The other schedules are what they were without: seeds that once found a fault stay reproducers."""
    return seed % 9 == 8


def has_late_replies(seed: int) -> bool:
    """What a disk has done is noticed late: by then its request may be gone, or its block. The others as above."""
    return seed % 7 == 6


def serves_files(seed: int) -> bool:
    """Holders of pulls serve blocks of their files. The others as above."""
    return seed % 12 in (0, 2, 5, 11)


class Files:
    """Of one schedule. Turns of one history come one after the other, some are computed on decode, and workers start again."""

    def __init__(self, world: World) -> None:
        self._world, self.rng = world, Random(f"files {world.seed}")
        self._disks: dict[str, Disk] = {}
        self._delay_s = self.rng.choice((0.002, 0.02, 0.1, 0.3))
        self._apart_s = self.rng.choice((0.0, 0.1, 0.4))
        self._bytes_per_s = self.rng.choice((1e9, 1e9, 1e9, 2e4))
        self._distrusted: dict[SimEngine, set[bytes]] = {}
        self.num_read = self.num_served = self.num_restarts = self.num_damaged = 0
        asks = world.client.asks
        asks += [draw_ask(self.rng, number) for number in range(len(asks), self.rng.randint(3, 6))]
        for ask in asks:
            ask.family = asks[0].family if self.rng.random() < 0.8 else self.rng.choice(reference.FAMILIES)
            ask.length = self.rng.choice([n for n in reference.LENGTHS if n > BLOCK])
            ask.local = self.rng.random() < 0.3

    def counts(self) -> dict[str, int]:
        return {
            "restarts": self.num_restarts, "ranges_from_files": self.num_read, "damaged_files": self.num_damaged,
            "ranges_served_from_files": self.num_served,
        }  # fmt: skip

    def later_s(self, number: int) -> float:
        return number * self.rng.uniform(0.02, 0.2) + number // 2 * self._apart_s

    def before_ask(self) -> None:
        if self.rng.random() < 0.5:
            self._squeeze()

    def plan(self) -> None:
        """The schedule's faults."""
        world, rng = self._world, self.rng
        for worker_id in list(world.prefill):
            if rng.random() < 0.5:
                world.loop.call_later(rng.random() * _LATEST_S, world.trouble.kill_prefill, worker_id)
        kinds: tuple[Callable[[], None], ...] = (
            self._damage, self._damage, self._damage, self._damage, self._lose, self._purge, self._fill, self._fail, self._slow,
            self._hang, self._hang, self._squeeze, self._squeeze, self._squeeze, self._clear, self._distrust, self._strange,
        )  # fmt: skip
        for _ in range(rng.randint(0, 8)):
            world.loop.call_later(rng.random() * _LATEST_S, rng.choice(kinds))

    # ---- workers ----

    def store_of(self, node: Node, piece_bytes: Sequence[int]) -> SimBlockStore:
        """For a worker that starts: the first time, or again. Then its process, or its host, was killed."""
        rng, disk = self.rng, self._disks.get(node.worker_id)
        if disk is None:
            disk = self._disks[node.worker_id] = Disk(rng, self._delay_s)
        else:
            self.num_restarts += 1
            disk.crash(with_host=rng.random() < 0.5)
        identity = _MODEL if rng.random() < 0.95 else _OTHER_MODEL
        folder = SimFolder(disk, self._world.loop, identity, sum(piece_bytes))
        chunk_blocks, reply_delay_s = rng.choice((1, 1, 2, 3)), 0.2 if has_late_replies(self._world.seed) else 0.0
        store = SimBlockStore(disk, self._world.loop, node, folder, piece_bytes, chunk_blocks, reply_delay_s)
        store.bytes_per_s = self._bytes_per_s
        return store

    def draw_num_blocks(self) -> int:
        return self.rng.choice((3, 6, 12, 40))

    def watch(self, engine: SimEngine) -> None:
        """What is unpacked from files is checked, and that what is not trusted does not stay."""
        scheduler, disk = engine.core.scheduler, engine.core.scheduler.kv.disk
        plan, take = scheduler.plan_unpack, disk.take
        distrusted = self._distrusted[engine] = set()

        def plan_unpack(command: UnpackRange) -> Any:
            if command.attempt.endswith("\0disk"):
                self.num_read += 1
                self._world.check_unpack(command)
            elif command.attempt.startswith(SOURCE_ATTEMPT):
                self.num_served += 1
            return plan(command)

        def take_offers(most: int, is_there: Callable[[bytes], bool]) -> Any:
            taken = take(most, is_there)
            distrusted.difference_update(block.key for block in taken)
            return taken

        scheduler.plan_unpack, disk.take = plan_unpack, take_offers  # type: ignore[method-assign]
        traffic: Any = engine.core._disk
        if not serves_files(self._world.seed):
            traffic.begin_source = lambda command: False
        save = traffic._save_into

        def save_into(buffer: memoryview) -> bool:
            if self.rng.random() < 0.03:  # in the step that has just ended
                self._evict_all(scheduler.kv.pools)
            engine.is_saving = True
            try:
                return bool(save(buffer))
            finally:
                engine.is_saving = False

        traffic._save_into = save_into

    # ---- faults ----

    def _nodes(self) -> list[WorkerNode]:
        return [node for node in self._world.nodes if not node.node.dead and not node.node.stopped]

    def _a_disk(self) -> Disk:
        return self._disks[self.rng.choice(sorted(self._disks))]

    def _a_file(self) -> tuple[Disk, Path] | None:
        disk = self._a_disk()
        return (disk, self.rng.choice(sorted(disk.files))) if disk.files else None

    def _damage(self) -> None:
        if (found := self._a_file()) is None or not found[0].files[found[1]]:
            return
        disk, path = found
        content = bytearray(disk.files[path])
        kind = self.rng.choice(("flip", "flip", "cut", "empty", "long", "swap", "swap", "other model", "other model"))
        match kind:
            case "flip":
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            case "cut":
                content = content[: self.rng.randrange(len(content))]
            case "empty":
                content.clear()
            case "long":
                content += b"x"
            case "swap":
                content = bytearray(disk.files[self.rng.choice(sorted(disk.files))])
            case "other model":
                payload = self.rng.randbytes(max(0, len(content) - HEAD_BYTES))
                block = block_named(path[2], path[1])
                content = bytearray(
                    head_of(_FOREIGN, block.key if block else bytes(16), [memoryview(payload)]) + payload
                )
        disk.files[path] = bytes(content)
        disk.touched.add(path)
        self.num_damaged += 1

    def _lose(self) -> None:
        if (found := self._a_file()) is not None:
            disk, path = found
            disk.remove(path)
            disk.touched.add(path)

    def _purge(self) -> None:
        """As `diptych cache purge` does, while the workers run."""
        for disk in self._disks.values():
            for path in list(disk.files):
                disk.remove(path)
                disk.touched.add(path)

    def _strange(self) -> None:
        """A file of somebody else."""
        disk = self._a_disk()
        path = _MODEL, "0" * 32, "notes.txt"
        disk.files[path], disk.last_use[path] = b"not KV", self._world.loop.time()
        disk.touched.add(path)

    def _for_a_while(self, disk: Disk, what: str) -> None:
        setattr(disk, what, True)

        def ends() -> None:
            setattr(disk, what, False)
            disk.on_resume()

        if what != "hangs" or self.rng.random() < 0.7:
            self._world.loop.call_later(self.rng.choice(_SOME_S), ends)

    def _fill(self) -> None:
        self._for_a_while(self._a_disk(), "is_full")

    def _fail(self) -> None:
        self._for_a_while(self._a_disk(), "fails")

    def _hang(self) -> None:
        self._for_a_while(self._a_disk(), "hangs")

    def _slow(self) -> None:
        self._a_disk().delay_s = 0.4

    def _squeeze(self) -> None:
        """Other requests have taken all blocks, and ended: what was cached is in files alone."""
        for node in self._nodes():
            self._evict_all(node.engine.core.scheduler.kv.pools)

    @staticmethod
    def _evict_all(pools: Sequence[BlockPool]) -> None:
        for pool in pools:
            pool.release(pool.allocate(max(0, pool.available)) or ())

    def _clear(self) -> None:
        nodes = self._nodes()
        if nodes:
            self.rng.choice(nodes).engine.core.scheduler.kv.clear()

    def _distrust(self) -> None:
        """The KV of blocks that are being written may be wrong."""
        for node in self._nodes():
            disk = node.engine.core.scheduler.kv.disk
            for key in list(disk._writing):
                disk.discard(key)
                self._distrusted[node.engine].add(key)

    # ---- laws ----

    def at_work(self) -> bool:
        """A disk has still to write or read what is queued, each in its time: one that hung for seconds has only begun."""
        return any(node.engine.store is not None and node.engine.store.num_queued for node in self._nodes())

    def check_step(self, engine: SimEngine, worker_id: str) -> None:
        """No request waits for files longer than computing their blocks was predicted to take."""
        now = self._world.loop.time()
        late = [one.request.attempt for one in engine.core._disk._waiting.values() if one.until <= now]  # type: ignore[union-attr]
        if late:
            self._world.report(Law.FILES_IN_TIME, f"{worker_id}: {late} wait for files for too long")

    def left_over(self, node: WorkerNode) -> list[str]:
        """What a worker has still to do."""
        engine = node.engine
        store, traffic = engine.store, engine.core._disk
        if store is None or traffic is None or store.disk.hangs:
            return []
        out = []
        if traffic._waiting or traffic._jobs:
            out.append(f"{node.ref.worker_id}: {len(traffic._waiting)} requests wait for files")
        if store.is_busy or engine.core.scheduler.kv.disk._writing:
            out.append(f"{node.ref.worker_id}: the disk is busy, or buffers are left")
        return out

    def check_end(self, node: WorkerNode) -> list[str]:
        """The files are what the worker's account says, but for those that a fault has touched; nothing stays that must not."""
        engine = node.engine
        store, disk = engine.store, engine.core.scheduler.kv.disk
        if store is None or store.disk.hangs:
            return []
        name, out = node.ref.worker_id, []
        held = {store.folder.path(block) for block in disk._held.values()}
        removed = {store.folder.path(block) for block in disk._removed}
        files = {path for path in store.disk.files if path[0] == store.folder.identity}
        if extra := files - held - removed - store.disk.touched:
            out.append(f"{name}: {len(extra)} files are in no account, of {len(files)}")
        if missing := held - files - store.disk.touched:
            out.append(f"{name}: {len(missing)} files are missing, of {len(held)}")
        if kept := self._distrusted[engine] & disk._held.keys():
            out.append(f"{name}: {len(kept)} blocks whose KV may be wrong are still in files")
        return out


class Mirror:
    """What a router knows of one worker's cache by its events, in every tier."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {}
        self._sequences: dict[str, int] = {}

    def take(self, tier: str, sequence: int, stored: tuple[bytes, ...], evicted: tuple[bytes, ...]) -> str:
        """Returns: what is wrong with the event; empty: nothing."""
        before = self._sequences.get(tier, 0)
        self._sequences[tier] = sequence
        keys = self.tiers.setdefault(tier, set())
        keys.update(stored)
        keys.difference_update(evicted)
        return "" if sequence == before + 1 else f"event {sequence} of tier {tier} follows event {before}"

    def clear(self) -> None:
        self.tiers.clear()
        self._sequences.clear()
