"""Formatting of /v1/responses: a sequence of items, each a message or a function call.

events of a stream:  created -> in_progress -> item* -> completed | incomplete
    a message        output_item.added -> content_part.added -> output_text.delta* -> output_text.done
                     -> content_part.done -> output_item.done
    a call           output_item.added -> function_call_arguments.delta* -> function_call_arguments.done
                     -> output_item.done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from diptych.common.errors import DiptychError
from diptych.common.sampling import FinishReason
from diptych.router.api.openai.answers import explanation_object
from diptych.router.api.openai.errors import error_body
from diptych.router.api.openai.format import ResponseContext, ResponseOptions, make_choice
from diptych.router.requests.messages import FinishedEvent, GenerateEvent, TokenEvent
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece


class ResponsesForm:
    """See ResponseFormatter. `request_fields`: fields of the request repeated in the response."""

    def __init__(self, request_fields: Mapping[str, Any], options: ResponseOptions, context: ResponseContext) -> None:
        self._request_fields = request_fields
        self._context = context
        self._choice = make_choice(0, options, context, chat=True)
        self.choices = [self._choice]
        self.sequence = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Of the last item, which is being written."""

    def begin(self) -> bytes:
        body = self._response("in_progress", None)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def chunks(self, event: GenerateEvent) -> bytes:
        if isinstance(event, TokenEvent):
            return self._pieces(self._choice.feed(event))
        return self._end(event) if isinstance(event, FinishedEvent) else b""

    def absorb(self, event: GenerateEvent) -> None:
        self.chunks(event)

    def whole(self, finished: FinishedEvent) -> dict[str, Any]:
        self._end(finished)
        return self._final(finished)

    def failure(self, error: DiptychError) -> bytes:
        body: Mapping[str, Any] = error_body(error)["error"]
        return self._event("error", code=body["code"], message=body["message"], param=body["param"])

    def _pieces(self, pieces: list[Piece]) -> bytes:
        out = b""
        for piece in pieces:
            match piece:
                case Content(text):
                    if not text:
                        continue
                    if not self._writing("message"):
                        out += self._item_done("completed") + self._message()
                    self._texts.append(text)
                    out += self._event("response.output_text.delta", delta=text, logprobs=[], **self._place())
                case CallStart(_, call_id, name):
                    out += self._item_done("completed") + self._call(call_id, name)
                case CallArguments(_, text):
                    self._texts.append(text)
                    out += self._event("response.function_call_arguments.delta", delta=text, **self._place(part=False))
        return out

    def _writing(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _message(self) -> bytes:
        item = {
            "id": f"msg_{self._context.prepared.request_id}_{len(self._items)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        return self._add(item) + self._event("response.content_part.added", part=_part(""), **self._place())

    def _call(self, call_id: str, name: str) -> bytes:
        return self._add(
            {
                "id": f"fc_{self._context.prepared.request_id}_{len(self._items)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call_id,
                "name": name,
                "arguments": "",
            }
        )

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._texts = []
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _item_done(self, status: str) -> bytes:
        """The last item is complete."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        text, item = "".join(self._texts), self._items[-1]
        if item["type"] == "message":
            out = self._event("response.output_text.done", text=text, logprobs=[], **self._place())
            out += self._event("response.content_part.done", part=_part(text), **self._place())
            item = item | {"status": status, "content": [_part(text)]}
        else:
            out = self._event(
                "response.function_call_arguments.done",
                arguments=text,
                name=item["name"],
                **self._place(part=False),
            )
            item = item | {"status": status, "arguments": text}
        self._items[-1] = item
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, *, part: bool = True) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | {"content_index": 0} if part else place

    def _end(self, finished: FinishedEvent) -> bytes:
        out = self._pieces(self._choice.end(finished))
        if not self._items:  # an empty answer is an empty message
            out += self._message()
        out += self._item_done(_status(finished))
        return out + self._event(f"response.{_status(finished)}", response=self._final(finished))

    def _final(self, finished: FinishedEvent) -> dict[str, Any]:
        usage = finished.usage
        body = self._response(
            _status(finished),
            {
                "input_tokens": usage.prompt_tokens,
                # cache writes are free of charge
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )
        if finished.explanation is not None:
            body["diptych"] = explanation_object(finished.explanation)
        return body

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        prepared = self._context.prepared
        return {
            "id": "resp_" + prepared.request_id,
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": prepared.shown_model,
            "output": list(self._items),
            "previous_response_id": None,
            "store": False,
            "temperature": prepared.sampling.temperature,
            "top_p": prepared.sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
        } | dict(self._request_fields)

    def _event(self, kind: str, **facts: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self.sequence} | facts
        self.sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(payload) + b"\n\n"


def _status(finished: FinishedEvent) -> str:
    return "incomplete" if finished.reason is FinishReason.LENGTH else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
