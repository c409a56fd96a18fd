"""The bodies of OpenAI answers, whole and in chunks. Pure: facts in, JSON-ready dictionaries or SSE bytes out.

chunks of a stream:  role -> content* -> finish_reason -> [usage, if asked for] -> data: [DONE]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.router.messages import Explanation, FinishedEvent, PreparedRequest, TokenEvent, UsageInfo

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_EXPLAINED = (
    "request_id",
    "prefill",
    "decode",
    "transport",
    "kv_bytes",
    "cached_tokens_prefill",
    "cached_tokens_decode",
    "kv_ranges",
    "kv_ranges_overlapped",
    "local_prefill",
    "index_mode",
    "prefill_pid",
    "decode_pid",
    "reserved_s",
    "first_token_s",
    "kv_complete_s",
)
_TERMS = (
    "prefill_worker_id",
    "decode_worker_id",
    "queue_ms",
    "prefill_ms",
    "transfer_ms",
    "decode_load_ms",
    "stall_ms",
    "total_ms",
    "prefill_hit_tokens",
    "decode_hit_tokens",
    "chosen",
)


def sse(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def usage_object(usage: UsageInfo) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """The `diptych` object: everything of the message, plus the candidates' terms as `placement`."""
    facts: dict[str, Any] = {name: getattr(explanation, name) for name in _EXPLAINED}
    facts["notes"] = list(explanation.notes)
    facts["placement"] = [{name: getattr(terms, name) for name in _TERMS} for terms in explanation.candidates]
    return facts


def stop_reason(finished: FinishedEvent) -> str | int | None:
    """The request's stop string or stop token that ended the answer, if one did."""
    return finished.stop_string or finished.stop_token_id


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one request's answer is written."""

    prepared: PreparedRequest
    chat: bool
    created: int
    include_usage: bool
    return_token_ids: bool

    @property
    def id(self) -> str:
        return ("chatcmpl-" if self.chat else "cmpl-") + self.prepared.request_id

    def whole(self, text: str, token_ids: list[int], finished: FinishedEvent) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finished.reason.value, "stop_reason": stop_reason(finished)}
        if self.return_token_ids:
            choice["token_ids"] = token_ids
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.prepared.model,
            "choices": [choice],
            "usage": usage_object(finished.usage),
        }
        if self.return_token_ids:
            (body if self.chat else choice)["prompt_token_ids"] = list(self.prepared.prompt_token_ids)
        if finished.explanation is not None:
            body["diptych"] = explanation_object(finished.explanation)
        return body

    def first_chunk(self) -> bytes | None:
        """Sent when decode has accepted. Completions have no such chunk, unless the prompt's ids were asked for."""
        ids = list(self.prepared.prompt_token_ids) if self.return_token_ids else None
        if self.chat:
            chunk = self._chunk({"delta": {"role": "assistant", "content": ""}})
            if ids is not None:
                chunk["prompt_token_ids"] = ids
            return sse(chunk)
        if ids is None:
            return None
        return sse(self._chunk({"text": "", "prompt_token_ids": ids}))

    def token_chunk(self, event: TokenEvent) -> bytes | None:
        """None: there is nothing to show yet (half a character, a possible stop string)."""
        if not event.text and not (self.return_token_ids and event.token_ids):
            return None
        choice: dict[str, Any] = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
        if self.return_token_ids:
            choice["token_ids"] = list(event.token_ids)
        return sse(self._chunk(choice))

    def last_chunks(self, finished: FinishedEvent) -> bytes:
        """finish_reason, usage if asked for, and the end mark."""
        extra = {}
        if finished.explanation is not None:
            extra["diptych"] = explanation_object(finished.explanation)
        choice: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        end = self._chunk(choice, finished.reason.value, stop_reason(finished)) | extra
        out = sse(end)
        if self.include_usage:
            out += sse(self._head() | {"choices": [], "usage": usage_object(finished.usage)} | extra)
        return out + DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.prepared.model,
        }

    def _chunk(
        self, choice: dict[str, Any], finish_reason: str | None = None, stopped_by: str | int | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0} | choice | {"logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stopped_by
        chunk = self._head() | {"choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk
