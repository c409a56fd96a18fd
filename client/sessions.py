"""What the sessions of both clients share."""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from typing import Any

from diptych.client.request import GenerateOptions


def session_defaults(session_id: str, cache_ttl_s: float | None, cache_priority: int | None) -> dict[str, Any]:
    """What each request of a session brings."""
    given = {"cache_ttl_s": cache_ttl_s, "cache_priority": cache_priority}
    return {"session_id": session_id or token_hex(16), **{name: v for name, v in given.items() if v is not None}}


class SessionBase:
    """Of both clients."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults

    @property
    def id(self) -> str:
        """Its session_id."""
        return str(self._defaults["session_id"])

    def _with(self, options: GenerateOptions) -> Any:
        return {**self._defaults, **options}
