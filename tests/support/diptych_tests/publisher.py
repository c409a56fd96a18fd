"""A publisher in a child process (publisher_process.py)."""

from __future__ import annotations

import time
from typing import Any

from diptych.kvtransfer.api import KvAddress, PeerRef, SlabCounts, Transfer
from diptych.kvtransfer.slabs.handle import SlabHandle, decode
from diptych_tests import waiting
from diptych_tests.line_process import LineProcess

SIZE = 3 << 20


class Publisher(LineProcess):
    ref: PeerRef
    path: object

    @classmethod
    async def start(
        cls, incarnation: str = "life1", worker_id: str = "p0", inside: tuple[str, ...] = (), **options: object
    ) -> Publisher:
        """`inside`: as in LineProcess.spawn."""
        settings = {"transport": "ucx", "num_slabs": 8, **options}
        child = await cls.spawn("publisher_process", [worker_id, incarnation, settings], inside=inside)
        child.path = child.hello["path"]
        address = KvAddress(str(settings["transport"]), child.hello["host"], 0, bytes.fromhex(child.hello["blob"]))
        child.ref = PeerRef(worker_id, incarnation, address)
        return child

    async def publish(self, attempt: str, seed: int, size: int = SIZE) -> SlabHandle:
        return decode(bytes.fromhex((await self.ask(f"publish {attempt} {size} {seed}"))["handle"]))

    async def counts(self) -> SlabCounts:
        answer = await self.ask("audit")
        assert not answer["violations"]
        return SlabCounts(**answer["slabs"])


async def until_free(transfer: Transfer) -> None:
    async def free() -> bool:
        audit = await transfer.audit(full=True)
        assert not audit.violations
        return audit.slabs.free == audit.slabs.total

    await waiting.until(free, "slabs come back")


async def in_flight(transfer: Transfer, reads: int) -> None:
    """Until so many reads have been sent."""

    async def sent() -> bool:
        return (await transfer.audit()).slabs.in_flight == reads

    await waiting.until(sent, f"{reads} reads are in flight")


async def all_back(publisher: Publisher) -> None:
    """Until every slab of the publisher is free again."""

    async def free() -> bool:
        return (await publisher.counts()).free == 8

    await waiting.until(free, "the publisher's slabs come back")


async def turns(reader: Transfer, count: int) -> float:
    """Seconds that the transfer thread takes to come round so often."""
    seen, turn = [0], reader.turn

    def counted() -> Any:
        seen[0] += 1
        return turn()

    reader.turn = counted
    began = time.monotonic()
    try:
        await waiting.until(lambda: seen[0] >= count, f"{count} turns of the transfer thread")
    finally:
        reader.turn = turn
    return time.monotonic() - began


async def comes_to_rest(reader: Transfer, *, turns_a_second: int) -> None:
    """Until the transfer thread takes no more turns than that. One that spins never does, one that a busy machine holds up does
    the sooner."""

    async def rests() -> bool:
        return turns_a_second / 4 / await turns(reader, turns_a_second // 4) <= turns_a_second

    await waiting.until(rests, "the transfer thread sleeps while nothing happens")
