"""DiptychError <-> gRPC status <-> proto Failure, both ways.

On the wire an error is a google.rpc.Status in the trailer `grpc-status-details-bin` with ErrorInfo(domain "diptych"),
BadRequest for an invalid field, and RetryInfo if a retry makes sense. The client SDK imports this module, so it needs
only grpcio and protobuf.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import DecodeError, Message

from diptych.common.errors import (
    AuthenticationError,
    DiptychError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    RequestDeadlineError,
    StaleReferenceError,
    WorkerLostError,
    from_reason,
)
from diptych.rpc.v1 import status_pb2, types_pb2

DOMAIN = "diptych"
TRAILER = "grpc-status-details-bin"

_PUBLIC = "type.googleapis.com/google.rpc."

_log = logging.getLogger(__name__)

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Errors for a status without our details: raised by grpc itself (peer gone, deadline, message too big) or by a proxy.
_BY_CODE: dict[int, type[DiptychError]] = {
    1: RequestCancelledError,
    3: InvalidRequestError,
    4: RequestDeadlineError,
    5: ModelNotFoundError,
    7: PermissionDeniedError,
    8: OverloadedError,
    9: StaleReferenceError,
    10: WorkerLostError,
    14: NoWorkerError,
    16: AuthenticationError,
}


def to_status(error: DiptychError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with its details packed."""
    status = status_pb2.Status(code=error.grpc_code, message=error.message)
    info = status_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.param:
        info.metadata["param"] = error.param
    _pack(status, info)
    if error.param and isinstance(error, InvalidRequestError):
        bad = status_pb2.BadRequest()
        bad.field_violations.add(field=error.param, description=error.message)
        _pack(status, bad)
    if error.retry_after_s is not None:
        retry = status_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, int(error.retry_after_s * 1e9)))
        _pack(status, retry)
    return status


def from_status(status: status_pb2.Status) -> DiptychError | None:
    """The inverse of to_status. None: the status carries no ErrorInfo of ours."""
    info = status_pb2.ErrorInfo()
    bad = status_pb2.BadRequest()
    retry = status_pb2.RetryInfo()
    reason = ""
    param: str | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        if _unpack(detail, info) and info.domain == DOMAIN:
            reason = info.reason
            param = info.metadata.get("param") or param
        elif _unpack(detail, bad) and bad.field_violations:
            param = param or bad.field_violations[0].field or None
        elif _unpack(detail, retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if not reason:
        return None
    return from_reason(reason, status.message, param=param, retry_after_s=retry_after_s)


def _pack(status: status_pb2.Status, detail: Message) -> None:
    """Pack under the standard type name (see status.proto)."""
    status.details.add(type_url=_PUBLIC + detail.DESCRIPTOR.name, value=detail.SerializeToString())


def _unpack(detail: Packed, into: Message) -> bool:
    """Whether the detail is of this type; `into` then holds it. Raises: DecodeError."""
    if detail.type_url.rpartition("/")[2] != f"google.rpc.{into.DESCRIPTOR.name}":
        return False
    into.ParseFromString(detail.value)
    return True


def from_code(code: int, message: str) -> DiptychError:
    """The error for a bare status code (no details)."""
    return _BY_CODE.get(code, InternalError)(message)


def from_rpc_error(error: grpc.RpcError) -> DiptychError:
    """The typed error of a failed call, sync or aio. Never raises: unreadable details fall back to the status code."""
    typed = typed_error(error)
    if typed is not None:
        return typed
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    return from_code(code.value[0] if code is not None else 2, describe(error))


def describe(error: grpc.RpcError) -> str:
    """One line of text: the call's details, or the error itself."""
    return (error.details() if hasattr(error, "details") else None) or str(error)


def typed_error(error: grpc.RpcError) -> DiptychError | None:
    """The error that the server reported. None: grpc generated the status (peer gone, deadline, ...)."""
    metadata: Sequence[tuple[str, Any]] = ()
    if hasattr(error, "trailing_metadata"):
        metadata = list(error.trailing_metadata() or ())
    for key, value in metadata:
        if key != TRAILER:
            continue
        try:
            typed = from_status(status_pb2.Status.FromString(value))
        except DecodeError:
            break
        if typed is not None:
            return typed
    return None


async def abort(context: grpc.aio.ServicerContext, error: DiptychError) -> NoReturn:
    """End a call with the error's code and details."""
    trailers = ((TRAILER, to_status(error).SerializeToString()),)
    await context.abort(_CODES.get(error.grpc_code, grpc.StatusCode.INTERNAL), error.message, trailers)
    raise AssertionError("context.abort returned")


class errors_to_status:
    """Wrap a servicer method's body: typed errors end the call with their status, bugs with INTERNAL (logged). A class:
    a generator costs each call more."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DiptychError):
            await abort(self._context, error)
        elif isinstance(error, asyncio.CancelledError) and not _is_cancelled():
            _log.error("a call that the servicer waited for was cancelled", exc_info=error)
            await abort(self._context, InternalError("internal error; the server's log has the traceback"))
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            _log.error("unhandled error in a servicer", exc_info=error)
            await abort(self._context, InternalError("internal error; the server's log has the traceback"))


def _is_cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def to_failure(error: DiptychError) -> types_pb2.Failure:
    """The form inside a stream."""
    return types_pb2.Failure(
        code=error.grpc_code,
        reason=error.reason,
        message=error.message,
        param=error.param or "",
        retryable=error.retryable,
        retry_after_s=error.retry_after_s or 0.0,
    )


def from_failure(failure: types_pb2.Failure) -> DiptychError:
    """The inverse of to_failure; an unknown reason becomes InternalError that names it."""
    return from_reason(
        failure.reason,
        failure.message,
        param=failure.param or None,
        retry_after_s=failure.retry_after_s if failure.retry_after_s > 0 else None,
    )
