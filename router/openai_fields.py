"""Fields of the OpenAI and vLLM APIs that are known but not built yet, and fields that nobody knows.

A known field is refused by name when it asks for something; its neutral values are let through. An unknown field is
ignored, with one warning for each name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from diptych.common.errors import InvalidRequestError

_log = logging.getLogger(__name__)

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
"""Name -> values that ask for nothing."""

HARMLESS = frozenset({"parallel_tool_calls", "include_reasoning", "tool_choice"})
"""Where there are no tools and no reasoning these change nothing, whatever they say."""

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
    "stream_options": _NO,
    "response_format": _NO,
    "reasoning": (None, {}),
    "previous_response_id": _NO,
    "conversation": _NO,
    "background": _OFF,
    "include": _EMPTY,
    "prompt": _NO,
    "max_tool_calls": _NO,
    "truncation": (None, "disabled"),
}


def refuse_unbuilt(body: Mapping[str, Any], not_built: Mapping[str, tuple[object, ...]]) -> None:
    """Raises: InvalidRequestError naming the first field that asks for something we do not have."""
    for name in body:
        neutral = not_built.get(name)
        if neutral is not None and not any(_same(body[name], value) for value in neutral):
            raise InvalidRequestError(f"{name} is not supported yet: leave it out", param=name)


def _same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


class UnknownFields:
    """Warns once for each unknown name. Remembers at most `limit` names; past that, new names are ignored in silence."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            short = name[:64]
            if short not in self._seen and len(self._seen) < self._limit:
                self._seen.add(short)
                _log.warning("unknown field %r is ignored", short)
