"""gRPC plumbing shared by both clients: channel options, methods, and conversion of failed calls to errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from diptych.client.errors import StreamBrokenError, UnreachableError
from diptych.common.errors import DiptychError, InvalidRequestError, NoWorkerError, OverloadedError
from diptych.rpc.channels import channel_options
from diptych.rpc.errors import TRAILER, from_rpc_error
from diptych.rpc.v1 import decode_pb2, router_pb2

DEFAULT_ADDRESS = "127.0.0.1:50050"
DEFAULT_TIMEOUT_S = 600.0
"""Deadline of generate and stream, in seconds."""
DEFAULT_LIST_TIMEOUT_S = 10.0

SERVICE = "/diptych.rpc.v1.Router/"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a connection to a router.

    Args:
        ca_file: PEM file of the authorities to trust; None: the defaults of gRPC.
        server_name: the name that the certificate must hold, if it is not the host of the address.
    """

    ca_file: str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises: OSError when the file cannot be read."""
        return grpc.ssl_channel_credentials(None if self.ca_file is None else Path(self.ca_file).read_bytes())


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. `api_key` None: the key in DIPTYCH_API_KEY, if set.

    Raises: InvalidRequestError, without the key in its text, for a key that cannot be sent.
    """
    key = os.environ.get("DIPTYCH_API_KEY", "") if api_key is None else api_key
    if not key:
        return ()
    if not isinstance(key, str) or not key.isascii() or not key.isprintable():
        raise InvalidRequestError("api_key must be printable ASCII", param="api_key")
    return (("authorization", f"Bearer {key}"),)


def tls_options(tls: Tls | None) -> list[tuple[str, Any]]:
    if tls is None or not tls.server_name:
        return [*options()]
    return [*options(), ("grpc.ssl_target_name_override", tls.server_name)]


def options() -> list[tuple[str, int]]:
    return channel_options()


def generate_method(channel: Any) -> Callable[..., Any]:
    """The Generate call of a sync or an aio channel; open it with `method(request, timeout=...)`."""
    method: Callable[..., Any] = channel.unary_stream(
        SERVICE + "Generate",
        request_serializer=router_pb2.GenerateRequest.SerializeToString,
        response_deserializer=router_pb2.GenerateResponse.FromString,
    )
    return method


def placements_method(channel: Any) -> Callable[..., Any]:
    method: Callable[..., Any] = channel.stream_stream(
        SERVICE + "Placements",
        request_serializer=router_pb2.PlacementsRequest.SerializeToString,
        response_deserializer=router_pb2.PlacementsResponse.FromString,
    )
    return method


def attach_method(channel: Any) -> Callable[..., Any]:
    """The Lookaside.Attach call of a decode worker."""
    method: Callable[..., Any] = channel.stream_stream(
        "/diptych.rpc.v1.Lookaside/Attach",
        request_serializer=decode_pb2.TicketCommands.SerializeToString,
        response_deserializer=decode_pb2.StepBatch.FromString,
    )
    return method


def list_models_method(channel: Any) -> Callable[..., Any]:
    method: Callable[..., Any] = channel.unary_unary(
        SERVICE + "ListModels",
        request_serializer=router_pb2.ListModelsRequest.SerializeToString,
        response_deserializer=router_pb2.ListModelsResponse.FromString,
    )
    return method


def close_session_method(channel: Any) -> Callable[..., Any]:
    method: Callable[..., Any] = channel.unary_unary(
        SERVICE + "CloseSession",
        request_serializer=router_pb2.CloseSessionRequest.SerializeToString,
        response_deserializer=router_pb2.CloseSessionResponse.FromString,
    )
    return method


def close_session_request(session_id: str) -> router_pb2.CloseSessionRequest:
    """Raises: InvalidRequestError."""
    try:
        return router_pb2.CloseSessionRequest(session_id=session_id)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"session_id cannot be sent: {error}", param="session_id") from None


def typed(error: grpc.RpcError, address: str) -> DiptychError:
    """The DiptychError of a failed call. UNAVAILABLE without our details comes from gRPC: the router was not reached."""
    found = from_rpc_error(error)
    if isinstance(found, (NoWorkerError, OverloadedError)):
        trailers = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
        if any(key == TRAILER for key, _ in trailers or ()):
            return found
        if isinstance(found, NoWorkerError):
            return UnreachableError(f"the router at {address} cannot be reached: {_plain(found.message)}")
        if size := _TOO_LARGE.search(found.message):
            return _too_large(*size.groups())
    return found


_TOO_LARGE = re.compile(r"(CLIENT: |SERVER: )?(Sent|Received) message larger than max", re.IGNORECASE)


def _too_large(side: str | None, way: str) -> DiptychError:
    """gRPC refused a message for its size: a retry would not help."""
    if way.lower() == "sent" or (side or "").upper().startswith("SERVER"):
        return InvalidRequestError("the request is larger than a message can be", param="request")
    return StreamBrokenError(
        "a message of the answer is larger than a message can be: ask for less (fewer logprobs, for one)"
    )


_CODE = re.compile(r" ?\(\d+\)$")


def _plain(details: str) -> str:
    """The last part of gRPC's message, as in "Connection refused (111)", without addresses and layers."""
    return _CODE.sub("", details.rpartition(": ")[2]) if "last error: " in details else details
