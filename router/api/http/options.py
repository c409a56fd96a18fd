"""HTTP settings of the router."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import ConfigError

UNKNOWN_FIELDS = ("ignore", "refuse")


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP settings.

    Args:
        cors_origins: web pages from there may call the API from a browser: scheme://host[:port], or "*" for all.
        unknown_fields: of a body: "ignore" names them in a response header, "refuse" rejects them with 400.
        head_timeout_s: from the connection, or from a request's first byte, to the end of the request's head.
        idle_timeout_s: how long a connection is kept between two requests. Longer than clients and proxies keep theirs:
            who closes first must be the one that sends, or a request meets a connection that is just being closed.
        event_ids: streams have `id:` lines, by which they go on at another router.
    Raises: ConfigError naming the field.
    """

    cors_origins: tuple[str, ...] = ()
    unknown_fields: str = "ignore"
    head_timeout_s: float = 30.0
    idle_timeout_s: float = 120.0
    event_ids: bool = True

    def __post_init__(self) -> None:
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise ConfigError("unknown_fields", self.unknown_fields, 'must be "ignore" or "refuse"')
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest or "*" in rest):
                raise ConfigError("cors_origins", origin, "must be http://host[:port], https://host[:port] or *")
        for name in ("head_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"http_{name}", getattr(self, name), "must be above 0 and finite")
