"""Structured parts of a GenerateRequest: chat messages, tools, constraints."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from google.protobuf.message import Message

from diptych.common.errors import DiptychError, InvalidRequestError, PromptTooLongError
from diptych.rpc.channels import MAX_MESSAGE_BYTES
from diptych.rpc.v1 import router_pb2, types_pb2

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Leaves room for the fields added by a placement."""

_GRAMMARS = {
    "json_schema": types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "regex": types_pb2.GRAMMAR_KIND_REGEX,
    "choice": types_pb2.GRAMMAR_KIND_CHOICE,
    "ebnf": types_pb2.GRAMMAR_KIND_EBNF,
}
_TOOL_CHOICES = {
    "auto": router_pb2.TOOL_CHOICE_AUTO,
    "none": router_pb2.TOOL_CHOICE_NONE,
    "required": router_pb2.TOOL_CHOICE_REQUIRED,
}


def set_grammar(sampling: types_pb2.SamplingParams, options: Mapping[str, Any]) -> None:
    """Raises: InvalidRequestError naming the keyword."""
    given = [name for name in _GRAMMARS if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"give one of {' and '.join(given)}", param=given[1])
    for name in given:
        value = options[name]
        try:
            if name == "choice":
                if isinstance(value, str):
                    raise TypeError("a list of texts is needed, not one text")  # its letters would be the choices
                value = json.dumps(list(value), ensure_ascii=False)
            elif name == "json_schema" and not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            sampling.grammar.kind = _GRAMMARS[name]
            sampling.grammar.compact = name == "json_schema" and bool(options.get("compact_json"))
            sampling.grammar.source = value
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name} cannot be sent: {error}", param=name) from None


def name_callers_keyword(error: DiptychError, request: router_pb2.GenerateRequest) -> None:
    """Set the error's parameter to the caller's keyword, where the server names another field."""
    if error.param != "grammar":
        return
    if request.sampling.HasField("grammar"):
        kind = request.sampling.grammar.kind
        keyword = next((name for name, value in _GRAMMARS.items() if value == kind), "grammar")
    else:
        keyword = "tools"  # the grammar was made from tools
    if error.message.startswith("grammar"):
        error.message = keyword + error.message.removeprefix("grammar")
    elif keyword not in error.message:
        error.message = f"{keyword}: {error.message}"
    error.args = (error.message,)
    error.param = keyword


def check_size(request: router_pb2.GenerateRequest) -> None:
    """Raises: PromptTooLongError for a prompt larger than a message, InvalidRequestError naming another field that is
    too large."""
    size = request.ByteSize()
    if size <= MAX_REQUEST_BYTES:
        return
    prompt = request.WhichOneof("input") or "prompt"
    sizes = {
        "messages" if prompt == "chat" else prompt: _size_of(request, prompt),
        "tools": sum(tool.ByteSize() for tool in request.tools),
        "resume_after": request.resume_after.ByteSize(),
    }
    for name in ("bad_words", "stop", "allowed_token_ids", "stop_token_ids"):
        sizes[name] = _size_of(request.sampling, name)
    if request.sampling.HasField("grammar"):
        kind = request.sampling.grammar.kind
        sizes[next(name for name, value in _GRAMMARS.items() if value == kind)] = request.sampling.grammar.ByteSize()
    largest = max(sizes, key=lambda name: sizes[name])
    kind_of_error = PromptTooLongError if largest == next(iter(sizes)) else InvalidRequestError
    raise kind_of_error(
        f"{largest} cannot be sent: the request has {size} bytes, the maximum is {MAX_REQUEST_BYTES}",
        param=largest,
    )


def _size_of(message: Message, field: str) -> int:
    """Encoded size of one field in bytes."""
    alone = type(message)()
    value = getattr(message, field)
    if isinstance(value, str):
        setattr(alone, field, value)
    elif isinstance(value, Message):
        getattr(alone, field).CopyFrom(value)
    else:
        getattr(alone, field).extend(value)
    return alone.ByteSize()


def set_tools(request: router_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    """Raises: InvalidRequestError naming the keyword."""
    for tool in options.get("tools") or ():
        try:
            function = tool.get("function", tool)
            parameters = function.get("parameters")
            if parameters is not None and not isinstance(parameters, str):
                parameters = json.dumps(parameters, ensure_ascii=False)
            request.tools.add(
                name=function["name"],
                description=function.get("description") or "",
                parameters=parameters or "",
                strict=bool(function.get("strict")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"tools must hold mappings with a name: {error}", param="tools") from None
    choice = options.get("tool_choice")
    if choice is None:
        pass
    elif not isinstance(choice, str):
        raise InvalidRequestError("tool_choice must be text", param="tool_choice")
    elif choice in _TOOL_CHOICES:
        request.tool_choice = _TOOL_CHOICES[choice]
    else:
        try:
            request.tool_name = choice
        except ValueError as error:
            raise InvalidRequestError(f"tool_choice cannot be sent: {error}", param="tool_choice") from None
    request.single_tool_call = options.get("parallel_tool_calls", True) is False


def add_message(chat: router_pb2.ChatInput, message: Mapping[str, Any]) -> None:
    """Raises: InvalidRequestError."""
    try:
        added = chat.messages.add(role=message["role"], content=message.get("content") or "")
        if "content" not in message and "tool_calls" not in message:
            raise KeyError("content")
        for call in message.get("tool_calls") or ():
            added.tool_calls.add(**_call(call))
        added.tool_call_id = message.get("tool_call_id") or ""
        added.reasoning = message.get("reasoning") or ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"messages must hold mappings with the strings role and content: {error}", param="messages"
        ) from None


def _call(call: Any) -> dict[str, str]:
    if not isinstance(call, Mapping):
        return {"id": call.id, "name": call.name, "arguments": call.arguments}
    function = call.get("function", call)
    return {"id": call["id"], "name": function["name"], "arguments": function["arguments"]}


def may_continue(request: router_pb2.GenerateRequest) -> bool:
    """Whether a broken stream of this request can continue after its tokens, at a router that knows nothing else of it."""
    sampling = request.sampling
    return not (
        sampling.beam_width
        or sampling.n > 1
        or sampling.best_of > 1
        or sampling.HasField("prompt_logprobs")
        or request.tools
        or request.split
    )


def may_stream_directly(request: router_pb2.GenerateRequest) -> bool:
    """Whether the answer may be streamed by its decode worker: no part of it needs the router."""
    return not (
        request.tools
        or request.split
        or request.idempotency_key
        or request.HasField("resume_after")
        or request.prefetch
    )


def resume_id(ref: str, choices: Sequence[tuple[Sequence[int], int, bool]]) -> str:
    """GenerateRequest.resume_id. `choices`: of each, the token ids and the number of characters that the caller has, and
    whether it has the choice's end. See router/requests/resume.py."""
    numbers = [len(choices), 0, 0]
    for token_ids, num_chars, ended in choices:
        numbers += (len(token_ids), num_chars, crc32(array("I", token_ids).tobytes()), 0, int(ended))
    return f"{ref}.{'-'.join(map(str, numbers))}"


def resumed(
    request: router_pb2.GenerateRequest, token_ids: Sequence[int], seed: int, number: int
) -> router_pb2.GenerateRequest:
    """The request that continues after `token_ids`. `number`: how often it was resumed, including this time."""
    rest = router_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.sampling.seed = seed
    rest.resume_after.CopyFrom(router_pb2.TokenIdsInput(token_ids=token_ids))
    if request.idempotency_key:  # the broken one may still be running
        rest.idempotency_key = f"{request.idempotency_key[:120]}~{number}"
    return rest
