"""The Worker service: facts about this worker, and its role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from diptych.common.errors import InvalidRequestError, StaleReferenceError
from diptych.common.tiers import TIER_NAMES
from diptych.engine.api import EngineClient
from diptych.rpc.convert import check_folder, check_session
from diptych.rpc.errors import errors_to_status
from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc
from diptych.worker import wire
from diptych.worker.adapters import AdapterLibrary

KEYS_PER_MESSAGE = 65_536
"""Of each tier: at most 2 MiB a message."""


class WorkerFacts(Protocol):
    """The service's interface to the runtime."""

    engine: EngineClient

    @property
    def library(self) -> AdapterLibrary | None: ...

    def info(self) -> worker_pb2.GetInfoResponse: ...

    async def audit(self, *, full: bool) -> worker_pb2.AuditResponse: ...

    def worker_stats(self) -> worker_pb2.GetStatsResponse: ...

    async def set_role(self, name: str, *, force: bool) -> str: ...


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, runtime: WorkerFacts) -> None:
        self._runtime = runtime

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return self._runtime.info()

    async def Audit(
        self, request: worker_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AuditResponse:
        async with errors_to_status(context):
            return await self._runtime.audit(full=request.full)
        raise AssertionError("errors_to_status ended the call")

    async def GetStats(
        self, request: worker_pb2.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStatsResponse:
        return self._runtime.worker_stats()

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetRoleResponse:
        async with errors_to_status(context):
            me = self._runtime.info()
            if request.worker_id != me.worker_id or request.incarnation not in ("", me.incarnation):
                raise StaleReferenceError(
                    f"this is {me.worker_id}/{me.incarnation}, the request is for {request.worker_id}/{request.incarnation}"
                )
            before = await self._runtime.set_role(wire.role_from_proto(request.role), force=request.force)
            return worker_pb2.SetRoleResponse(previous=wire.role_to_proto(before))
        raise AssertionError("errors_to_status ended the call")

    async def ReleaseSession(
        self, request: worker_pb2.ReleaseSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReleaseSessionResponse:
        async with errors_to_status(context):
            session = check_session(request.session, "session")
            return worker_pb2.ReleaseSessionResponse(freed_tokens=await self._runtime.engine.close_session(session))
        raise AssertionError("errors_to_status ended the call")

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.LoadAdapterResponse:
        async with errors_to_status(context):
            folder = check_folder(request.folder, "folder")
            adapter = await self._library().load(folder, request.expected_id)
            return worker_pb2.LoadAdapterResponse(
                id=adapter.id, rank=adapter.rank, num_bytes=adapter.num_bytes, base_model=adapter.base_model
            )
        raise AssertionError("errors_to_status ended the call")

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        async with errors_to_status(context):
            found, num_requests = self._library().unload(request.id)
            return worker_pb2.UnloadAdapterResponse(found=found, num_requests=num_requests)
        raise AssertionError("errors_to_status ended the call")

    def _library(self) -> AdapterLibrary:
        """Raises: InvalidRequestError."""
        library = self._runtime.library
        if library is None:
            raise InvalidRequestError("this worker serves no adapters: start it with --enable-lora", param="adapter")
        return library

    async def DumpBlocks(
        self, request: worker_pb2.DumpBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DumpBlocksResponse]:
        async with errors_to_status(context):
            dump = await self._runtime.engine.dump_blocks()
            for first in range(0, max(1, *(len(tier.keys) for tier in dump.tiers)), KEYS_PER_MESSAGE):
                part = slice(first, first + KEYS_PER_MESSAGE)
                tiers = [
                    worker_pb2.TierBlocks(tier=name, sequence=tier.sequence, block_keys=b"".join(tier.keys[part]))
                    for name, tier in zip(TIER_NAMES, dump.tiers, strict=True)
                ]
                yield worker_pb2.DumpBlocksResponse(epoch=dump.epoch, tiers=tiers)
