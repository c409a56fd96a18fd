"""Errors keep their type, field and advice on every way over the wire."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from google.rpc import error_details_pb2

from diptych.common import errors
from diptych.rpc import errors as mapping
from diptych.rpc.v1 import types_pb2

ALL = sorted(errors._BY_REASON.values(), key=lambda cls: cls.reason)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.reason)
def test_status_and_failure_are_lossless(cls: type[errors.DiptychError]) -> None:
    error = cls("what happened", param="temperature", retry_after_s=1.5)
    for back in (mapping.from_status(mapping.to_status(error)), mapping.from_failure(mapping.to_failure(error))):
        assert type(back) is cls
        assert (back.message, back.param, back.retry_after_s) == ("what happened", "temperature", 1.5)
    bare = mapping.from_failure(mapping.to_failure(cls("m")))
    assert (bare.param, bare.retry_after_s) == (None, None)


def test_status_carries_the_standard_details() -> None:
    status = mapping.to_status(errors.InvalidRequestError("too hot", param="temperature", retry_after_s=2.0))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail, into in zip(status.details, (info, bad, retry), strict=True):
        assert detail.Unpack(into)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "diptych")
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == ("temperature", "too hot")
    assert retry.retry_delay.ToMilliseconds() == 2000
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailers: tuple[tuple[str, object], ...] = ()) -> None:
        super().__init__("failed")
        self._code, self._trailers = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "from grpc"

    def trailing_metadata(self) -> tuple[tuple[str, object], ...]:
        return self._trailers


def test_rpc_error_with_details_is_the_servers_error() -> None:
    sent = errors.OverloadedError("full", retry_after_s=3.0)
    trailer = (mapping.TRAILER, mapping.to_status(sent).SerializeToString())
    error = mapping.from_rpc_error(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, (("other", "x"), trailer)))
    assert type(error) is errors.OverloadedError
    assert error.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.NoWorkerError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.RequestDeadlineError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_rpc_error_without_details_goes_by_its_code(code: grpc.StatusCode, expected: type[Exception]) -> None:
    for trailers in ((), ((mapping.TRAILER, b"\xff\xff"),)):
        error = FakeRpcError(code, trailers)
        assert mapping.typed_error(error) is None
        assert type(mapping.from_rpc_error(error)) is expected


def test_unknown_reason_is_named() -> None:
    error = mapping.from_failure(types_pb2.Failure(reason="FROM_THE_FUTURE", message="m"))
    assert type(error) is errors.InternalError
    assert "FROM_THE_FUTURE" in error.message


def test_importing_the_mapping_needs_no_more_than_the_sdk_installs() -> None:
    code = "import sys, diptych.rpc.errors; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    out = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert not set(out.split()) & {
        "redis",
        "numpy",
        "structlog",
        "msgspec",
        "blake3",
        "torch",
        "pydantic",
        "grpc_status",
    }
