"""Errors that are sent between processes or to clients.

    DiptychError
    |- InvalidRequestError        INVALID_ARGUMENT / 400   names the parameter
    |  |- PromptTooLongError
    |  |- AdapterError            a LoRA adapter is not served: names the field of its configuration, or the tensor
    |- ModelNotFoundError         NOT_FOUND / 404
    |- DuplicateRequestError      ALREADY_EXISTS / 409      a request with this idempotency key is running or succeeded
    |- AuthenticationError        UNAUTHENTICATED / 401     no API key, or an invalid one
    |- PermissionDeniedError      PERMISSION_DENIED / 403   the key is valid but lacks the permission
    |- QuotaExceededError         RESOURCE_EXHAUSTED / 429  the tenant's token quota is used up; Retry-After
    |- OverloadedError            RESOURCE_EXHAUSTED / 529  shed before any work; Retry-After
    |- NoWorkerError              UNAVAILABLE / 503         no worker can serve the request (before the first token)
    |- WorkerLostError            ABORTED / 503             a worker failed and the failure policy's retries are spent
    |- RequestDeadlineError       DEADLINE_EXCEEDED / 504
    |- RequestCancelledError      CANCELLED / 499
    |- TicketRefusedError         PERMISSION_DENIED / 403   a ticket is forged, expired or used: place again
    |- StaleReferenceError        FAILED_PRECONDITION / 500 refers to an earlier incarnation of a worker
    |- TransferError              UNAVAILABLE / 503         KV did not arrive intact in time
    |- IncompatibleWorkersError   FAILED_PRECONDITION / 503 the handshake failed; names the difference
    |- InternalError              INTERNAL / 500            a bug of the server
    ConfigError                   start-up only: names the field, the value and the rule

Each class has its gRPC code (a number: this module imports only the standard library), HTTP status, stable reason, and
whether a retry can succeed.
"""

from __future__ import annotations


class DiptychError(Exception):
    """Base of all errors that a caller may see.

    Args:
        message: one sentence, without secrets.
        param: the request's invalid field, if any.
        retry_after_s: seconds after which a retry makes sense; None: unknown.
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


class AdapterError(InvalidRequestError):
    """A LoRA adapter cannot be served; `param` names the field of its configuration, the file or the tensor."""

    reason = "ADAPTER_REFUSED"


class ModelNotFoundError(DiptychError):
    """The cluster serves no model of this name."""

    grpc_code, http_status, reason = 5, 404, "MODEL_NOT_FOUND"


class DuplicateRequestError(DiptychError):
    """A request with this idempotency key runs, or has succeeded, or it was another one."""

    grpc_code, http_status, reason = 6, 409, "DUPLICATE_REQUEST"


class AuthenticationError(DiptychError):
    """No API key, or an invalid one."""

    grpc_code, http_status, reason = 16, 401, "UNAUTHENTICATED"


class PermissionDeniedError(DiptychError):
    """The key is valid but lacks the permission."""

    grpc_code, http_status, reason = 7, 403, "PERMISSION_DENIED"


class QuotaExceededError(DiptychError):
    """The tenant's quota is used up; retry after `retry_after_s`."""

    grpc_code, http_status, reason, retryable = 8, 429, "QUOTA_EXCEEDED", True


class OverloadedError(DiptychError):
    """Rejected before any work, because too many requests wait; retry after `retry_after_s`."""

    grpc_code, http_status, reason, retryable = 8, 529, "OVERLOADED", True


class NoWorkerError(DiptychError):
    """No worker could serve the request; it had produced no token."""

    grpc_code, http_status, reason, retryable = 14, 503, "NO_WORKER", True


class WorkerLostError(DiptychError):
    """A worker was lost and the retries that the failure policy allows are spent."""

    grpc_code, http_status, reason, retryable = 10, 503, "WORKER_LOST", True


class WorkerDrainedError(WorkerLostError):
    """A worker that leaves in order, or changes its role, ends what did not finish in the time that it had."""

    reason = "WORKER_DRAINED"


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
    """A bug of the server."""


class ConfigError(Exception):
    """A setting is invalid. Names the field, the value and the rule it breaks."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={_shown(value)}: {rule}")
        self.field, self.value, self.rule = field, value, rule


_MOST_SHOWN = 200


def _shown(value: object) -> str:
    """The value as text for a message: short, for any type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python converts, or endless nesting
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_BY_REASON: dict[str, type[DiptychError]] = {
    cls.reason: cls
    for cls in (
        InvalidRequestError,
        PromptTooLongError,
        AdapterError,
        ModelNotFoundError,
        DuplicateRequestError,
        AuthenticationError,
        PermissionDeniedError,
        QuotaExceededError,
        OverloadedError,
        NoWorkerError,
        WorkerLostError,
        WorkerDrainedError,
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
    """Rebuild an error received over the wire. An unknown reason becomes InternalError with the reason in its text."""
    cls = _BY_REASON.get(reason)
    if cls is None:
        return InternalError(f"{reason}: {message}", param=param, retry_after_s=retry_after_s)
    return cls(message, param=param, retry_after_s=retry_after_s)
