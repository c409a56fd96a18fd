"""API keys: creation, hashing, and a file that stores no key.

A key is `dpk-<id>-<secret>`. The id is public: it finds the entry and appears in logs and lists. The secret has 256
random bits; the file stores its keyed blake3 hash. The hash key is unique to the file, so two files never share a hash.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.request import MAX_CACHE_TTL_S
from diptych.common.store.adapters import MAX_ADAPTERS, NAME_RULE, is_adapter_name
from diptych.router.fairness.fair_queue import Share

PREFIX = "dpk"
MAX_KEY_CHARS = 128
VERSION = 1
MAX_WEIGHT = 1000
MAX_RANK = 100
_KEY = re.compile(r"dpk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One API key of the file.

    Args:
        tenant: whose cache and quota the key uses.
        hash: hexadecimal.
        created: Unix seconds.
        tokens_per_minute: the tenant's quota, prompt and output tokens together; 0: none. The largest of its keys
            counts.
        requests_per_minute: the same for requests.
        max_cache_ttl_s: the longest time of the tenant's claims on cached KV; 0: the router's setting. The largest of its keys
            counts.
        weight: the tenant's weight in sharing the pool while requests wait. The largest of its keys counts.
        rank: tenants of a lower rank go first while requests wait. The lowest of its keys counts.
        adapters: names of the adapters that the tenant may use, those of all its keys together; empty, in all of them: all.
        admin: may load and unload adapters.
    """

    id: str
    tenant: str
    hash: str = field(repr=False)
    created: int
    tokens_per_minute: int = 0
    note: str = ""
    weight: int = 1
    rank: int = 0
    requests_per_minute: int = 0
    max_cache_ttl_s: int = 0
    adapters: tuple[str, ...] = ()
    admin: bool = False


@dataclass(frozen=True, slots=True)
class KeySet:
    """The content of a key file at one point in time."""

    hash_key: bytes = field(repr=False)
    entries: Mapping[str, KeyEntry] = field(default_factory=dict)

    def find(self, key: str) -> KeyEntry | None:
        """The entry of `key`, or None. The time does not depend on how much of the secret is correct."""
        match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
        if match is None:
            return None
        entry = self.entries.get(match[1])
        right = hmac.compare_digest(hash_of(key, self.hash_key), entry.hash if entry else "0" * 64)
        return entry if entry is not None and right else None

    def quota(self, tenant: str) -> int:
        """Tokens a minute; 0: no limit."""
        return max((e.tokens_per_minute for e in self.entries.values() if e.tenant == tenant), default=0)

    def request_quota(self, tenant: str) -> int:
        """Requests a minute; 0: no limit."""
        return max((e.requests_per_minute for e in self.entries.values() if e.tenant == tenant), default=0)

    def cache_ttl(self, tenant: str) -> float:
        """See KeyEntry; 0.0: the router's setting."""
        return float(max((e.max_cache_ttl_s for e in self.entries.values() if e.tenant == tenant), default=0))

    def may_use_adapter(self, tenant: str, name: str) -> bool:
        """See KeyEntry."""
        named = [entry.adapters for entry in self.entries.values() if entry.tenant == tenant and entry.adapters]
        return not named or any(name in adapters for adapters in named)

    def share(self, tenant: str) -> Share:
        """Weight and rank while requests wait."""
        own = [entry for entry in self.entries.values() if entry.tenant == tenant]
        return Share(max((e.weight for e in own), default=1), min((e.rank for e in own), default=0))


def hash_of(key: str, hash_key: bytes) -> str:
    digest: str = blake3(key.encode(), key=hash_key).hexdigest()
    return digest


def public_id(key: str) -> str:
    """The part of a key that may be logged; empty for text that is not a key."""
    match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
    return match[1] if match else ""


def load_keys(path: Path) -> KeySet:
    """Raises: ConfigError when the file is missing or of another kind."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ConfigError("keys_file", str(path), f"is of version {data['version']!r}; this is {VERSION}")
        hash_key = bytes.fromhex(data["hash_key"])
        entries = {item["id"]: _entry(item) for item in data["keys"]}
    except FileNotFoundError:
        raise ConfigError("keys_file", str(path), "no such file; `diptych keys add` creates one") from None
    except OSError as error:
        raise ConfigError("keys_file", str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("keys_file", str(path), f"is not a file of keys: {type(error).__name__} {error}") from None
    if len(hash_key) != 32:
        raise ConfigError("keys_file", str(path), "its hash_key must have 64 hexadecimal digits")
    return KeySet(hash_key, entries)


def add_key(
    path: Path,
    tenant: str,
    *,
    now: float,
    tokens_per_minute: int = 0,
    requests_per_minute: int = 0,
    note: str = "",
    weight: int = 1,
    rank: int = 0,
    max_cache_ttl_s: int = 0,
    adapters: Sequence[str] = (),
    admin: bool = False,
) -> tuple[str, KeyEntry]:
    """Create a key for `tenant`, and the file if there is none. Returns the key (not stored) and its entry. Raises:
    ConfigError."""
    if not _NAME.fullmatch(tenant):
        raise ConfigError("tenant", tenant, "must be 1 to 64 letters, digits, '.', '_' or '-'")
    for name, limit in (("tokens_per_minute", tokens_per_minute), ("requests_per_minute", requests_per_minute)):
        if not 0 <= limit < 2**53:
            raise ConfigError(name, limit, "must be 0 (no limit) or more")
    if not 0 <= max_cache_ttl_s <= MAX_CACHE_TTL_S:
        raise ConfigError("max_cache_ttl_s", max_cache_ttl_s, f"must be 0 to {MAX_CACHE_TTL_S:.0f}")
    if not 1 <= weight <= MAX_WEIGHT:
        raise ConfigError("weight", weight, f"must be 1 to {MAX_WEIGHT}")
    if not -MAX_RANK <= rank <= MAX_RANK:
        raise ConfigError("rank", rank, f"must be {-MAX_RANK} to {MAX_RANK}")
    if len(adapters) > MAX_ADAPTERS:
        raise ConfigError("adapters", f"{len(adapters)} names", f"must be at most {MAX_ADAPTERS}")
    for name in adapters:
        if not is_adapter_name(name):
            raise ConfigError("adapter", name, f"must be {NAME_RULE}")
    with _locked(path):
        keys = load_keys(path) if path.exists() else KeySet(secrets.token_bytes(32))
        key = f"{PREFIX}-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"
        digest = hash_of(key, keys.hash_key)
        entry = KeyEntry(
            public_id(key),
            tenant,
            digest,
            int(now),
            tokens_per_minute,
            note,
            weight,
            rank,
            requests_per_minute,
            max_cache_ttl_s,
            tuple(adapters),
            admin,
        )
        _write(path, KeySet(keys.hash_key, {**keys.entries, entry.id: entry}))
    return key, entry


def revoke_key(path: Path, key_id: str) -> KeyEntry:
    """Raises: ConfigError when there is no such key."""
    with _locked(path):
        keys = load_keys(path)
        if key_id not in keys.entries:
            raise ConfigError("id", key_id, f"no such key in {path}")
        _write(path, KeySet(keys.hash_key, {i: e for i, e in keys.entries.items() if i != key_id}))
    return keys.entries[key_id]


def _entry(item: dict[str, Any]) -> KeyEntry:
    entry = KeyEntry(**item | {"adapters": tuple(item.get("adapters", ()))})
    texts = (entry.id, entry.tenant, entry.hash, entry.note)
    numbers = (
        *(entry.created, entry.tokens_per_minute, entry.weight, entry.rank, entry.requests_per_minute),
        entry.max_cache_ttl_s,
    )
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise ValueError(f"key {entry.id!r} has a value of the wrong type")
    if not isinstance(entry.admin, bool) or not all(isinstance(name, str) for name in entry.adapters):
        raise ValueError(f"key {entry.id!r} has a value of the wrong type")
    if entry.weight < 1:
        raise ValueError(f"key {entry.id!r} has no weight")
    return entry


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    """One writer at a time; readers see the old file or the new one."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, keys: KeySet) -> None:
    body = {
        "version": VERSION,
        "hash_key": keys.hash_key.hex(),
        "keys": [asdict(entry) for entry in keys.entries.values()],
    }
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(body, file, indent=1)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
