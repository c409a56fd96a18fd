"""Prefill's side of the loopback benchmark: packs scattered blocks into slabs and publishes them. Driven by lines on
stdin."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from typing import Any

import numpy as np
import uvloop

from diptych.bench.kvtransfer.blocks import KEY, LAYOUT, BlockPool, blocks_per_slab
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import encode
from diptych.kvtransfer.wrappers.ciphers import OFF


class Publisher:
    """A step thread that packs, an event loop that publishes."""

    def __init__(self, pool: BlockPool, settings: dict[str, Any], raw_bytes: int, newest_first: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._grants: queue.Queue[SlabGrant] = queue.LifoQueue() if newest_first else queue.Queue()
        self._raw_grants: asyncio.Queue[SlabGrant] = asyncio.Queue()
        self.per_slab = blocks_per_slab(settings["slab_bytes"])
        self.transfer = self._make(settings, "p-kv")
        raw = {**settings, "slab_bytes": raw_bytes + 4096, "num_slabs": 1, "kv_encryption": OFF}
        self.raw = self._make(raw, "p-raw")
        self._raw_bytes = raw_bytes
        self.transfer.start(self._lend, lambda attempt, slab: None)
        self.raw.start(self._lend_raw, lambda attempt, slab: None)

    def _lend(self, grants: tuple[SlabGrant, ...]) -> None:
        for grant in grants:
            self._grants.put(grant)

    def _lend_raw(self, grants: tuple[SlabGrant, ...]) -> None:
        for grant in grants:
            self._loop.call_soon_threadsafe(self._raw_grants.put_nowait, grant)

    def _make(self, settings: dict[str, Any], worker_id: str) -> Transfer:
        config = TransferConfig(**settings)
        return build_transfer(
            config,
            worker_id=worker_id,
            incarnation="0",
            publishes=True,
            layout_hash=LAYOUT,
            loop=self._loop,
            encryption_key=KEY,
        )

    async def kv(self, ids: list[int]) -> None:
        """Pack on a separate thread, as the step thread does; announce each slab when it is packed."""
        ended = asyncio.Event()

        def pack_all() -> None:
            for first in range(0, len(ids), self.per_slab):
                some = ids[first : first + self.per_slab]
                grant = self._grants.get()
                assert isinstance(grant.payload, memoryview)
                size, checksum = self._pool.pack(some, grant.payload)
                packed = RangePacked("a", grant.slab, grant.generation, first, len(some), size, checksum)
                self._loop.call_soon_threadsafe(self._announce, self.transfer, packed)
            self._loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=pack_all).start()
        await ended.wait()

    async def one_message(self) -> None:
        grant = await self._raw_grants.get()
        self._announce(self.raw, RangePacked("raw", grant.slab, grant.generation, 0, 1, self._raw_bytes, 0))

    def _announce(self, transfer: Transfer, packed: RangePacked) -> None:
        say(encode(transfer.publish("d", packed)).hex())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(settings: dict[str, Any], num_blocks: int, raw_bytes: int, knobs: dict[str, Any]) -> None:
    sys.setswitchinterval(knobs["switch_interval_s"])
    pool = BlockPool(num_blocks, filled=True)
    publisher = Publisher(pool, settings, raw_bytes, knobs["newest_first"])
    hello = {}
    for name, transfer in (("kv", publisher.transfer), ("raw", publisher.raw)):
        address = transfer.address
        hello[name] = {"transport": address.transport, "host": address.host, "blob": address.blob.hex()}
    agent = None
    if settings["transport"] == "nixl":
        # Imported here: it loads NIXL.
        from diptych.bench.kvtransfer.descriptors import BlockAgent

        agent = BlockAgent("p-blocks", pool)
        hello["blocks"] = agent.hello()
    say(json.dumps({**hello, "path": publisher.transfer.path, "self_test": publisher.transfer.bytes_per_s}))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        match line:
            case ["kv", seed, count]:
                ids = np.random.default_rng(int(seed)).permutation(num_blocks)[: int(count)].tolist()
                await publisher.kv(ids)
            case ["descriptors"] if agent is not None:
                agent.serve()
                say("serving")
            case ["raw"]:
                await publisher.one_message()
            case _:
                break
    await publisher.transfer.close()
    await publisher.raw.close()


if __name__ == "__main__":
    uvloop.run(main(*json.loads(sys.argv[1])))
