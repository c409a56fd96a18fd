"""Hands verified slabs to the step thread, and returns every one of them, whatever happened to its attempt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count

from diptych.common.errors import TransferError
from diptych.engine.messages import RangeUnpacked, UnpackRange
from diptych.kvtransfer.api import ReceivedSlab, SlabReader
from diptych.kvtransfer.slabs.convert import ConvertedRange, FedRange, RangeConverter
from diptych.worker.ports import Engine


@dataclass(slots=True)
class _Lent:
    """A slab, and how many jobs of the step thread read from it."""

    slab: ReceivedSlab
    jobs: int


class SlabUnpacker:
    """The step thread owns the slab from UnpackRange until RangeUnpacked, so slabs are only returned here."""

    def __init__(self, engine: Engine, reader: SlabReader) -> None:
        self._engine = engine
        self._reader = reader
        self._jobs = count(1)
        self._open: dict[int, tuple[_Lent | None, asyncio.Future[bool]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def drained(self) -> None:
        """Wait until the step thread has no slab."""
        await self._idle.wait()

    def unpack_converted(
        self, attempt: str, slab: ReceivedSlab, converter: RangeConverter, *, pull: bool = False
    ) -> list[tuple[ConvertedRange, asyncio.Future[bool]]]:
        """As `unpack`, for what the converter makes of a slab and of earlier ones. The slab is finished at once, or when the
        ranges that go straight are unpacked. Raises: TransferError, see RangeConverter.feed; the slab is finished."""
        handle = slab.handle
        try:
            ranges = converter.feed(
                FedRange(
                    handle.first_token, handle.num_tokens, slab.payload, handle.part, handle.group, handle.first_layer,
                    handle.num_layers,
                )
            )  # fmt: skip
        except BaseException:
            self._reader.finish(slab)
            raise
        lent = _Lent(slab, sum(one.is_straight for one in ranges))
        if not lent.jobs:
            self._reader.finish(slab)
        unpacking = []
        for one in ranges:
            job, answer = self._job(lent if one.is_straight else None)
            self._engine.send(
                UnpackRange(
                    attempt,
                    job,
                    one.first_token,
                    one.num_tokens,
                    one.payload,
                    first_layer=one.first_layer,
                    num_layers=one.num_layers,
                    converted=converter.changes_values,
                    group=one.group,
                    part=one.part,
                    pull=pull,
                )
            )
            unpacking.append((one, answer))
        return unpacking

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
        job, answer = self._job(_Lent(slab, 1))
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

    def _job(self, lent: _Lent | None) -> tuple[int, asyncio.Future[bool]]:
        job = next(self._jobs)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._open[job] = (lent, answer)
        self._idle.clear()
        return job, answer

    def on_unpacked(self, event: RangeUnpacked) -> None:
        entry = self._open.pop(event.job, None)
        if not self._open:
            self._idle.set()
        if entry is None:
            return
        lent, answer = entry
        if lent is not None:
            lent.jobs -= 1
            if not lent.jobs:
                self._reader.finish(lent.slab)
        if answer.done():
            return
        if event.error:
            where = (
                "a converted range" if lent is None else f"slab {lent.slab.handle.slab} of {lent.slab.handle.worker_id}"
            )
            answer.set_exception(TransferError(f"{where} is damaged: {event.error}"))
        else:
            answer.set_result(event.unpacked)
