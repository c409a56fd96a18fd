"""The cluster secret and keys derived from it."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from diptych.common.errors import ConfigError

_TENANT_SALT_BYTES = 16
SECRET_BYTES = 32


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A 32-byte key for one purpose ("block identity", "tenant salt", ...); purposes never share a key."""
    return blake3(secret, derive_key_context=f"diptych 2026-11 {purpose}").digest()


def create_secret(path: Path) -> bytes:
    """Write a new random secret, readable by the owner only; an existing one is kept. Returns the secret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return load_secret(path)
    with os.fdopen(fd, "w") as file:
        file.write(os.urandom(SECRET_BYTES).hex() + "\n")
    return load_secret(path)


def load_secret(path: Path) -> bytes:
    """Raises: ConfigError when the file is missing or does not hold 64 hexadecimal digits."""
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except FileNotFoundError:
        raise ConfigError(
            "secret_file", str(path), "no such file; `diptych up` with this --secret-file makes one"
        ) from None
    except ValueError:
        raise ConfigError("secret_file", str(path), "must hold 64 hexadecimal digits") from None
    except OSError as error:
        raise ConfigError("secret_file", str(path), f"cannot be read: {error.strerror}") from None
    if len(secret) != SECRET_BYTES:
        raise ConfigError("secret_file", str(path), f"must hold {2 * SECRET_BYTES} hexadecimal digits")
    return secret


def call_key(secret: bytes) -> bytes:
    """Key of the tokens of calls to workers."""
    return derive_key(secret, "calls to workers")


def call_token(key: bytes, address: str) -> str:
    """The token of calls to one worker, see rpc/call_token.py. `address`: host:port as its lease says."""
    return blake3(address.encode(), key=key).hexdigest()


def further_salt(salt: bytes, text: str) -> bytes:
    """Isolates a part of the tenant's cache by a text from the client. It never gives access to another tenant's cache.
    The tenant's salt stays in front: see `tenant_of`."""
    parts = len(salt).to_bytes(2, "little") + salt + text.encode()
    return salt + blake3(parts, derive_key_context="diptych cache salt of a request").digest(16)


def session_key(salt: bytes, session_id: str) -> bytes:
    """Names a session of the tenant to workers, which cannot read its id from it."""
    parts = len(salt).to_bytes(2, "little") + salt + session_id.encode()
    return blake3(parts, derive_key_context="diptych session of a tenant").digest(16)


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Salt that separates one tenant's cache from another's; "" is the default tenant."""
    return blake3(tenant.encode(), key=derive_key(secret, "tenant salt")).digest(_TENANT_SALT_BYTES)


def tenant_of(cache_salt: bytes) -> str:
    """The tenant as a worker knows it: one for all salts that its clients choose. Workers share time and cache by it."""
    return cache_salt[:_TENANT_SALT_BYTES].hex()


@lru_cache(4096)
def tenant_folder(tenant: str) -> str:
    """Name of a tenant's files, 32 hexadecimal digits, from which the salt is not found. Args: tenant: as of `tenant_of`."""
    return blake3(tenant.encode(), derive_key_context="diptych folder of a tenant").hexdigest(16)
