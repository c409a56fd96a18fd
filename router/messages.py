"""What the router's faces (gRPC, OpenAI) and its frontend say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.sampling import FinishReason, SamplingParams
from diptych.rpc.v1 import types_pb2

Explanation = types_pb2.Explanation


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    max_model_len: int
    created: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A request as it came in: values are untrusted objects and None means not given.

    Exactly one of prompt (str), token_ids (list of int) and messages (list of {"role": str, "content": str}) is given.

    Args:
        model: empty: the only model.
        max_tokens: None: as many as fit into the context.
        request_id: the caller's label, printable ASCII of at most 128 bytes.
        local_prefill_max_tokens: None: the router's setting.
        failure_policy: "fail" | "recompute" | "retry" | "" (the default: retry, then recompute).
        timeout_s: seconds the caller will wait; capped by the router's setting.
        tenant: whose cache is used; decided by the face, never taken from the body.
    """

    model: object = ""
    prompt: object = None
    token_ids: object = None
    messages: object = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    seed: object = None
    max_tokens: object = None
    ignore_eos: object = None
    stop_token_ids: object = None
    stop: object = None
    request_id: object = ""
    explain: bool = False
    local_prefill_max_tokens: object = None
    failure_policy: object = ""
    timeout_s: object = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Checked and tokenized; every default is filled in.

    Args:
        request_id: minted by the router.
        label: the caller's own id, or empty.
        failure_policy: number of router.proto FailurePolicy.
        arrived, deadline: on the router's monotonic clock.
    """

    request_id: str
    label: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes
    explain: bool
    local_prefill_max_tokens: int
    failure_policy: int
    arrived: float
    deadline: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """A decode worker accepted the request."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens offset, offset + 1, ... of the answer and the text that became certain with them (may be empty)."""

    offset: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class UsageInfo:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event. `explanation` is None unless the request asked for it."""

    reason: FinishReason
    usage: UsageInfo
    stop_string: str
    stop_token_id: int | None
    explanation: Explanation | None


GenerateEvent = StartedEvent | TokenEvent | FinishedEvent
