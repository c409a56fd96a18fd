"""What a request claims of the workers' caches, from the untrusted fields of its caller (docs/decisions/retention.md). Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.errors import InvalidRequestError
from diptych.common.request import DEFAULT_CACHE_PRIORITY, MAX_CACHE_PRIORITY, MAX_CACHE_TTL_S, CacheClaim
from diptych.common.secret import session_key
from diptych.router.preprocess.checks import integer
from diptych.router.requests.messages import Retention, UncheckedRequest

MAX_SESSION_BYTES = 512


@dataclass(slots=True)
class RetentionLimits:
    """Of a router. The keys' limits are set once they are read.

    Args:
        default_ttl_s: of a claim without a time.
        most_ttl_s: of a tenant; a longer time is shortened to it.
        rank: of a tenant.
    """

    default_ttl_s: float = 300.0
    most_ttl_s: Callable[[str], float] = lambda tenant: MAX_CACHE_TTL_S
    rank: Callable[[str], int] = lambda tenant: 0


def retention_of(spec: UncheckedRequest, owner: bytes, limits: RetentionLimits) -> Retention | None:
    """None: it claims nothing. Args: owner: the tenant's salt. Raises: InvalidRequestError naming the parameter."""
    session_id = "" if spec.session_id in (None, "") else session_text(spec.session_id, "session_id")
    if not isinstance(spec.prefetch, bool):
        raise InvalidRequestError("prefetch must be true or false", param="prefetch")
    if spec.cache_ttl_s is None and spec.cache_priority is None and not session_id and not spec.prefetch:
        return None
    wanted_s = limits.default_ttl_s if spec.cache_ttl_s is None else _ttl(spec.cache_ttl_s)
    priority = DEFAULT_CACHE_PRIORITY
    if spec.cache_priority is not None:
        priority = integer(spec.cache_priority, "cache_priority", 0, MAX_CACHE_PRIORITY)
    claim = CacheClaim(
        min(wanted_s, limits.most_ttl_s(spec.tenant)),
        priority,
        session_key(owner, session_id) if session_id else b"",
        limits.rank(spec.tenant),
    )
    return Retention(claim, wanted_s, session_id)


def session_text(value: object, param: str) -> str:
    """Raises: InvalidRequestError."""
    try:
        fits = isinstance(value, str) and 0 < len(value.encode()) <= MAX_SESSION_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidRequestError(f"{param} must be text of 1 to {MAX_SESSION_BYTES} bytes", param=param)
    return str(value)


def _ttl(value: object) -> float:
    """Raises: InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_CACHE_TTL_S:
        rule = f"must be a number of seconds above 0, at most {MAX_CACHE_TTL_S:.0f}"
        raise InvalidRequestError(f"cache_ttl_s {rule}", param="cache_ttl_s")
    return float(value)
