"""The address of a store of blocks that workers share, as --kv-store has it. Pure; it imports little, for commands read it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from diptych.common.errors import ConfigError

SETTING = "kv_store"
SCHEME = "mooncake"
_OPTIONS = {"protocol": "tcp", "device": "", "metadata": "P2PHANDSHAKE", "segment_bytes": "0", "host": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """mooncake://HOST:PORT?OPTIONS

    Args:
        host, port: of the master.
        protocol: of transfers: tcp or rdma.
        device: of rdma; empty: all.
        metadata: P2PHANDSHAKE, or the URL of a metadata server.
        segment_bytes: memory that this worker gives to the store; 0: none.
        own_host: this worker's address, at which others read from its segment (option `host`).
    """

    host: str
    port: int
    protocol: str
    device: str
    metadata: str
    segment_bytes: int
    own_host: str

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Raises: ConfigError."""
        try:
            parts = urlsplit(url)
            port, given = parts.port, parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ConfigError(SETTING, url, f"is no address: {error}") from None
        if parts.scheme != SCHEME or not parts.hostname or not port or parts.path or parts.username or parts.fragment:
            raise ConfigError(
                SETTING, url, f"must be {SCHEME}://HOST:PORT of a master, with options behind a question mark"
            )
        options = {**_OPTIONS, **dict(given)}
        if unknown := sorted(options.keys() - _OPTIONS.keys()):
            raise ConfigError(SETTING, url, f"has no option {', '.join(unknown)}: {', '.join(_OPTIONS)} are known")
        if not options["segment_bytes"].isdecimal():
            raise ConfigError(SETTING, url, "segment_bytes must be a number of bytes, 0 or more")
        return cls(
            parts.hostname, port, options["protocol"], options["device"], options["metadata"],
            int(options["segment_bytes"]), options["host"],
        )  # fmt: skip
