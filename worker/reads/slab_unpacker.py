"""Hands verified slabs to the step thread, and returns every one of them, whatever happened to its attempt."""

from __future__ import annotations

import asyncio
from itertools import count

from diptych.common.errors import TransferError
from diptych.engine.messages import RangeUnpacked, UnpackRange
from diptych.kvtransfer.api import ReceivedSlab, SlabReader
from diptych.kvtransfer.slabs.convert import ConvertedRange
from diptych.worker.ports import Engine


class SlabUnpacker:
    """The step thread owns the slab from UnpackRange until RangeUnpacked, so slabs are only returned here."""

    def __init__(self, engine: Engine, reader: SlabReader) -> None:
        self._engine = engine
        self._reader = reader
        self._jobs = count(1)
        self._open: dict[int, tuple[ReceivedSlab | None, asyncio.Future[bool]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def drained(self) -> None:
        """Wait until the step thread has no slab."""
        await self._idle.wait()

    async def unpack_converted(self, attempt: str, part: ConvertedRange, *, other_values: bool) -> bool:
        """As `unpack`, for converted bytes in separate memory. `other_values`: the conversion changed values."""
        job, answer = self._job(None)
        self._engine.send(
            UnpackRange(attempt, job, part.first_token, part.num_tokens, part.payload, converted=other_values)
        )
        return await answer

    def unpack(
        self, attempt: str, slab: ReceivedSlab, *, last: bool = False, pull: bool = False
    ) -> asyncio.Future[bool]:
        """Unpack a slab into the attempt's blocks. False: the engine no longer needed it. The wait may be cancelled.

        Args:
            last: every other range of the attempt was handed to the engine before.
            pull: the attempt is a pull.
        Raises: TransferError: the bytes are damaged, which is only detected now if they came directly from a peer's
            GPU.
        """
        handle = slab.handle
        job, answer = self._job(slab)
        self._engine.send(
            UnpackRange(
                attempt,
                job,
                handle.first_token,
                handle.num_tokens,
                slab.payload,
                last,
                handle.first_layer,
                handle.num_layers,
                group=handle.group,
                part=handle.part,
                pull=pull,
            )
        )
        return answer

    def _job(self, slab: ReceivedSlab | None) -> tuple[int, asyncio.Future[bool]]:
        job = next(self._jobs)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._open[job] = (slab, answer)
        self._idle.clear()
        return job, answer

    def on_unpacked(self, event: RangeUnpacked) -> None:
        entry = self._open.pop(event.job, None)
        if not self._open:
            self._idle.set()
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
