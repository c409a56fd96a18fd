"""The calls about adapters, of the service for clients (who need an admin key for changes) and of that for operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from diptych.common.errors import InvalidRequestError
from diptych.common.store.adapters import AdapterEntry
from diptych.router.adapters.operations import AdapterOperations, LoadRequest
from diptych.router.api.grpc.requests import parse
from diptych.rpc.v1 import router_pb2

Call = Callable[[AdapterOperations, bytes, str | None], Awaitable[Message]]
"""From (operations, message, tenant that may see only its adapters) to the answer. Raises: DiptychError."""
LIST = "ListAdapters"


def adapter_to_proto(entry: AdapterEntry) -> router_pb2.Adapter:
    return router_pb2.Adapter(
        name=entry.name,
        model=entry.model,
        versions=[
            router_pb2.AdapterVersion(
                number=version.number,
                id=version.adapter_id,
                folder=version.folder,
                rank=version.rank,
                num_bytes=version.num_bytes,
                created=version.created,
                other_base=version.other_base,
            )
            for version in entry.versions
        ],
        stable=entry.stable,
        canary=entry.canary,
        canary_share=entry.canary_share,
        previous=entry.previous,
    )


async def list_adapters(operations: AdapterOperations, body: bytes, tenant: str | None) -> Message:
    parse(router_pb2.ListAdaptersRequest, body)
    return router_pb2.ListAdaptersResponse(adapters=map(adapter_to_proto, operations.entries(tenant)))


async def add_adapter(operations: AdapterOperations, body: bytes, tenant: str | None) -> Message:
    request = parse(router_pb2.AddAdapterRequest, body)
    asked = LoadRequest(request.name, request.folder, request.model, request.in_place, request.canary_share)
    return adapter_to_proto(await operations.load(asked))


async def remove_adapter(operations: AdapterOperations, body: bytes, tenant: str | None) -> Message:
    return adapter_to_proto(await operations.unload(parse(router_pb2.RemoveAdapterRequest, body).name))


async def route_adapter(operations: AdapterOperations, body: bytes, tenant: str | None) -> Message:
    request = parse(router_pb2.RouteAdapterRequest, body)
    change = request.WhichOneof("change")
    if change == "canary":
        entry = await operations.set_canary(request.name, request.canary.version, request.canary.share)
    elif change == "promote":
        entry = await operations.promote(request.name)
    elif change == "roll_back":
        entry = await operations.roll_back(request.name, request.roll_back.version)
    else:
        raise InvalidRequestError("change: one of canary, promote and roll_back must be set", param="change")
    return adapter_to_proto(entry)


CALLS: Mapping[str, Call] = {
    LIST: list_adapters, "AddAdapter": add_adapter, "RemoveAdapter": remove_adapter, "RouteAdapter": route_adapter,
}  # fmt: skip
"""By the method's name."""


def serialized(message: Any) -> bytes:
    """Of any message."""
    return bytes(message.SerializeToString())
