"""One worker's folder of blocks: a file for each, in a folder for each tenant. Blocking; no threads, no account of what is there.

    ROOT/WORKER/lock                          held while a process uses the folder
    ROOT/WORKER/IDENTITY/TENANT/KEY-INDEX     a block (block_file.py)
    ROOT/WORKER/IDENTITY/TENANT/.KEY          is being written

IDENTITY is a hash over all that decides the values and the layout of the KV: weights, numerics, KV format, the cluster's key.
A file is written under another name, synced, and renamed, so a name stands for a whole block. The head has identity and key,
and a checksum over head and block: a file that was damaged, cut, or put there from elsewhere is not taken for the block. Its
modification time is that of its last use.

Folders have mode 0700 and files 0600. Whoever may read them can read the tenants' prompts from them, as from memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from urllib.parse import quote

from diptych.common.errors import ConfigError
from diptych.engine.disk_messages import DiskBlock
from diptych.kvtransfer.disk.block_file import (
    HEAD_BYTES,
    MISSING,
    PROBE,
    BadBlockError,
    block_named,
    check_content,
    check_size,
    head_of,
    is_ours,
    last_leaves_first,
    name_of,
    one_of_each_key,
    unfinished_name,
    why,
)
from diptych.kvtransfer.disk.keeper import Found

SETTING = "disk_kv_dir"
_HASH = re.compile(r"[0-9a-f]{32}")
"""Name of an identity's folder, and of a tenant's."""
_LOCK = "lock"
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENOENT)
"""What has a name is no file, or what has its folder's name is no folder: of one block, or of one tenant's."""


class BlockFolder:
    """The files of one identity: a BlockKeeper.

    Args:
        block_bytes: of every block.
    """

    is_shared = False

    def __init__(self, root: Path, worker_id: str, identity: bytes, block_bytes: int) -> None:
        self._worker = root / quote(worker_id, safe="")
        self._root, self._identity, self.block_bytes = root, identity, block_bytes
        self._folder = self._worker / identity.hex()
        self._lock = -1
        self.before_rename: Callable[[str], None] = lambda name: None
        """Tests hold a write here."""

    # ---- start and end ----

    def open(self) -> Found:
        """Take the folder, and remove what a crash has left and what other models have written. Raises: ConfigError when another
        process uses it, or it cannot be used."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._root.stat().st_uid not in (os.geteuid(), 0):
                raise ConfigError(SETTING, str(self._root), "belongs to another user, who may put links into it")
            self._take()
            others = [one for one in self._worker.iterdir() if _HASH.fullmatch(one.name) and one != self._folder]
            return self._scan(sum(map(_remove_identity, others)))
        except BlockingIOError:
            raise ConfigError(SETTING, str(self._worker), "another process uses it") from None
        except OSError as error:
            raise ConfigError(SETTING, str(error.filename or self._root), f"cannot be used: {error.strerror}") from None

    def close(self) -> None:
        """Idempotent. Nothing is written or removed afterwards."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self) -> None:
        """Our folders, and the lock. Raises: ConfigError when others may have put them there; BlockingIOError: another process
        has the lock; OSError."""
        for folder in (self._worker, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise ConfigError(SETTING, str(folder), "is a link")
            if folder.stat().st_uid != os.geteuid():
                raise ConfigError(SETTING, str(folder), "belongs to another user")
            folder.chmod(0o700)
        lock = os.open(self._worker / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self.close()
        self._lock = lock

    def _hold(self) -> None:
        """The lock is that of the folder which has our name now: a folder that somebody removed takes its lock along, and another
        process may have made it anew. What lies in a folder that is taken again is in nobody's account, and is removed. Raises:
        OSError: the folder is another's."""
        mine = os.fstat(self._lock)
        try:
            if os.path.samestat(mine, os.stat(self._worker / _LOCK)):
                return
        except FileNotFoundError:
            pass
        try:
            self._take()
        except BlockingIOError:
            raise OSError(errno.EBUSY, f"another process has taken {self._worker}") from None
        except ConfigError as error:
            raise OSError(errno.EPERM, str(error)) from None
        for folder in _tenants(self._folder):
            _remove_files(folder)

    def _scan(self, other_bytes: int) -> Found:
        found: list[tuple[float, DiskBlock]] = []
        damaged: Counter[str] = Counter()
        for folder in _tenants(self._folder):
            for path in list(folder.iterdir()):
                block, status = block_named(path.name, folder.name), _stat(path)
                if status is None:
                    continue  # purged meanwhile
                is_file = S_ISREG(status.st_mode)
                whole = is_file and status.st_size == HEAD_BYTES + self.block_bytes
                if block is not None and whole and folder.name != PROBE:
                    found.append((status.st_mtime, block))
                    continue
                ours = is_ours(path.name)
                damaged["foreign" if not (ours and is_file) else "unfinished" if block is None else "truncated"] += 1
                if ours:
                    _unlink(str(path))
        blocks, others = one_of_each_key(last_leaves_first(found))
        for block in others:  # the account is by key: a second file would be in none
            damaged["foreign"] += 1
            self.remove(block)
        return Found(blocks, dict(damaged), other_bytes)

    # ---- blocks ----

    def write(self, block: DiskBlock, pieces: Sequence[memoryview]) -> str:
        """Args: pieces: of block_bytes together. Returns: its folder, which is to be synced. Raises: BadBlockError: what is no
        file has a name that this block needs; OSError. Nothing is there then."""
        self._hold()
        folder = f"{self._folder}/{block.tenant}"
        temporary = f"{folder}/{unfinished_name(block)}"
        try:
            fd = self._create(temporary, folder)
            try:
                _write(fd, [memoryview(head_of(self._identity, block.key, pieces)), *pieces])
                os.fsync(fd)
            finally:
                os.close(fd)
            self.before_rename(temporary)
            os.rename(temporary, self._path(block))
        except OSError as error:
            with contextlib.suppress(OSError):
                _unlink(temporary)
            if error.errno in _NO_FILE:
                with contextlib.suppress(OSError):
                    _unlink(self._path(block))  # an empty folder goes
                raise BadBlockError(why(error)) from None
            raise
        return folder

    def sync(self, folders: Sequence[str]) -> None:
        """Make the names in these folders last. Raises: OSError."""
        for folder in folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def read(self, block: DiskBlock, into: Sequence[memoryview]) -> None:
        """Fill `into`, pieces of block_bytes together. Raises: BadBlockError; they hold anything then."""
        head = memoryview(bytearray(HEAD_BYTES))
        try:
            # What is no file must not hold the thread: opening a pipe waits for a writer.
            fd = os.open(self._path(block), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                check_size(os.fstat(fd).st_size, self.block_bytes)
                _read(fd, [head, *into])
                with contextlib.suppress(
                    OSError
                ):  # on a disk that takes no writes any more its blocks are as good as before
                    os.utime(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise BadBlockError(MISSING) from None
        except OSError as error:
            raise BadBlockError(why(error)) from None
        check_content(head, into, self._identity, block.key)

    def has(self, block: DiskBlock) -> bool:
        """Whether there is anything under its name."""
        return os.path.lexists(self._path(block))

    def drop_cached(self, block: DiskBlock) -> None:
        """The next read of it is from the disk, not from memory. Raises: OSError."""
        fd = os.open(self._path(block), os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def remove(self, block: DiskBlock) -> None:
        """One that is not there is no error. Raises: OSError."""
        self._hold()
        _unlink(self._path(block))

    def _path(self, block: DiskBlock) -> str:
        return f"{self._folder}/{block.tenant}/{name_of(block)}"

    @staticmethod
    def _create(path: str, folder: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # the tenant's first block, or somebody removed its folder
            for made in (os.path.dirname(folder), folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(made, 0o700)
            return os.open(path, flags, 0o600)


# ---- without a worker ----


@dataclass(frozen=True, slots=True)
class TenantBlocks:
    """The blocks of one tenant's folder. `last_used`: seconds since the epoch."""

    worker: str
    identity: str
    tenant: str
    num_blocks: int
    num_bytes: int
    last_used: float


def tenants_in(root: Path) -> Iterator[TenantBlocks]:
    """What lies under the root of all workers' folders. Raises: OSError."""
    for folder in _tenant_folders(root):
        files = [status for path in folder.iterdir() if is_ours(path.name) and (status := _file(path)) is not None]
        if files:
            yield TenantBlocks(
                folder.parent.parent.name, folder.parent.name, folder.name, len(files),
                sum(status.st_size for status in files), max(status.st_mtime for status in files),
            )  # fmt: skip


def purge(root: Path, tenant: str | None = None) -> tuple[int, int]:
    """Remove all blocks, or those of one tenant, of every worker; also while workers run: they compute those blocks again.

    Args: tenant: as in DiskBlock.
    Returns: files, and their bytes. Raises: OSError.
    """
    files = size = 0
    for folder in _tenant_folders(root):
        if tenant is None or folder.name == tenant:
            some, num_bytes = _remove_files(folder)
            files, size = files + some, size + num_bytes
    return files, size


def _tenant_folders(root: Path) -> Iterator[Path]:
    for identity in sorted(root.glob("*/*")):
        if _HASH.fullmatch(identity.name) and identity.is_dir() and not identity.is_symlink():
            yield from _tenants(identity)


def _tenants(identity: Path) -> list[Path]:
    return sorted(
        one for one in identity.iterdir() if _HASH.fullmatch(one.name) and one.is_dir() and not one.is_symlink()
    )


# ---- files ----


def _write(fd: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


def _read(fd: int, parts: list[memoryview]) -> None:
    while parts:
        count = os.readv(fd, parts)
        if not count:
            raise BadBlockError("truncated")
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]


def _remove_files(folder: Path) -> tuple[int, int]:
    """Of a tenant: what is a block, or was to become one. Returns: files, and their bytes. Raises: OSError."""
    files = size = 0
    for path in filter(lambda path: is_ours(path.name), list(folder.iterdir())):
        status = _file(path)
        if _unlink(str(path)) and status is not None:
            files, size = files + 1, size + status.st_size
    return files, size


def _file(path: Path) -> os.stat_result | None:
    """None: it is gone, or no file."""
    status = _stat(path)
    return status if status is not None and S_ISREG(status.st_mode) else None


def _stat(path: Path) -> os.stat_result | None:
    """None: it is gone."""
    try:
        return path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _unlink(path: str) -> bool:
    """Remove a file, or what else has its name; of a folder only an empty one: what is in it is not ours. Returns: whether it is
    removed now. Raises: OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except (IsADirectoryError, PermissionError):  # POSIX says the second one
        if not os.path.isdir(path):
            raise
        try:
            os.rmdir(path)
        except OSError:
            return False
    return True


def _remove_identity(identity: Path) -> int:
    """The files of another identity, and its folders if nothing else is in them. Returns: bytes."""
    size = sum(_remove_files(folder)[1] for folder in _tenants(identity))
    for empty in (*_tenants(identity), identity):
        with contextlib.suppress(OSError):
            empty.rmdir()
    return size
