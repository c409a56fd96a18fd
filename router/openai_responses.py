"""The basic form of the Responses API: text in, text out, whole or as typed events. Nothing is stored.

events of a stream:  created -> in_progress -> output_item.added -> content_part.added -> output_text.delta*
                     -> output_text.done -> content_part.done -> output_item.done -> completed | incomplete
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, field_validator

from diptych.common.errors import DiptychError, InvalidRequestError
from diptych.common.sampling import FinishReason
from diptych.router.http_errors import error_body
from diptych.router.messages import FinishedEvent, GenerateEvent, GenerateSpec, ModelFeatures, TokenEvent
from diptych.router.openai_answers import explanation_object
from diptych.router.openai_fields import RESPONSES_NOT_BUILT, UnknownFields, refuse_unbuilt
from diptych.router.openai_form import Scene, Wishes, make_choice
from diptych.router.openai_requests import Call, Items, Sampled, note_unknown, sampling_fields, validate
from diptych.router.tools_pieces import Content

_TEXT_PARTS = ("input_text", "output_text", "text")


class InputMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            known = isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
            if not known:
                raise ValueError("content parts must be input_text or output_text: other kinds are not supported")
            texts.append(part["text"])
        return "\n".join(texts)


class ResponsesRequest(Sampled):
    """Body of POST /v1/responses."""

    input: str | Items[InputMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None


def responses_call(body: dict[str, Any], *, features: ModelFeatures, unknown: UnknownFields) -> Call:
    """Raises: InvalidRequestError naming the field."""
    refuse_unbuilt(body, RESPONSES_NOT_BUILT)
    request = validate(ResponsesRequest, body)
    note_unknown(ResponsesRequest, body, RESPONSES_NOT_BUILT, unknown)
    if request.metadata and len(request.metadata) > 16:
        raise InvalidRequestError("metadata takes at most 16 entries", param="metadata")
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        turns = [{"role": "user", "content": request.input}]
    else:
        turns = [
            {"role": "system" if item.role == "developer" else item.role, "content": item.content}
            for item in request.input
        ]
    if not turns:
        raise InvalidRequestError("input is empty", param="input")
    fields = sampling_fields(request) | {"messages": system + turns, "max_tokens": request.max_output_tokens}
    renamed = {"messages": "input", "max_tokens": "max_output_tokens"}
    return Call(GenerateSpec(**fields), bool(request.stream), partial(ResponsesForm, request), renamed)


class ResponsesForm:
    """See openai_form.Form."""

    def __init__(self, request: ResponsesRequest, scene: Scene) -> None:
        self._request = request
        self._scene = scene
        self._choice = make_choice(0, Wishes(include_reasoning=False), scene, chat=True)
        self._sequence = 0
        self._message_id = "msg_" + scene.prepared.request_id

    def begin(self) -> bytes:
        item = self._item("in_progress", [])
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return (
            self._event("response.created", response=self._response("in_progress", [], None))
            + self._event("response.in_progress", response=self._response("in_progress", [], None))
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", part=_part(""), **place)
        )

    def chunks(self, event: GenerateEvent) -> bytes:
        if isinstance(event, TokenEvent):
            return self._deltas(self._choice.feed(event))
        return self._end(event) if isinstance(event, FinishedEvent) else b""

    def absorb(self, event: GenerateEvent) -> None:
        if isinstance(event, TokenEvent):
            self._choice.feed(event)

    def whole(self, finished: FinishedEvent) -> dict[str, Any]:
        self._choice.end(finished)
        return self._final(finished)

    def failure(self, error: DiptychError) -> bytes:
        told: Mapping[str, Any] = error_body(error)["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _deltas(self, pieces: list[Any]) -> bytes:
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        if not text:
            return b""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def _end(self, finished: FinishedEvent) -> bytes:
        out = self._deltas(self._choice.end(finished))
        final = self._final(finished)
        item = final["output"][0]
        text = item["content"][0]["text"]
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return (
            out
            + self._event("response.output_text.done", text=text, logprobs=[], **place)
            + self._event("response.content_part.done", part=_part(text), **place)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{final['status']}", response=final)
        )

    def _final(self, finished: FinishedEvent) -> dict[str, Any]:
        status = "incomplete" if finished.reason is FinishReason.LENGTH else "completed"
        usage = finished.usage
        body = self._response(
            status,
            [self._item(status, [_part("".join(self._choice.content))])],
            {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )
        if finished.explanation is not None:
            body["diptych"] = explanation_object(finished.explanation)
        return body

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        prepared, request = self._scene.prepared, self._request
        return {
            "id": "resp_" + prepared.request_id,
            "object": "response",
            "created_at": self._scene.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": prepared.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": prepared.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": prepared.sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request.user,
        }

    def _event(self, kind: str, **facts: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence} | facts
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(payload) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
