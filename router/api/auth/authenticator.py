"""Authentication of callers, by HTTP and gRPC, before any other handling of a request.

The key file is read again when it changes: an added or revoked key takes effect within a second, without a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import structlog

from diptych.common.errors import AuthenticationError, ConfigError, PermissionDeniedError
from diptych.router.api.auth.keys import KeySet, load_keys, public_id
from diptych.router.fairness.fair_queue import Share

log = structlog.get_logger(__name__)

RELOAD_S = 1.0
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `key_id`: public part of the key; empty when no keys are required. `tenant`: "" is the
    default tenant. `admin`: may load and unload adapters; without keys nobody is. `known`: False where keys are required and
    the page is open to everybody."""

    key_id: str = ""
    tenant: str = ""
    admin: bool = False
    known: bool = True

    @property
    def sees_operations(self) -> bool:
        """Whether it may read what is for operators: names, paths and errors of workers."""
        return self.admin or (self.known and not self.key_id)


ANYBODY = Caller()
STRANGER = Caller(known=False)


def require_admin(caller: Caller) -> None:
    """Raises: PermissionDeniedError, naming what would be needed."""
    if not caller.admin:
        raise PermissionDeniedError(
            "an admin key is needed to change adapters: `diptych keys add --admin` makes one (the router needs --keys-file); "
            "`diptych adapters` takes it from DIPTYCH_API_KEY, or the cluster secret instead"
        )


current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYBODY)
"""The caller of the request that the running task handles; set by the HTTP and gRPC servers."""


class Authenticator:
    """Checks API keys. `path`: file of keys. `now`: seconds on a monotonic clock. Raises: ConfigError when the file is
    invalid at the start. If it becomes invalid later, the keys stay and a warning is logged."""

    def __init__(self, path: Path, *, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._seen = _stamp(path)
        self._keys = load_keys(path)
        self._checked = now()

    @property
    def keys(self) -> KeySet:
        if self._now() - self._checked >= RELOAD_S:
            self._checked = self._now()
            self._reload()
        return self._keys

    def quota(self, tenant: str) -> int:
        """Tokens a minute; 0: no limit."""
        return self.keys.quota(tenant)

    def request_quota(self, tenant: str) -> int:
        """Requests a minute; 0: no limit."""
        return self.keys.request_quota(tenant)

    def share(self, tenant: str) -> Share:
        """The tenant's weight and rank while requests wait."""
        return self.keys.share(tenant)

    def may_use_adapter(self, tenant: str, name: str) -> bool:
        """Whether the tenant's keys allow the adapter of this name."""
        return self.keys.may_use_adapter(tenant, name)

    def cache_ttl(self, tenant: str) -> float:
        """The longest time of the tenant's claims on cached KV, in seconds; 0.0: the router's setting."""
        return self.keys.cache_ttl(tenant)

    def identify(self, authorization: str) -> Caller:
        """The caller of this `Authorization` header (empty: none was sent). Raises: AuthenticationError."""
        if not authorization:
            raise AuthenticationError("an API key is required: send it as `Authorization: Bearer <key>`")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise AuthenticationError("the Authorization header must be `Bearer <key>`")
        key = authorization[len(_SCHEME) :].strip()
        entry = self.keys.find(key)
        if entry is None:
            log.warning("API key refused", key_id=public_id(key) or "malformed")
            raise AuthenticationError("this API key is not valid")
        log.debug("API key accepted", key_id=entry.id, tenant=entry.tenant)
        return Caller(entry.id, entry.tenant, entry.admin)

    def _reload(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        try:
            self._keys, self._seen = load_keys(self._path), stamp
            log.info("API keys reloaded", num_keys=len(self._keys.entries))
        except ConfigError as error:
            self._seen = stamp
            log.warning("the file of API keys is invalid: keeping the previous keys", error=str(error))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return (0, 0, 0)
    return (facts.st_mtime_ns, facts.st_ino, facts.st_size)
