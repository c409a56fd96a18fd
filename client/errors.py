"""What the SDK raises. Everything is a DiptychError, so one `except` catches all; the classes are also attributes of
`diptych.client`.

    DiptychError
    |- InvalidRequestError       a parameter cannot be used; `.param` names it. Never retried
    |  |- PromptTooLongError
    |- ModelNotFoundError
    |- DuplicateRequestError     a request of this idempotency key runs, or has ended well
    |- AuthenticationError       no API key, or one that is not valid
    |- PermissionDeniedError     the key is valid, but not for this
    |- QuotaExceededError        the tenant's tokens are used up for now; `.retry_after_s`
    |- OverloadedError           shed before any work; `.retry_after_s`
    |- NoWorkerError             the router has nobody who could serve it. Retried before the first message
    |- UnreachableError          no router at this address, or a broken connection. Retried before the first message
    |- WorkerLostError           a worker died and the policy's retries are spent
    |- RequestDeadlineError      `timeout_s` passed
    |- RequestCancelledError     cancelled: by you (close, leaving the iterator) or by the server
    |- StreamBrokenError         the stream broke its promise: a gap or repeat of tokens, or an end without Finished
    |- TransferError, StaleReferenceError, IncompatibleWorkersError, InternalError   see diptych.common.errors

`retryable` says whether trying again can help. After tokens have arrived the SDK tries again by itself only where `resume=True`
allows it: behind those tokens.
"""

from __future__ import annotations

from diptych.common.errors import DiptychError


class UnreachableError(DiptychError):
    """No router answers at the address."""

    grpc_code, http_status, reason, retryable = 14, 503, "UNREACHABLE", True


class StreamBrokenError(DiptychError):
    """A stream ended without its end mark: the answer is incomplete."""

    grpc_code, http_status, reason = 13, 500, "STREAM_BROKEN"
