"""A client of the Redis primary, from a URL: one server, or the primary that Sentinel names.

    redis://, rediss://, unix://                                as redis-py reads them
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/SERVICE[/DB]    and rediss+sentinel://, with TLS

With Sentinel every new connection resolves the primary, and a connection whose write reaches a replica is closed. After
a failover the next calls go to the new primary. User and password are the primary's; the Sentinels are queried without.

With TLS, server and Sentinels must have a certificate for the name or address that they are connected by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from redis import asyncio as aioredis
from redis.asyncio.sentinel import Sentinel

from diptych.common.errors import ConfigError
from diptych.common.tls import NO_FILES, RedisTls

_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT = 26379
_MAX_CONNECTIONS = 16
_FIELD = "redis_url"


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of a Sentinel URL. `sentinels`: (host, port) of each."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int
    username: str | None
    password: str | None = field(repr=False)
    tls: bool


def parse_sentinel_url(url: str) -> SentinelUrl | None:
    """None: another kind of URL. Raises: ConfigError, which never shows the password."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return None
    netloc, _, path = rest.partition("/")  # urlsplit accepts brackets around one host only
    user, _, hosts = netloc.rpartition("@")
    shown = f"{scheme}://{hosts}/{path}"
    service, _, db = path.strip("/").partition("/")
    if not service or not (db or "0").isdigit() or "?" in path or "#" in path:
        raise ConfigError(
            _FIELD, shown, "must end with /SERVICE or /SERVICE/DB, SERVICE as the Sentinels name the primary"
        )
    name, _, password = user.partition(":")
    found = tuple(_address(one, shown) for one in hosts.split(","))
    return SentinelUrl(
        found, unquote(service), int(db or 0), unquote(name) or None, unquote(password) or None, scheme == _SCHEMES[1]
    )


def _address(text: str, shown: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = -1
    if port == -1 or not parts.hostname or parts.path:
        raise ConfigError(_FIELD, shown, f"{text!r} is no HOST:PORT of a Sentinel")
    return parts.hostname, _SENTINEL_PORT if port is None else port


@dataclass(frozen=True, slots=True, eq=False)
class Connected:
    """A client, further objects to close, and the (host, port) to resolve first ("": none)."""

    client: Any
    sentinels: tuple[Any, ...]
    first: tuple[str, int]

    async def close(self) -> None:
        await self.client.aclose()
        for one in self.sentinels:
            await one.aclose()


def connect(url: str, *, timeout_s: float, tls: RedisTls = NO_FILES) -> Connected:
    """Make a client; it connects on first use. It does not retry within a call: callers have retry loops and a time
    bound. Raises: ConfigError."""
    files = {
        name: file
        for name, file in (("ssl_ca_certs", tls.ca), ("ssl_certfile", tls.cert), ("ssl_keyfile", tls.key))
        if file
    }
    if files and not url.startswith("rediss"):
        raise ConfigError("redis_ca" if tls.ca else "redis_cert", tls.ca or tls.cert, "needs a redis_url of rediss://")
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": timeout_s,
        "socket_timeout": None,
        "retry": None,
        "retry_on_error": [],
        "max_connections": _MAX_CONNECTIONS,
        **files,
    }
    if (parsed := parse_sentinel_url(url)) is None:
        try:
            client: Any = aioredis.Redis.from_url(url, **options)
        except ValueError as err:
            # What follows the scheme may hold a password; so may the error of a URL with one that is not quoted.
            rule = "cannot be read as a URL: quote the password" if "@" in url else str(err)
            raise ConfigError(_FIELD, f"{url.partition('://')[0]}://***", rule) from None
        where = client.connection_pool.connection_kwargs
        return Connected(client, (), (str(where.get("host") or ""), where.get("port") or 6379))
    # One unresponsive Sentinel must leave time for the others within a call.
    each_s = timeout_s / (len(parsed.sentinels) + 1)
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        list(parsed.sentinels),
        sentinel_kwargs={
            "protocol": 2,
            "socket_timeout": each_s,
            "socket_connect_timeout": each_s,
            "retry": None,
            "retry_on_error": [],
            "ssl": parsed.tls,
            **files,
        },
    )
    client = sentinel.master_for(
        parsed.service, db=parsed.db, username=parsed.username, password=parsed.password, ssl=parsed.tls, **options
    )
    return Connected(client, tuple(sentinel.sentinels), parsed.sentinels[0])
