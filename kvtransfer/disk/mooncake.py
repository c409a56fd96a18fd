"""Blocks of KV in a Mooncake store: memory, and disks, of several machines, under a master that knows where what is.

    diptych/IDENTITY/TENANT/KEY-INDEX     as a file (block_file.py)

Every worker of one identity reads what any of them has written. The store lets go of blocks by itself.
Package: mooncake-transfer-engine, or its build without CUDA.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from diptych.common.addresses import host_port
from diptych.common.errors import ConfigError
from diptych.engine.disk_messages import DiskBlock
from diptych.kvtransfer.disk.block_file import (
    HEAD_BYTES,
    MISSING,
    BadBlockError,
    check_content,
    check_size,
    head_of,
    name_of,
)
from diptych.kvtransfer.disk.keeper import Found

SETTING = "kv_store"
SCHEME = "mooncake"
_FULL = -200
"""The store's number for: no segment has room."""
_OPTIONS = {"protocol": "tcp", "device": "", "metadata": "P2PHANDSHAKE", "segment_bytes": "0", "host": "127.0.0.1"}


class MooncakeApi(Protocol):
    """What is used of a MooncakeDistributedStore."""

    def put_parts(self, key: str, *parts: memoryview) -> int: ...

    def get_buffer(self, key: str) -> Any: ...

    def is_exist(self, key: str) -> int: ...

    def remove(self, key: str) -> int: ...

    def close(self) -> int: ...


def connect(url: str, block_bytes: int) -> MooncakeApi:
    """A client of the store at mooncake://HOST:PORT?OPTIONS; the port is the master's.

    Options: protocol (tcp, rdma), device, metadata (P2PHANDSHAKE, or the URL of a metadata server), host (this worker's address,
    at which others read from its segment), segment_bytes (memory that this worker gives to the store; 0: none).

    Raises: ConfigError.
    """
    parts = urlsplit(url)
    options = {**_OPTIONS, **dict(parse_qsl(parts.query))}
    try:
        port, segment_bytes = parts.port, int(options["segment_bytes"])
    except ValueError:
        port, segment_bytes = None, -1
    if parts.scheme != SCHEME or not parts.hostname or port is None or parts.path or segment_bytes < 0:
        raise ConfigError(
            SETTING, url, f"must be {SCHEME}://HOST:PORT of a master, with options behind a question mark"
        )
    if unknown := options.keys() - _OPTIONS.keys():
        raise ConfigError(SETTING, url, f"has no option {', '.join(sorted(unknown))}: {', '.join(_OPTIONS)} are known")
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise ConfigError(SETTING, url, f"needs the package mooncake-transfer-engine: {error}") from None
    code = store.setup(
        options["host"], options["metadata"], segment_bytes, max(16 << 20, 16 * block_bytes), options["protocol"],
        options["device"], host_port(parts.hostname, port),
    )  # fmt: skip
    if code:
        raise ConfigError(SETTING, url, f"the store cannot be used: it answers {code}")
    found: MooncakeApi = store
    return found


class MooncakeKeeper:
    """See BlockKeeper."""

    is_shared = True

    def __init__(self, store: MooncakeApi, identity: bytes, block_bytes: int) -> None:
        self._store, self._identity, self.block_bytes = store, identity, block_bytes
        self._is_open = True

    def open(self) -> Found:
        """A store does not list what it has."""
        return Found()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._store.close()

    def write(self, block: DiskBlock, pieces: Sequence[memoryview]) -> str:
        head = memoryview(head_of(self._identity, block.key, pieces))
        code = self._store.put_parts(self.name(block), head, *pieces)
        if code:
            raise OSError(errno.ENOSPC if code == _FULL else errno.EIO, f"the store answers {code}")
        return ""

    def sync(self, written: Sequence[str]) -> None:
        """The store answers when it has the bytes."""

    def read(self, block: DiskBlock, into: Sequence[memoryview]) -> None:
        found = self._store.get_buffer(self.name(block))
        if found is None:
            raise BadBlockError(MISSING)
        content = memoryview(found).cast("B")
        check_size(len(content), self.block_bytes)
        first = HEAD_BYTES
        for piece in into:
            piece[:] = content[first : first + len(piece)]
            first += len(piece)
        check_content(content[:HEAD_BYTES], into, self._identity, block.key)

    def has(self, block: DiskBlock) -> bool:
        return self._store.is_exist(self.name(block)) == 1

    def drop_cached(self, block: DiskBlock) -> None:
        """Where it lies is the store's matter."""

    def remove(self, block: DiskBlock) -> None:
        self._store.remove(self.name(block))

    def name(self, block: DiskBlock) -> str:
        return f"diptych/{self._identity.hex()}/{block.tenant}/{name_of(block)}"
