"""Every error that crosses a room or the wire.

    DiptychError
    |- InvalidRequestError        INVALID_ARGUMENT / 400   names the parameter
    |  |- PromptTooLongError
    |- ModelNotFoundError         NOT_FOUND / 404
    |- DuplicateRequestError      ALREADY_EXISTS / 409      a request of this idempotency key runs or has ended well
    |- AuthenticationError        UNAUTHENTICATED / 401     no API key, or one that is not valid
    |- PermissionDeniedError      PERMISSION_DENIED / 403   the key is valid, but not for this
    |- QuotaExceededError         RESOURCE_EXHAUSTED / 429  the tenant's tokens are used up for now; Retry-After
    |- OverloadedError            RESOURCE_EXHAUSTED / 529  shed before any work; Retry-After
    |- NoWorkerError              UNAVAILABLE / 503         nobody could serve it (before the first token)
    |- WorkerLostError            ABORTED / 503             a worker died and the policy's retries are spent
    |- RequestDeadlineError       DEADLINE_EXCEEDED / 504
    |- RequestCancelledError      CANCELLED / 499
    |- TicketRefusedError         PERMISSION_DENIED / 403   a placement ticket is forged, expired or used: place again
    |- StaleReferenceError        FAILED_PRECONDITION / 500 incarnation, handle or placement of another life
    |- TransferError              UNAVAILABLE / 503         KV did not arrive intact in time
    |- IncompatibleWorkersError   FAILED_PRECONDITION / 503 handshake refused, with the difference
    |- InternalError              INTERNAL / 500            our own bug
    ConfigError                   start-up only: names the field, the value and the rule

An error knows its gRPC code (as a number: this module imports nothing but the standard library), its HTTP status, its
stable reason and whether trying again can help.
"""

from __future__ import annotations


class DiptychError(Exception):
    """Base of all errors that a caller may see.

    Args:
        message: one sentence for a human, without secrets.
        param: the request's field at fault, if one is.
        retry_after_s: after how many seconds another try makes sense; None: no advice.
    """

    grpc_code: int = 13
    http_status: int = 500
    reason: str = "INTERNAL"
    retryable: bool = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(DiptychError):
    """A value is out of range or of the wrong type; `param` names it."""

    grpc_code, http_status, reason = 3, 400, "INVALID_ARGUMENT"


class PromptTooLongError(InvalidRequestError):
    """Prompt and answer do not fit into the model's context."""

    reason = "PROMPT_TOO_LONG"


class ModelNotFoundError(DiptychError):
    """The cluster serves no model of this name."""

    grpc_code, http_status, reason = 5, 404, "MODEL_NOT_FOUND"


class DuplicateRequestError(DiptychError):
    """A request with this idempotency key runs, or has succeeded."""

    grpc_code, http_status, reason = 6, 409, "DUPLICATE_REQUEST"


class AuthenticationError(DiptychError):
    """No API key, or an invalid one."""

    grpc_code, http_status, reason = 16, 401, "UNAUTHENTICATED"


class PermissionDeniedError(DiptychError):
    """The key is valid, but not for this."""

    grpc_code, http_status, reason = 7, 403, "PERMISSION_DENIED"


class QuotaExceededError(DiptychError):
    """The tenant's quota is used up for now; `retry_after_s` says when to retry."""

    grpc_code, http_status, reason, retryable = 8, 429, "QUOTA_EXCEEDED", True


class OverloadedError(DiptychError):
    """Rejected before any work, because too many requests wait; `retry_after_s` says when to retry."""

    grpc_code, http_status, reason, retryable = 8, 529, "OVERLOADED", True


class NoWorkerError(DiptychError):
    """No worker could serve the request; it had produced no token."""

    grpc_code, http_status, reason, retryable = 14, 503, "NO_WORKER", True


class WorkerLostError(DiptychError):
    """A worker was lost and the retries that the failure policy allows are spent."""

    grpc_code, http_status, reason, retryable = 10, 503, "WORKER_LOST", True


class RequestDeadlineError(DiptychError):
    """The deadline passed."""

    grpc_code, http_status, reason = 4, 504, "DEADLINE_EXCEEDED"


class RequestCancelledError(DiptychError):
    """The request was cancelled."""

    grpc_code, http_status, reason = 1, 499, "CANCELLED"


class TicketRefusedError(DiptychError):
    """A placement ticket is forged, expired or used: place the request again."""

    grpc_code, http_status, reason, retryable = 7, 403, "TICKET_REFUSED", True


class StaleReferenceError(DiptychError):
    """A handle or placement names an earlier incarnation of a worker."""

    grpc_code, http_status, reason, retryable = 9, 500, "STALE_REFERENCE", True


class TransferError(DiptychError):
    """KV did not arrive intact in time."""

    grpc_code, http_status, reason, retryable = 14, 503, "TRANSFER_FAILED", True


class IncompatibleWorkersError(DiptychError):
    """Two workers, or a worker and the router, differ in a value that must be equal; the message names it."""

    grpc_code, http_status, reason = 9, 503, "INCOMPATIBLE_WORKERS"


class InternalError(DiptychError):
    """A fault of the server."""


class ConfigError(Exception):
    """A setting cannot be used. Names the field, the value and the rule it breaks."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={_shown(value)}: {rule}")
        self.field, self.value, self.rule = field, value, rule


_MOST_SHOWN = 200


def _shown(value: object) -> str:
    """For a message: short, and whatever the value is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes, or what is nested without end
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_BY_REASON: dict[str, type[DiptychError]] = {
    cls.reason: cls
    for cls in (
        InvalidRequestError,
        PromptTooLongError,
        ModelNotFoundError,
        DuplicateRequestError,
        AuthenticationError,
        PermissionDeniedError,
        QuotaExceededError,
        OverloadedError,
        NoWorkerError,
        WorkerLostError,
        RequestDeadlineError,
        RequestCancelledError,
        TicketRefusedError,
        StaleReferenceError,
        TransferError,
        IncompatibleWorkersError,
        InternalError,
    )
}


def from_reason(
    reason: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> DiptychError:
    """Rebuild an error that came over the wire; an unknown reason becomes InternalError with the reason in its text."""
    cls = _BY_REASON.get(reason)
    if cls is None:
        return InternalError(f"{reason}: {message}", param=param, retry_after_s=retry_after_s)
    return cls(message, param=param, retry_after_s=retry_after_s)
