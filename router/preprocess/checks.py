"""Checks of single values of an untrusted request. Pure; each raises InvalidRequestError naming the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping

from diptych.common.errors import InvalidRequestError, PromptTooLongError
from diptych.router.requests.messages import UncheckedRequest

_MAX_LABEL_BYTES = 128


def check_room(max_tokens: int, room: int) -> None:
    if max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens={max_tokens} is more than the {room} remaining tokens of the context", param="max_tokens"
        )


def given(value: object, *defaults: object) -> object:
    return next((choice for choice in (value, *defaults) if choice is not None), None)


def label(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be text", param=param)
    if len(value) > _MAX_LABEL_BYTES or not value.isascii() or (value and not value.isprintable()):
        raise InvalidRequestError(f"{param} must be printable ASCII of at most {_MAX_LABEL_BYTES} bytes", param=param)
    return value


def salt_text(value: object) -> str:
    if value is None:
        return ""
    try:
        fits = isinstance(value, str) and len(value.encode()) <= _MAX_LABEL_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidRequestError(f"cache_salt must be text of at most {_MAX_LABEL_BYTES} bytes", param="cache_salt")
    return str(value)


def integer(value: object, param: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequestError(f"{param} must be an integer between {least} and {most}", param=param)
    return value


def timeout(value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InvalidRequestError("timeout_s must be a finite number above 0", param="timeout_s")
    return float(value)


def input_name(spec: UncheckedRequest) -> str:
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(spec, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError("exactly one of prompt, token_ids and messages must be given", param="prompt")
    return given[0]


def check_ids(value: object, vocab_size: int, max_model_len: int, param: str = "token_ids") -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{param} must be a list", param=param)
    if len(value) >= max_model_len:
        raise PromptTooLongError(
            f"{param} has {len(value)} tokens; the context of {max_model_len} needs room for one more",
            param=param,
        )
    # Types first: other values may not be comparable.
    if value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size):
        raise InvalidRequestError(f"{param} must be integers from 0 to {vocab_size - 1}", param=param)
    return list(value)


MESSAGE_SIZE = 32
"""Characters added for each message."""


def text_size(messages: object) -> int:
    """Characters in a conversation of untrusted shape. Each message adds MESSAGE_SIZE: the template works for empty
    ones, too."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError("messages must be a list", param="messages")
    size = MESSAGE_SIZE * len(messages)
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, (list, tuple)) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            size += len(text) if isinstance(text, str) else 0
    return size
