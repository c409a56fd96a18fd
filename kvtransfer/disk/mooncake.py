"""Blocks of KV in a Mooncake store: memory, and disks, of several machines, under a master that knows where what is.

    diptych/IDENTITY/TENANT/KEY-INDEX     as a file (block_file.py)

Every worker of one identity reads what any of them has written. The store lets go of blocks by itself.
Package: mooncake-transfer-engine, or its build without CUDA.
"""

from __future__ import annotations

import errno
import importlib
import socket
from collections.abc import Sequence
from typing import Any, Protocol

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
from diptych.kvtransfer.disk.store_address import SETTING, StoreAddress

CONNECT_S = 5.0
_FULL = -200
"""The store's number for: no segment has room."""


class MooncakeApi(Protocol):
    """What is used of a MooncakeDistributedStore."""

    def put_parts(self, key: str, *parts: memoryview) -> int: ...

    def get_buffer(self, key: str) -> Any: ...

    def is_exist(self, key: str) -> int: ...

    def remove(self, key: str, force: bool) -> int: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def close(self) -> int: ...


def check(url: str) -> None:
    """Whether there is the package, and somebody answers at the master's address: before anything that takes long.

    Raises: ConfigError. Waits for CONNECT_S at most, but for names that are looked up."""
    address = StoreAddress.parse(url)
    _package(url)
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_S).close()
    except OSError as error:
        where = host_port(address.host, address.port)
        raise ConfigError(SETTING, url, f"no master can be reached at {where}: {error.strerror or error}") from None


def connect(url: str, block_bytes: int) -> MooncakeApi:
    """A client of the store. Raises: ConfigError."""
    check(url)  # the package's own attempts take a minute and a half
    address = StoreAddress.parse(url)
    store = _package(url).MooncakeDistributedStore()
    code = store.setup(
        address.own_host, address.metadata, address.segment_bytes, max(16 << 20, 16 * block_bytes), address.protocol,
        address.device, host_port(address.host, address.port),
    )  # fmt: skip
    if code:
        raise ConfigError(SETTING, url, f"the store cannot be used: it answers {code}")
    found: MooncakeApi = store
    return found


def purge(url: str, tenant: str | None = None) -> int:
    """Remove the blocks of every identity, or those of one tenant, from a store; also while workers run. Blocking.

    Args: tenant: as in DiskBlock. Returns: blocks. Raises: ConfigError."""
    store = connect(url, 0)
    try:
        count = store.remove_by_regex(f"^diptych/[0-9a-f]+/{tenant or '[0-9a-f]+'}/", True)
    finally:
        store.close()
    if count < 0:
        raise ConfigError(SETTING, url, f"cannot be purged: the store answers {count}")
    return count


def _package(url: str) -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(SETTING, url, f"needs the package mooncake-transfer-engine: {error}") from None


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
        # By force: what was read a moment ago is kept otherwise, and would stay as it is when it is written again.
        self._store.remove(self.name(block), True)

    def name(self, block: DiskBlock) -> str:
        return f"diptych/{self._identity.hex()}/{block.tenant}/{name_of(block)}"
