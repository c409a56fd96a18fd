"""Parts that every kind of OpenAI answer has. Pure: facts in, JSON-ready dictionaries or SSE bytes out."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych.router.messages import ChoiceFinishedEvent, Explanation, FinishedEvent, UsageInfo

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


def usage_object(usage: UsageInfo, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """The `diptych` object: everything of the message, plus the candidates' terms as `placement`."""
    facts: dict[str, Any] = {name: getattr(explanation, name) for name in _EXPLAINED}
    facts["notes"] = list(explanation.notes)
    facts["placement"] = [{name: getattr(terms, name) for name in _TERMS} for terms in explanation.candidates]
    return facts


def stop_reason(finished: FinishedEvent | ChoiceFinishedEvent) -> str | int | None:
    """The request's stop string or stop token that ended the answer, if one did."""
    return finished.stop_string or finished.stop_token_id
