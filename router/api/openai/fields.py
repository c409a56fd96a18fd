"""Fields of the OpenAI and vLLM APIs that are known but not supported, and unknown fields.

A known field is rejected by name unless its value is neutral. An unknown field is ignored, with a warning to the client
and one in the log for each name; or it is rejected.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from diptych.common.errors import InvalidRequestError

_log = logging.getLogger(__name__)

MAX_NAME_CHARS = 64
MAX_WARNINGS = 8
"""Most unknown names in one response."""
_ALIKE = 0.8

_NO: tuple[object, ...] = (None,)
_OFF: tuple[object, ...] = (None, False)
_ZERO: tuple[object, ...] = (None, 0)
_ONE: tuple[object, ...] = (None, 1)
_EMPTY: tuple[object, ...] = (None, [], {}, "")

NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "suffix": _EMPTY,
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False),
    "documents": _EMPTY,
    "chat_template": _NO,
    "kv_transfer_params": _EMPTY,
    "stream_interval": _ONE,
    "logprob_token_ids": _EMPTY,
    "thinking_token_budget": _NO,
    "modalities": (None, ["text"]),
    "audio": _NO,
    "prediction": _NO,
    "web_search_options": _NO,
}
"""Name -> neutral values."""

HARMLESS = frozenset({
    "parallel_tool_calls", "include_reasoning", "tool_choice",
    "prompt_cache_options", "safety_identifier", "service_tier",
    "client_metadata", "store", "metadata", "verbosity", "max_tool_calls",
})  # fmt: skip
"""These never change an answer: the server has no tools, reasoning, storage or tiers of its own, and no model uses the
hint."""

CHAT_NOT_BUILT: Mapping[str, tuple[object, ...]] = {**NOT_BUILT, "add_special_tokens": _OFF, "echo": _OFF}
_OF_CHAT: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "reasoning_effort": (None, "none"),
}
COMPLETION_NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    **NOT_BUILT,
    **_OF_CHAT,
    "tools": _EMPTY,
    "chat_template_kwargs": _EMPTY,
    "top_logprobs": _ZERO,
}
RESPONSES_NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    **NOT_BUILT,
    **_OF_CHAT,
    "n": _ONE,
    "best_of": _ONE,
    "use_beam_search": _OFF,
    "beam_width": _ZERO,
    "logprobs": _OFF,
    "top_logprobs": _ZERO,
    "prompt_logprobs": _NO,
    "echo": _OFF,
    "response_format": _NO,
    "previous_response_id": _NO,
    "conversation": _NO,
    "background": _OFF,
    "prompt": _NO,
    "truncation": (None, "disabled"),
}


def reject_unsupported(body: Mapping[str, Any], not_built: Mapping[str, tuple[object, ...]]) -> None:
    """Raises: InvalidRequestError naming the first unsupported field with another than a neutral value."""
    for name in body:
        neutral = not_built.get(name)
        if neutral is not None and not any(_same(body[name], value) for value in neutral):
            raise InvalidRequestError(f"{name} is not supported yet: leave it out", param=name)


def _same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


class UnknownFields:
    """Handling of unknown fields. `refuse`: reject them; else ignore them, with one line in the log for each name.
    `limit`: most names remembered; further new names are not logged."""

    def __init__(self, *, refuse: bool = False, limit: int = 256) -> None:
        self._refuse = refuse
        self._limit = limit
        self._seen: set[str] = set()

    def note(self, names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
        """Warnings for the client. Raises: InvalidRequestError naming the first field, if they are rejected. `known`:
        existing fields, for suggestions."""
        warnings: list[str] = []
        for name in names:
            short = name[:MAX_NAME_CHARS]
            close = difflib.get_close_matches(short, known, 1, _ALIKE) if len(warnings) < MAX_WARNINGS else []
            meant = f" (did you mean {close[0]}?)" if close else ""
            if self._refuse:
                raise InvalidRequestError(f"there is no field {short!r}{meant}", param=short)
            if len(warnings) < MAX_WARNINGS:
                warnings.append(f"unknown field {short!r} is ignored{meant}")
            if short not in self._seen and len(self._seen) < self._limit:
                self._seen.add(short)
                _log.warning("unknown field %r is ignored", short)
        return tuple(warnings)
