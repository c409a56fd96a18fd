"""A file of tenants' API keys, one line `tenant key` each; empty lines and `#` lines are skipped.

A server with keys identifies a tenant by its key, so each tenant of a run needs one. Keys only go into headers, never
into reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from diptych.common.errors import ConfigError


def read_tenant_keys(path: Path, tenants: Iterable[str]) -> dict[str, str]:
    """Tenant -> key. Raises: ConfigError naming the invalid line or the tenant, never a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tenant_keys", str(path), f"cannot be read: {error}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not line.isascii():
            raise ConfigError("tenant_keys", f"{path}:{number}", "must be a tenant and its key, both ASCII")
        if words[0] in keys:
            raise ConfigError("tenant_keys", f"{path}:{number}", f"tenant {words[0]} is listed twice")
        keys[words[0]] = words[1]
    if missing := sorted(set(tenants) - keys.keys()):
        raise ConfigError("tenant_keys", str(path), f"holds no key for {', '.join(missing)}")
    return keys
