"""Results of the SDK: frozen dataclasses, built from protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diptych.rpc.fields import same_fields
from diptych.rpc.v1 import router_pb2, types_pb2

FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities at one position, before temperature and penalties.

    `rank` is 1 for the likeliest token; `top` holds (token id, logprob) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object as text; incomplete if the answer was cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of call number `index`: its start (with id and name) or the next part of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens with indices offset, offset + 1, ... of one choice.

    `text` is the text that these tokens complete. It may be empty: half a character, or the beginning of a possible
    stop string. `logprobs`, if requested, has one entry per token.

    Where the answer is split (`split`, tools), `content`, `reasoning` and `tool_calls` are the parts completed by these
    tokens. The last Delta of a choice may hold the rest without a token.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to the same prompt; see Completion for the fields."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_string: str = ""
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


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
class PullTerms:
    """A planned pull of tokens `first_token` to `num_tokens` from the worker `holder`, and computing them, in milliseconds.
    From `pays_from_tokens` tokens on a pull over this link is made.
    """

    holder: str
    first_token: int
    num_tokens: int
    pull_ms: float
    compute_ms: float
    pays_from_tokens: float


@dataclass(frozen=True, slots=True)
class KvPull:
    """KV that the worker `reader` took from the prefix cache of `holder` for this request: of `num_tokens` tokens behind the
    first `first_token`, which it had. `note` says why fewer came than were planned. `other_bits`: decode computed some of it,
    not batch-invariantly. `source_tiers`: of these tokens, those that the holder had in lower tiers, by their names.
    """

    reader: str
    holder: str
    first_token: int
    num_tokens: int
    kv_bytes: int
    duration_s: float
    note: str
    other_bits: bool
    source_tiers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacementTerms:
    """The estimated cost of one worker pair, in milliseconds. An empty `prefill_worker_id`: decode computes the prompt."""

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
    prefill_tiers: dict[str, int] = field(default_factory=dict)
    """Of the hit tokens on prefill, those that are copied from a lower tier first, by its name."""
    decode_tiers: dict[str, int] = field(default_factory=dict)
    """The same on decode."""
    adapter_ms: float = 0.0
    """Loading the request's adapter where it is missing, and waiting for room for it."""
    pull: PullTerms | None = None
    """What the worker that computes the prompt takes from another one; `prefill_ms` has its time."""

    @property
    def prefill_host_tokens(self) -> int:
        """The former name of `prefill_tiers["host"]`."""
        return self.prefill_tiers.get("host", 0)

    @property
    def decode_host_tokens(self) -> int:
        """The former name of `decode_tiers["host"]`."""
        return self.decode_tiers.get("host", 0)


@dataclass(frozen=True, slots=True)
class RequestAttempt:
    """One attempt of a request that was placed again: its workers (`prefill` as planned, "" for none), when it was
    submitted, in seconds from the request's arrival at the router, and the tokens after which it failed, with the
    failure's reason. Of the last one `num_tokens` is 0 and `failure` empty.
    """

    decode: str
    prefill: str
    submitted_s: float
    num_tokens: int
    failure: str


@dataclass(frozen=True, slots=True)
class CacheClaimReport:
    """A request's claim on cached KV: for `ttl_s` after its end, of the `requested_ttl_s` that its caller asked for.

    `kept_tokens_prefill` and `kept_tokens_decode` count cached tokens that this request found because of claims: an eviction
    had passed them over, and taken KV that was used more recently."""

    ttl_s: float
    requested_ttl_s: float
    priority: int
    session_id: str
    kept_tokens_prefill: int
    kept_tokens_decode: int


@dataclass(frozen=True, slots=True)
class ClosedSession:
    """`freed_tokens`: tokens whose KV is no longer cached, over all workers. `unreached`: workers that did not answer: there the
    claims end by their time."""

    freed_tokens: int
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The one version of an adapter that answered: by which name it was asked for, the version's number, and the hash of its
    content."""

    name: str
    version: int
    id: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """How an answer was placed and computed.

    `prefill` and `decode` are worker ids. `transport` is the path that moved `kv_bytes` bytes of KV in `kv_ranges`
    ranges ("none" when nothing moved); `kv_ranges_overlapped` of them were read before the last chunk was computed.
    Times are seconds since the decode worker received the request; 0.0: it did not happen. `prefill_queue_s` and
    `prefill_compute_s` are prefill's: 0.0 after a local prefill, as is `kv_complete_s`. `predicted_ttft_s` contains no
    transfer, because the first token does not wait for KV. `backend` names the back ends that computed the layers,
    with their blocks where there are several. `attempts` lists all, in order, if the request was placed again.
    `pulls` lists KV that workers took from each other's caches; on the reader it counts as cached. `cached_tiers_prefill` and
    `cached_tiers_decode`: of the tokens cached there, those whose KV came from a lower tier, by its name.
    `claim` is what the request claimed of the caches, and what claims did for it; None: nothing. `adapter` is the version of
    the adapter that answered; None: the base model did.
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
    policy: str = ""
    predicted_ttft_s: float = 0.0
    ttft_s: float = 0.0
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    prefill_queue_s: float = 0.0
    prefill_compute_s: float = 0.0
    backend: str = ""
    total_s: float = 0.0
    longest_gap_s: float = 0.0
    attempts: tuple[RequestAttempt, ...] = ()
    pulls: tuple[KvPull, ...] = ()
    cached_tiers_prefill: dict[str, int] = field(default_factory=dict)
    cached_tiers_decode: dict[str, int] = field(default_factory=dict)
    claim: CacheClaimReport | None = None
    adapter: AdapterReport | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    `finish_reason` is "stop", "length" or "tool_calls". `stop_string` and `stop_token_id` name what ended the answer,
    if one of the request's did. `seed` is the seed of the sampling. `adapter` and `adapter_version` name what answered instead
    of the base model ("" and 0: nothing did). `explanation` is None unless requested. With n > 1
    these are of choice 0, and `choices` holds all of them. `prompt_logprobs` covers all prompt tokens but the first.
    `content`, `reasoning` and `tool_calls` are the parts of an answer that was split (`split`, tools); else they are
    empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    request_id: str
    model: str
    stop_string: str = ""
    stop_token_id: int | None = None
    explanation: Explanation | None = None
    choices: tuple[Choice, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    seed: int = 0
    adapter: str = ""
    adapter_version: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model, or an adapter: then `parent` is its base model. `max_model_len`: tokens of prompt and answer together;
    `created`: seconds since 1970."""

    id: str
    max_model_len: int
    created: int
    parent: str = ""


def logprobs_from(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=False))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def usage_from(message: types_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def explanation_from(message: types_pb2.Explanation) -> Explanation:
    placement = tuple(_terms_from(candidate) for candidate in message.candidates)
    names = ("cached_tiers_prefill", "cached_tiers_decode")
    same = same_fields(
        Explanation, message, but=("notes", "placement", "attempts", "pulls", "claim", "adapter", *names)
    )
    tiers: dict[str, Any] = {name: {part.tier: part.tokens for part in getattr(message, name)} for name in names}
    attempts = tuple(RequestAttempt(**same_fields(RequestAttempt, one)) for one in message.attempts)
    pulls = tuple(
        KvPull(
            **same_fields(KvPull, one, but=("source_tiers",)),
            source_tiers={part.tier: part.tokens for part in one.source_tiers},
        )
        for one in message.pulls
    )
    claim = None
    if message.HasField("claim"):
        claim = CacheClaimReport(**same_fields(CacheClaimReport, message.claim))
    adapter = None
    if message.HasField("adapter"):
        adapter = AdapterReport(**same_fields(AdapterReport, message.adapter))
    return Explanation(
        **same,
        **tiers,
        notes=tuple(message.notes),
        placement=placement,
        attempts=attempts,
        pulls=pulls,
        claim=claim,
        adapter=adapter,
    )


def closed_from(message: router_pb2.CloseSessionResponse) -> ClosedSession:
    return ClosedSession(message.freed_tokens, tuple(message.unreached))


def models_from(message: router_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.max_model_len, model.created, model.parent) for model in message.models]


def _terms_from(message: types_pb2.PlacementTerms) -> PlacementTerms:
    tiers = ("prefill_tiers", "decode_tiers")
    by_tier: dict[str, Any] = {name: {part.tier: part.tokens for part in getattr(message, name)} for name in tiers}
    pull = PullTerms(**same_fields(PullTerms, message.pull)) if message.HasField("pull") else None
    return PlacementTerms(**same_fields(PlacementTerms, message, but=(*tiers, "pull")), **by_tier, pull=pull)
