"""Messages between the router's servers (gRPC, HTTP) and its frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.common.request import CacheClaim, Prompt
from diptych.common.sampling import FinishReason, SamplingParams, TokenLogprobs
from diptych.common.store.adapters import ChosenAdapter
from diptych.router.api.packed_ids import PackedIds
from diptych.router.requests.resume import ResumePoint, Seen
from diptych.rpc.v1 import router_pb2, types_pb2

Explanation = types_pb2.Explanation
FAILURE_POLICIES: Mapping[str, int] = {
    "": router_pb2.FAILURE_POLICY_UNSPECIFIED,
    "fail": router_pb2.FAILURE_POLICY_FAIL,
    "recompute": router_pb2.FAILURE_POLICY_RECOMPUTE,
    "retry": router_pb2.FAILURE_POLICY_RETRY,
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model or an adapter. `created`: Unix seconds. `parent`: of an adapter, its base model's name. `root`: of an adapter,
    the folder of its stable version."""

    id: str
    max_model_len: int
    created: int
    parent: str = ""
    root: str = ""


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request claims of the workers' caches. `requested_ttl_s`: more than the claim's where the caller's key may not have
    as much. `session_id`: as the caller named it; "": none."""

    claim: CacheClaim
    requested_ttl_s: float
    session_id: str = ""


@dataclass(slots=True)
class UncheckedRequest:
    """A request as received: values are untrusted objects and None means not given. The server that made one adds its
    caller and its headers; nobody changes it afterwards. It is not frozen, as ValidatedRequest.

    Exactly one of prompt (str), token_ids (list of int) and messages (list of {"role": str, "content": str}) is given.

    Args:
        model: empty: the only model. It may name an adapter.
        adapter: its name; "" or None: the one that `model` names, if it does.
        adapter_version: of the adapter, instead of the one that its routing chooses; None: not given.
        sampling: given values of the table common.sampling.SAMPLING, except the grammar; bad_words are texts. No value
            is None.
        request_id: the caller's label, printable ASCII of at most 128 bytes.
        local_prefill_max_tokens: None: the router's setting.
        failure_policy: "fail" | "recompute" | "retry" | "" (the default: retry, then recompute).
        priority: lower goes first, if the workers schedule by priority; None: 0.
        timeout_s: the caller's deadline in seconds; limited by the router's setting.
        grammar: a common.grammar.Grammar.
        default_max_tokens: of a request without max_tokens; None: the rest of the context, which also limits it.
        use_beam_search: implied by a beam_width; see router.beam_options.
        tools: JSON schemas of functions, for the chat template.
        more_text: approximate number of characters beside the messages' content: calls and tools.
        add_special_tokens: let the tokenizer add its special tokens to `prompt`.
        add_generation_prompt: the chat template opens the assistant's turn.
        continue_final_message: the answer continues the last message instead.
        truncate_prompt_tokens: a longer prompt is cut to this many tokens; -1: to what leaves room for the answer.
        truncation_side: "left" (the default) drops its beginning, "right" its end.
        cache_salt: isolates a part of the tenant's cache; at most 128 bytes.
        cache_ttl_s, cache_priority, session_id: see router/preprocess/retention.py; None: not given.
        prefetch: compute and claim the KV of the prompt, and answer without tokens.
        echo: the answer begins with the prompt.
        idempotency_key: printable ASCII of at most 128 bytes.
        resume_after: the answer's first tokens, which the caller has: it continues after them. Needs a seed.
        resume_id: of an answer whose stream broke: this request goes on with it, see resume.py. None: a new one.
        resumable: its caller learns such ids, or has an idempotency key, so that the answer is kept for a while when this
            router dies.
        tenant: whose cache is used; set by the server, never from the body.
        traceparent: the caller's W3C trace context.
        sampling_key: determines `sampling`; b"": unknown.
    """

    model: object = ""
    adapter: object = None
    adapter_version: object = None
    prompt: object = None
    token_ids: object = None
    messages: object = None
    more_text: int = 0
    sampling: Mapping[str, object] = field(default_factory=dict)
    default_max_tokens: int | None = None
    request_id: object = ""
    explain: bool = False
    local_prefill_max_tokens: object = None
    failure_policy: object = ""
    priority: object = None
    timeout_s: object = None
    use_beam_search: object = None
    grammar: object = None
    tools: object = None
    chat_template_kwargs: object = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: object = None
    truncation_side: object = None
    cache_salt: object = None
    cache_ttl_s: object = None
    cache_priority: object = None
    session_id: object = None
    prefetch: object = False
    echo: bool = False
    idempotency_key: object = ""
    resume_after: object = None
    resume_id: object = None
    resumable: bool = False
    tenant: str = ""
    traceparent: str = ""
    sampling_key: bytes = b""


@dataclass(slots=True)
class ValidatedRequest:
    """Checked and tokenized; every default is filled in. Nobody changes one: it is not frozen because making one would take four
    times as long.

    Args:
        request_id: minted by the router.
        label: the caller's own id, or empty.
        model: the base model's name.
        adapter: the version that answers, for all of the answer; None: the base model does. `prompt` has its id.
        failure_policy: number of router.proto FailurePolicy.
        arrived, deadline: on the router's monotonic clock.
        traceparent: the caller's W3C trace context; operation: as OpenTelemetry's GenAI conventions name it.
        group: of workers that answers it, see router/placement/rollout.py.
        thinking: the prompt ends within the model's thoughts.
        owner: salt of the tenant, who may ask about the request later; the salt of `prompt` may be parted further.
        echo: text that the answer begins with. echo_offsets: where each prompt token begins in it; empty: nobody asked, or
            the echo is the tokens' own text.
        resume_after: tokens of the answer that the caller has already.
        resume: this request goes on with an answer whose stream broke. resumable: as in UncheckedRequest.
        found_by_key: `resume` was found by the idempotency key; its caller has nothing of the answer.
        created: Unix seconds; of a resumed one those of the first request. 0: nobody asked.
        retention: None: it claims nothing of the caches.
        prefetch: its tokens are not sent.
        packed: the prompt's ids as the client sent them; None: it sent something else.
        repeated: the sampling values of an earlier request, which these are but for the seed; None: nobody knows one.
    """

    request_id: str
    label: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    explain: bool
    local_prefill_max_tokens: int
    failure_policy: int
    arrived: float
    deadline: float
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    operation: str = "text_completion"
    group: str = "stable"
    thinking: bool = False
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()
    idempotency_key: str = ""
    resume_after: tuple[int, ...] = ()
    resume: ResumePoint | None = None
    resumable: bool = False
    found_by_key: bool = False
    created: int = 0
    repeated: SamplingParams | None = None
    packed: PackedIds | None = None
    retention: Retention | None = None
    prefetch: bool = False
    owner: bytes = b""

    @property
    def seen(self) -> Seen | None:
        """What the caller has of the answer; None: nothing, it gets all messages."""
        return None if self.resume is None or self.found_by_key else self.resume.seen

    adapter: ChosenAdapter | None = None

    @property
    def shown_model(self) -> str:
        """The name for the caller: of the adapter, if there is one."""
        return self.model if self.adapter is None else self.adapter.name


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """The model's features for the servers.

    Args:
        tool_parser: name of the parser of its tool calls, see router/tools/registry.py; "none": it makes none.
        reasoning: it writes its reasoning between <think> and </think>.
        takes_tools: its chat template includes them.
        takes_effort: its chat template has a reasoning effort.
    """

    tool_parser: str = "none"
    reasoning: bool = False
    takes_tools: bool = False
    takes_effort: bool = False


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """A decode worker accepted the request.

    Args:
        resume_ref: of the ids by which the answer goes on elsewhere, see resume.py; "": it cannot.
        attached: a resumed answer is that of its first router, and nothing is computed again.
        adapter: the version that answers; None: the base model does.
    """

    request_id: str
    model: str
    prompt_tokens: int
    resume_ref: str = ""
    attached: bool = False
    adapter: ChosenAdapter | None = None


@dataclass(slots=True)
class TokenEvent:
    """Tokens offset, offset + 1, ... of a choice and the text that they complete (may be empty). `logprobs`: one per
    token, if requested. `cached_tokens`: of the prompt, with the request's first tokens. Not frozen, as
    ValidatedRequest."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Logprobs of prompt tokens first_token, first_token + 1, ...; the prompt's first token has none. A later attempt
    may repeat them. All precede the first token of the answer. `prompt`: which one, of several."""

    first_token: int
    logprobs: tuple[TokenLogprobs, ...]
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceFinishedEvent:
    """One of several choices has ended; its last event."""

    choice: int
    reason: FinishReason
    stop_string: str
    stop_token_id: int | None


@dataclass(frozen=True, slots=True)
class UsageInfo:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event. `explanation` is None unless requested. With several choices the usage is that of all, and each
    one's finish reason was in its ChoiceFinishedEvent."""

    reason: FinishReason
    usage: UsageInfo
    stop_string: str
    stop_token_id: int | None
    explanation: Explanation | None


GenerateEvent = StartedEvent | TokenEvent | PromptLogprobsEvent | ChoiceFinishedEvent | FinishedEvent
