"""The Decode service: one multiplexed stream for each router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from diptych.decode.attempt_manager import AttemptManager, Session
from diptych.rpc.errors import errors_to_status
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, intake: AttemptManager) -> None:
        self._intake = intake

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        session = self._intake.open_session()
        reader = asyncio.create_task(_read(request_iterator, session), name="attach reader")
        try:
            async with errors_to_status(context):
                while (batch := await session.outbox.next_batch()) is not None:
                    yield batch
        finally:
            reader.cancel()
            session.detach()

    async def Find(self, request: decode_pb2.FindRequest, context: grpc.aio.ServicerContext) -> decode_pb2.FindResponse:
        return decode_pb2.FindResponse(resume_ref=self._intake.find(request.idempotency))


async def _read(commands: AsyncIterator[decode_pb2.Command], session: Session) -> None:
    """Read until the stream ends. A router that stops closes its side, a killed one does not; either way another one may
    go on with its answers. What it does not want it has cancelled."""
    try:
        async for command in commands:
            session.on_command(command)
    except grpc.aio.UsageError:
        pass  # the call was cancelled
    finally:
        session.detach()
