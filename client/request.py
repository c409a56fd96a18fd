"""Builds a GenerateRequest from Python values. The server checks ranges; only values that cannot be sent are rejected
here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.client.request_parts import add_message, check_size, set_grammar, set_tools
from diptych.client.sampling_options import SamplingOptions
from diptych.common.errors import InvalidRequestError
from diptych.rpc.v1 import router_pb2, types_pb2

FAILURE_POLICIES = {
    "": router_pb2.FAILURE_POLICY_UNSPECIFIED,
    "fail": router_pb2.FAILURE_POLICY_FAIL,
    "recompute": router_pb2.FAILURE_POLICY_RECOMPUTE,
    "retry": router_pb2.FAILURE_POLICY_RETRY,
}


class GenerateOptions(SamplingOptions, total=False):
    """Keywords of `generate` and `stream`, with those of SamplingOptions. Exactly one of prompt, token_ids and messages; all
    else is optional.

    Args:
        prompt: text, used as it is (no chat template).
        token_ids: the prompt as token ids.
        messages: chat messages, each {"role": ..., "content": ...}; the model's chat template is applied. An assistant's
            may have tool_calls (ToolCall values, or mappings with id, name and arguments) and reasoning, a tool's has the
            tool_call_id that it answers.
        json_schema, regex, choice, ebnf: a constraint for the answer, at most one of them: a JSON schema, a regular
            expression, a list of texts, a grammar. It is checked before anything is computed.
        compact_json: with json_schema: no white space except one space after each comma and colon. Otherwise the model
            may write up to 16 characters of it in one place.
        tools: functions that the model may call, each {"name", "description", "parameters": a JSON schema, "strict"}, or in
            the form of the OpenAI API. Chat only.
        tool_choice: "auto", "none", "required", or the name of the function that must be called.
        parallel_tool_calls: False: one call at most.
        split: split a chat answer into content, reasoning and tool_calls; always done with tools.
        idempotency_key: the router refuses a second request of this key while the first runs and for a while after it
            has succeeded (DuplicateRequestError). Another router goes on with the answer, if it is still computed or kept.
            Printable ASCII, at most 128 bytes.
        resume: when the stream breaks after its first message, go on with it, at another router if the client has several,
            with pauses of at most 60 s in all (RetryPolicy.resume_budget_s). Tokens and text are those of an undisturbed run.
            Default: where the client has several addresses.
        resume_after: the answer's first tokens, from a stream that broke in another process: only later tokens are
            sent. Needs the seed of that stream.
        model: name of the model, or of an adapter; may be left out when the cluster serves one model.
        adapter: name of a LoRA adapter that answers instead of the base model. Completion.adapter_version says which version of
            it did: all of an answer comes from one.
        adapter_version: this version of it, as in `list_adapters`; default: the one that its routing chooses.
        request_id: a label for logs (printable ASCII, at most 128 bytes).
        timeout_s: deadline of the whole call, retries included; default DEFAULT_TIMEOUT_S (600 s).
        explain: fill in Completion.explanation.
        local_prefill_max_tokens: most uncached prompt tokens that a decode worker may compute itself; 0: never.
        failure_policy: "fail", "recompute" or "retry" when the worker that computes the prompt is lost.
        priority: lower goes first, where the workers schedule by priority; default 0.
        cache_ttl_s: claim the KV of prompt and answer in the workers' caches, for so many seconds after the answer's end: other
            KV is evicted before it. The API key bounds it. Default: no claim, and with one of the next two 300 s.
        cache_priority: 0 to 100; of claimed KV the lower is evicted first; default 50.
        session_id: the request belongs to this session, whose claims `close_session` ends. Text of at most 512 bytes.
    """

    prompt: str | None
    token_ids: Sequence[int] | None
    messages: Sequence[Mapping[str, Any]] | None
    model: str
    adapter: str
    adapter_version: int
    request_id: str
    timeout_s: float | None
    explain: bool
    local_prefill_max_tokens: int | None
    failure_policy: str
    priority: int
    json_schema: Mapping[str, Any] | str | None
    compact_json: bool
    regex: str | None
    choice: Sequence[str] | None
    ebnf: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool
    split: bool
    idempotency_key: str
    resume: bool | None
    resume_after: Sequence[int] | None
    cache_ttl_s: float | None
    cache_priority: int | None
    session_id: str


_KNOWN = frozenset(GenerateOptions.__annotations__)
_NO_SAMPLING = types_pb2.SamplingParams()
_SAMPLING_SCALARS = frozenset(
    name for name in SamplingOptions.__annotations__ if isinstance(getattr(_NO_SAMPLING, name), (float, int))
) - {"early_stopping"}
_SAMPLING_LISTS = frozenset(
    name for name in SamplingOptions.__annotations__ if hasattr(getattr(_NO_SAMPLING, name), "extend")
) - {"stop"}
_PLAIN = frozenset(
    (
        *("model", "request_id", "explain", "local_prefill_max_tokens", "priority", "idempotency_key", "split"),
        *("cache_ttl_s", "cache_priority", "session_id", "adapter", "adapter_version"),
    )
)
_TOOLS = frozenset(("tools", "tool_choice", "parallel_tool_calls"))


def build_request(options: GenerateOptions) -> router_pb2.GenerateRequest:
    """Raises: InvalidRequestError naming a parameter of the wrong type, that does not fit its field, is missing or is
    larger than a message (a PromptTooLongError, for a prompt); TypeError for an unknown keyword (a bug of the caller).
    """
    if not options.keys() <= _KNOWN:
        raise TypeError(f"unknown keyword: {', '.join(sorted(options.keys() - _KNOWN))}")
    request = router_pb2.GenerateRequest()
    _set_input(request, options)
    sampling = request.sampling
    sampling.SetInParent()
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():  # only the given ones
        if name == "seed" and isinstance(value, int) and -(2**63) <= value < 0:
            value += 2**64
        if name in _SAMPLING_SCALARS:
            _assign(sampling, name, value, name)
        elif name in _SAMPLING_LISTS:
            _extend(sampling, name, value or (), name)
        elif name in _PLAIN:
            _assign(request, name, value, name)
    if stop := values.get("stop"):
        _extend(sampling, "stop", (stop,) if isinstance(stop, str) else stop, "stop")
    if "logit_bias" in values:
        try:
            sampling.logit_bias.update(values["logit_bias"] or {})
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"logit_bias cannot be sent: {error}", param="logit_bias") from None
    if "early_stopping" in values:
        sampling.early_stopping = _early_stopping(values["early_stopping"])
    set_grammar(sampling, options)
    if not _TOOLS.isdisjoint(values):
        set_tools(request, options)
    if "resume_after" in values:
        request.resume_after.SetInParent()
        _extend(request.resume_after, "token_ids", values["resume_after"] or (), "resume_after")
    if policy := values.get("failure_policy"):
        if policy not in FAILURE_POLICIES:
            raise InvalidRequestError(
                f"failure_policy must be fail, recompute or retry, got {policy!r}", param="failure_policy"
            )
        request.failure_policy = FAILURE_POLICIES[policy]
    check_size(request)
    return request


def _early_stopping(value: bool | str) -> types_pb2.EarlyStopping:
    known = {"never": types_pb2.EARLY_STOPPING_NEVER, True: types_pb2.EARLY_STOPPING_ON}
    if value not in (True, False, "never"):
        raise InvalidRequestError(
            f'early_stopping must be True, False or "never", got {value!r}', param="early_stopping"
        )
    return known.get(value, types_pb2.EARLY_STOPPING_UNSPECIFIED)


def _set_input(request: router_pb2.GenerateRequest, options: GenerateOptions) -> None:
    given = [name for name in ("prompt", "token_ids", "messages") if options.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of prompt, token_ids and messages, not {' and '.join(given) or 'none'}", param="prompt"
        )
    if given == ["prompt"]:
        _assign(request, "prompt", options["prompt"], "prompt")
    elif given == ["token_ids"]:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "token_ids", options["token_ids"] or (), "token_ids")
    else:
        request.chat.SetInParent()
        for message in options["messages"] or ():
            add_message(request.chat, message)


def _assign(message: object, field: str, value: object, param: str) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{param} cannot be sent: {error}", param=param) from None


def _extend(message: object, field: str, values: object, param: str) -> None:
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("a list is needed, not one text")  # its letters would be the entries
        getattr(message, field).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{param} cannot be sent: {error}", param=param) from None
