"""A prefill worker's transfer side as a separate process, driven by commands.

publish ATTEMPT SIZE SEED -> one line: the handle in hex     release ATTEMPT     audit     quit
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

import numpy as np
import uvloop
import xxhash

from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import encode
from diptych_tests.line_process import commands, say


async def main(worker_id: str, incarnation: str, options: dict[str, object]) -> None:
    loop = asyncio.get_running_loop()
    grants: asyncio.Queue[SlabGrant] = asyncio.Queue()
    transfer = build_transfer(
        TransferConfig(**options),  # type: ignore[arg-type]
        worker_id=worker_id, incarnation=incarnation, publishes=True, layout_hash=7, loop=loop, encryption_key=bytes(32),
    )  # fmt: skip

    def on_grants(granted: tuple[SlabGrant, ...]) -> None:
        for grant in granted:
            loop.call_soon_threadsafe(grants.put_nowait, grant)

    transfer.start(on_grants, lambda attempt, slab: None)
    address = transfer.address
    say({"host": address.host, "port": address.port, "blob": address.blob.hex(), "path": transfer.path})
    async for words in commands():
        match words:
            case ["publish", attempt, size, seed]:
                grant = await grants.get()
                data = np.random.default_rng(int(seed)).integers(0, 256, int(size), np.uint8)
                grant.payload[: int(size)] = data.data
                digest = xxhash.xxh3_64_intdigest(data)
                packed = RangePacked(attempt, grant.slab, grant.generation, 0, 16, int(size), digest)
                say({"handle": encode(transfer.publish("d0", packed)).hex()})
            case ["release", attempt]:
                transfer.release(attempt)
                say({})
            case ["audit"]:
                audit = await transfer.audit(full=True)
                say({**dataclasses.asdict(audit), "slabs": dataclasses.asdict(audit.slabs)})
            case _:
                break
    await transfer.close()


if __name__ == "__main__":
    uvloop.run(main(*json.loads(sys.argv[1])))
