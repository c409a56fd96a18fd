"""Tools, constraints and pieces over gRPC: the counterparts of openai_* over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.text.token_bytes import ByteTokens
from diptych.router.api.openai.choice import Choice
from diptych.router.api.openai.format import ResponseContext, ResponseOptions, make_choice
from diptych.router.api.openai.requests import Items, validate
from diptych.router.preprocess.structured import GrammarRequest, plain_grammar, schema_grammar
from diptych.router.requests.messages import ChoiceFinishedEvent as ChoiceEnd
from diptych.router.requests.messages import FinishedEvent, GenerateEvent, ModelFeatures, TokenEvent, ValidatedRequest
from diptych.router.tools.options import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    Tool,
    ToolOptions,
    template_messages,
    tool_options,
)
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from diptych.rpc.convert import grammar_from_proto
from diptych.rpc.v1 import router_pb2, types_pb2

_CHOICES = {
    router_pb2.TOOL_CHOICE_UNSPECIFIED: "auto",
    router_pb2.TOOL_CHOICE_NONE: "none",
    router_pb2.TOOL_CHOICE_AUTO: "auto",
    router_pb2.TOOL_CHOICE_REQUIRED: "required",
}


class _Chat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    messages: Items[ChatMessage]
    tools: Items[Tool]


def chat_of(
    request: router_pb2.GenerateRequest, features: ModelFeatures
) -> tuple[list[dict[str, Any]] | None, ToolOptions]:
    """(messages for the chat template, tools). Raises: InvalidRequestError naming the field."""
    if request.WhichOneof("input") != "chat":
        if request.tools or request.tool_name or request.tool_choice == router_pb2.TOOL_CHOICE_REQUIRED:
            raise InvalidRequestError("tools are for chat only", param="tools")
        return None, ToolOptions()
    for name, given, most in (("messages", request.chat.messages, MAX_MESSAGES), ("tools", request.tools, MAX_TOOLS)):
        if len(given) > most:
            raise InvalidRequestError(f"{name} takes at most {most} entries, got {len(given)}", param=name)
    chat = validate(
        _Chat,
        {"messages": [_message(m) for m in request.chat.messages], "tools": [_tool(tool) for tool in request.tools]},
    )
    if not chat.messages:
        raise InvalidRequestError("messages is empty", param="messages")
    if request.tool_choice not in _CHOICES:
        raise InvalidRequestError(f"tool_choice {request.tool_choice} is unknown", param="tool_choice")
    choice: object = _CHOICES[request.tool_choice]
    if request.tool_name:
        choice = {"type": "function", "name": request.tool_name}
    offer = tool_options(chat.tools, choice, features, parallel=not request.single_tool_call)
    return template_messages(chat.messages), offer


def grammar_of(sampling: types_pb2.SamplingParams, offer: ToolOptions) -> Grammar | None:
    """Raises: InvalidRequestError naming `grammar`."""
    wanted = GrammarRequest(_own_grammar(sampling), "grammar") if sampling.HasField("grammar") else None
    found = offer.grammar_with(wanted)
    return None if found is None else found.grammar


def _own_grammar(sampling: types_pb2.SamplingParams) -> Grammar:
    grammar = grammar_from_proto(sampling.grammar)
    if grammar.kind is GrammarKind.TAGS or grammar.free_until:
        raise InvalidRequestError("grammar: tags and free_until cannot be set by clients", param="grammar")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return replace(schema_grammar(grammar.source, "grammar"), compact=grammar.compact)
    return plain_grammar(grammar, "grammar")


class Splitter:
    """Splits the answer of one request into pieces. `of` returns None for a request without splitting."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices

    @classmethod
    def of(
        cls,
        request: router_pb2.GenerateRequest,
        offer: ToolOptions,
        prepared: ValidatedRequest,
        features: ModelFeatures,
    ) -> Splitter | None:
        """Raises: InvalidRequestError when a split answer would be resumed."""
        if not (offer.names or (request.split and request.WhichOneof("input") == "chat")):
            return None
        if prepared.resume_after:
            raise InvalidRequestError(
                "resume_after: cannot resume an answer that is split into parts", param="resume_after"
            )
        options = ResponseOptions(tool_names=offer.names, parallel_tool_calls=not request.single_tool_call)
        context = ResponseContext(prepared, 0, features, ByteTokens(lambda _: b""))
        return cls([make_choice(index, options, context, chat=True) for index in range(prepared.sampling.n)])

    def fill(self, response: router_pb2.GenerateResponse, event: GenerateEvent) -> None:
        """Add the event's pieces to its message."""
        match event:
            case TokenEvent():
                response.pieces.extend(map(_piece, self._choices[event.choice].feed(event)))
            case ChoiceEnd():
                choice = self._choices[event.choice]
                response.pieces.extend(map(_piece, choice.end(event)))
                if choice.finish_reason == "tool_calls":
                    response.choice_finished.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
            case FinishedEvent():
                choice = self._choices[0]
                if choice.finish_reason is None:
                    response.pieces.extend(map(_piece, choice.end(event)))
                if choice.finish_reason == "tool_calls" and len(self._choices) == 1:
                    response.finished.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS


def _piece(piece: Piece) -> router_pb2.Piece:
    match piece:
        case Content(text):
            return router_pb2.Piece(content=text)
        case Reasoning(text):
            return router_pb2.Piece(reasoning=text)
        case CallStart(index, call_id, name):
            return router_pb2.Piece(call_start=router_pb2.CallStart(index=index, id=call_id, name=name))
        case CallArguments(index, text):
            return router_pb2.Piece(call_arguments=router_pb2.CallArguments(index=index, text=text))


def _message(message: router_pb2.ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    return out


def _tool(tool: router_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        try:
            function["parameters"] = json.loads(tool.parameters)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"tools: parameters of {tool.name!r} are no JSON: {error}", param="tools"
            ) from None
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
