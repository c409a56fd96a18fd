"""The gRPC SDK of Diptych: grpcio and protobuf, nothing else.

    from diptych.client import Client
    with Client("127.0.0.1:50050") as client:
        for delta in client.stream(messages=[{"role": "user", "content": "Hello"}], max_tokens=64):
            print(delta.text, end="", flush=True)

Every call has a deadline (600 s unless you say otherwise), every failure is a DiptychError (the tree is drawn in
diptych.client.errors), and leaving an iteration cancels its request.
"""

from diptych.client.adapters import Adapter, AdapterVersion
from diptych.client.async_client import AsyncClient, AsyncSession, AsyncStream
from diptych.client.errors import StreamBrokenError, UnreachableError
from diptych.client.exchange import RetryPolicy
from diptych.client.request import GenerateOptions
from diptych.client.sampling_options import SamplingOptions
from diptych.client.sync_client import Client, Session, Stream
from diptych.client.types import (
    AdapterReport,
    CacheClaimReport,
    Choice,
    ClosedSession,
    Completion,
    Delta,
    Explanation,
    ModelInfo,
    PlacementTerms,
    PullTerms,
    RequestAttempt,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from diptych.client.wire import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Tls
from diptych.common.errors import (
    AuthenticationError,
    DiptychError,
    DuplicateRequestError,
    IncompatibleWorkersError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    PermissionDeniedError,
    PromptTooLongError,
    QuotaExceededError,
    RequestCancelledError,
    RequestDeadlineError,
    StaleReferenceError,
    TransferError,
    WorkerDrainedError,
    WorkerLostError,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_TIMEOUT_S",
    "Adapter",
    "AdapterReport",
    "AdapterVersion",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "AuthenticationError",
    "CacheClaimReport",
    "Choice",
    "Client",
    "ClosedSession",
    "Completion",
    "Delta",
    "DiptychError",
    "DuplicateRequestError",
    "Explanation",
    "GenerateOptions",
    "IncompatibleWorkersError",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "ModelNotFoundError",
    "NoWorkerError",
    "OverloadedError",
    "PermissionDeniedError",
    "PlacementTerms",
    "PullTerms",
    "RequestAttempt",
    "PromptTooLongError",
    "QuotaExceededError",
    "RequestCancelledError",
    "RequestDeadlineError",
    "RetryPolicy",
    "SamplingOptions",
    "Session",
    "StaleReferenceError",
    "Stream",
    "StreamBrokenError",
    "Tls",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "TransferError",
    "UnreachableError",
    "Usage",
    "WorkerDrainedError",
    "WorkerLostError",
]
