"""Exceptions of the SDK. All derive from DiptychError and are also attributes of `diptych.client`.

    DiptychError
    |- InvalidRequestError       a parameter is invalid; `.param` names it. Never retried
    |  |- PromptTooLongError
    |- ModelNotFoundError
    |- DuplicateRequestError     a request with this idempotency key is running or has succeeded
    |- AuthenticationError       no API key, or an invalid one
    |- PermissionDeniedError     the key is valid but lacks the permission
    |- QuotaExceededError        the tenant's token quota is used up; `.retry_after_s`
    |- OverloadedError           shed before any work; `.retry_after_s`
    |- NoWorkerError             no worker can serve the request. Retried before the first message
    |- UnreachableError          no router at this address, or a broken connection. Retried before the first message
    |- WorkerLostError           a worker failed and no other one could go on with the answer
    |  |- WorkerDrainedError     it was stopped in order, and its time to finish was over
    |- RequestDeadlineError      `timeout_s` passed
    |- RequestCancelledError     cancelled by the caller (close, leaving the iterator) or by the server
    |- StreamBrokenError         protocol violation: a gap or repeat of tokens, or an end without Finished
    |- TransferError, StaleReferenceError, IncompatibleWorkersError, InternalError   see diptych.common.errors

`retryable`: whether a retry can succeed. Once tokens have arrived, the SDK retries only with `resume=True`, and
continues after those tokens.
"""

from __future__ import annotations

from diptych.common.errors import DiptychError


class UnreachableError(DiptychError):
    """No router answers at the address."""

    grpc_code, http_status, reason, retryable = 14, 503, "UNREACHABLE", True


class StreamBrokenError(DiptychError):
    """A stream ended without its end mark: the answer is incomplete."""

    grpc_code, http_status, reason = 13, 500, "STREAM_BROKEN"
