"""What a caller gets: plain frozen values, built from the wire's messages here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.rpc.v1 import router_pb2, types_pb2

FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens with indices offset, offset + 1, ... among the answer's tokens. `text` is what became certain with them;
    it may be empty (half a character, the beginning of a possible stop string)."""

    offset: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens`: prompt tokens that no worker computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class PlacementTerms:
    """What one candidate pair was charged, in milliseconds. An empty `prefill_worker_id` is local prefill on decode."""

    prefill_worker_id: str
    decode_worker_id: str
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_load_ms: float
    stall_ms: float
    total_ms: float
    prefill_hit_tokens: int
    decode_hit_tokens: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an answer came from where it did.

    `prefill` and `decode` are worker ids; `transport` is the path that moved `kv_bytes` bytes of KV in `kv_ranges`
    ranges ("none" when nothing moved), of which `kv_ranges_overlapped` had been read before the last chunk was
    computed. Times are seconds on decode's clock from the moment it got the request.
    """

    request_id: str
    prefill: str
    decode: str
    transport: str
    kv_bytes: int
    cached_tokens_prefill: int
    cached_tokens_decode: int
    kv_ranges: int
    kv_ranges_overlapped: int
    local_prefill: bool
    index_mode: str
    notes: tuple[str, ...]
    placement: tuple[PlacementTerms, ...]
    prefill_pid: int
    decode_pid: int
    reserved_s: float
    first_token_s: float
    kv_complete_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `finish_reason` is "stop" or "length"; `stop_string` and `stop_token_id` say what ended it, if
    one of the request's did. `explanation` is None unless the request asked for it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    request_id: str
    model: str
    stop_string: str = ""
    stop_token_id: int | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    max_model_len: int
    created: int


def usage_from(message: types_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def explanation_from(message: types_pb2.Explanation) -> Explanation:
    return Explanation(
        request_id=message.request_id,
        prefill=message.prefill,
        decode=message.decode,
        transport=message.transport,
        kv_bytes=message.kv_bytes,
        cached_tokens_prefill=message.cached_tokens_prefill,
        cached_tokens_decode=message.cached_tokens_decode,
        kv_ranges=message.kv_ranges,
        kv_ranges_overlapped=message.kv_ranges_overlapped,
        local_prefill=message.local_prefill,
        index_mode=message.index_mode,
        notes=tuple(message.notes),
        placement=tuple(_terms_from(candidate) for candidate in message.candidates),
        prefill_pid=message.prefill_pid,
        decode_pid=message.decode_pid,
        reserved_s=message.reserved_s,
        first_token_s=message.first_token_s,
        kv_complete_s=message.kv_complete_s,
    )


def models_from(message: router_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.max_model_len, model.created) for model in message.models]


def _terms_from(message: types_pb2.PlacementTerms) -> PlacementTerms:
    return PlacementTerms(
        prefill_worker_id=message.prefill_worker_id,
        decode_worker_id=message.decode_worker_id,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        transfer_ms=message.transfer_ms,
        decode_load_ms=message.decode_load_ms,
        stall_ms=message.stall_ms,
        total_ms=message.total_ms,
        prefill_hit_tokens=message.prefill_hit_tokens,
        decode_hit_tokens=message.decode_hit_tokens,
        chosen=message.chosen,
    )
