"""Hands verified slabs to the step thread and gives every one of them back, whatever became of its attempt."""

from __future__ import annotations

import asyncio
from itertools import count

from diptych.common.errors import TransferError
from diptych.engine.messages import Payload, RangeUnpacked, UnpackRange
from diptych.kvtransfer.api import ReceivedSlab, SlabReader
from diptych.kvtransfer.convert import ConvertedRange
from diptych.worker.ports import Engine


class SlabUnpacker:
    """The slab belongs to the step thread from UnpackRange until RangeUnpacked, so it is finished here and nowhere else."""

    def __init__(self, engine: Engine, reader: SlabReader) -> None:
        self._engine = engine
        self._reader = reader
        self._jobs = count(1)
        self._open: dict[int, tuple[ReceivedSlab | None, asyncio.Future[bool]]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def unpack_converted(self, attempt: str, part: ConvertedRange, *, last: bool = False) -> bool:
        """As `unpack`, of bytes that lie in memory of their own."""
        return await self._ask(attempt, None, part.first_token, part.num_tokens, part.payload, last)

    async def unpack(self, attempt: str, slab: ReceivedSlab, *, last: bool = False) -> bool:
        """Unpack a slab into the attempt's blocks. False: the engine no longer wanted it. Cancelling the wait is safe.

        Args: last: every other range of the attempt has been given to the engine before.
        Raises: TransferError: the bytes were damaged, which shows only now if they came straight from a peer's GPU.
        """
        handle = slab.handle
        layers = range(handle.first_layer, handle.first_layer + handle.num_layers)
        return await self._ask(attempt, slab, handle.first_token, handle.num_tokens, slab.payload, last, layers)

    async def _ask(
        self,
        attempt: str,
        slab: ReceivedSlab | None,
        first_token: int,
        num_tokens: int,
        payload: Payload,
        last: bool,
        layers: range = range(0),
    ) -> bool:
        """`layers`: none: all of them."""
        job = next(self._jobs)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._open[job] = (slab, answer)
        self._engine.send(UnpackRange(attempt, job, first_token, num_tokens, payload, last, layers.start, len(layers)))
        return await answer

    def on_unpacked(self, event: RangeUnpacked) -> None:
        entry = self._open.pop(event.job, None)
        if entry is None:
            return
        slab, answer = entry
        if slab is not None:
            self._reader.finish(slab)
        if answer.done():
            return
        if event.error:
            where = "a converted range" if slab is None else f"slab {slab.handle.slab} of {slab.handle.worker_id}"
            answer.set_exception(TransferError(f"{where} is damaged: {event.error}"))
        else:
            answer.set_result(event.unpacked)
