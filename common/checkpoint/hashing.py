"""Hashes a checkpoint's files, on a thread beside the one that loads them.

    CheckpointHash(folder)   sizes against the folder's own manifest; a thread reads and hashes
    ... load the weights ...
    .manifest()              waits for the hashes; content against the manifest; no file changed meanwhile

The hashing thread reads each file from its beginning to its end, and the loader finds it in the page cache: the disk is
read once. BLAKE3 hashes 3 GB/s on one core with AVX-512, faster than weights are loaded, so there is one thread.

Hashes are kept in the cache folder with size, mtime and inode of each file, and are used again while these are the same
(`changed`). `always` hashes everything at every start: it finds content that changed behind the same three facts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from diptych.common.checkpoint.manifest import (
    FileContent,
    Manifest,
    check_contents,
    check_sizes,
    checkpoint_files,
    hash_beside_weights,
    read_manifest,
    write_manifest,
)
from diptych.common.checkpoint.modes import ALWAYS, CHANGED, VERIFY_MODES
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir

LEAST_KEPT_BYTES = 64 << 20
"""Smaller checkpoints are hashed at every start: that takes less than 0.1 s, and leaves no file behind."""
_PIECE_BYTES = 8 << 20
_UNSETTLED_NS = 2_000_000_000
"""A file younger than this may change again without another mtime: its hash is not kept."""
_LOCK_WAIT_S = 600.0
_LOCK_POLL_S = 0.05


class _Kept(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    inode: int
    blake3: str


class _Cache(msgspec.Struct, frozen=True):
    folder: str
    files: dict[str, _Kept]


class _StoppedError(Exception):
    pass


def model_fingerprint(folder: Path) -> str:
    """`Manifest.fingerprint` of the folder, by kept hashes where its files did not change. Raises: ConfigError."""
    with CheckpointHash(folder) as hashing:
        return hashing.manifest().fingerprint


def renew_manifest(folder: Path) -> Manifest:
    """Hash all files and write the folder's manifest, whatever it said before. Raises: ConfigError."""
    with CheckpointHash(folder, verify=ALWAYS, check_own=False) as hashing:
        manifest = hashing.manifest()
    write_manifest(folder, manifest)
    return manifest


def expected_fingerprint(folder: Path) -> str:
    """The fingerprint that workers of a router's model folder must have: of the folder's manifest, which needs no weights
    here, else of its weights; "" where there are none.

    Raises: ConfigError for a broken manifest, or when config.json or the tokenizer differ from it.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        check_contents(folder, manifest, hash_beside_weights(folder))
        return manifest.fingerprint
    try:
        checkpoint_files(folder)
    except ConfigError:
        return ""
    return model_fingerprint(folder)


class CheckpointHash:
    """Hashes one folder from construction on; use as a context manager, which ends the thread.

    Args:
        verify: one of VERIFY_MODES.
        check_own: against the folder's own manifest.
        cache: folder of kept hashes; None: below the XDG cache folder.
        least_kept_bytes: hashes of smaller checkpoints are not kept.
    Raises: ConfigError when the folder holds no checkpoint, or files of other sizes than its manifest says.
    """

    def __init__(
        self,
        folder: Path,
        *,
        verify: str = CHANGED,
        check_own: bool = True,
        cache: Path | None = None,
        least_kept_bytes: int = LEAST_KEPT_BYTES,
    ) -> None:
        if verify not in VERIFY_MODES:
            raise ConfigError("verify_weights", verify, f"must be one of {', '.join(VERIFY_MODES)}")
        self._folder, self._verify = folder, verify
        self._names = checkpoint_files(folder)
        self._own = read_manifest(folder) if check_own else None
        if self._own is not None:
            check_sizes(folder, self._own, self._names)
        self._before = {name: (folder / name).stat() for name in self._names}
        keeps = sum(found.st_size for found in self._before.values()) >= least_kept_bytes
        self._kept_at = _kept_file(folder, cache) if keeps else None
        self._contents: dict[str, FileContent] = {}
        self.hashed_bytes = 0
        """Read and hashed, rather than known from an earlier start."""
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-hash", daemon=True)
        self._thread.start()

    def __enter__(self) -> CheckpointHash:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def has_own_manifest(self) -> bool:
        return self._own is not None

    def manifest(self) -> Manifest:
        """Wait for the hashes. Call it after the weights were loaded.

        Raises: ConfigError naming a file that cannot be read, differs from the folder's manifest, or changed since the
            construction.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        for name in self._names:
            if not _same(self._before[name], _stat(self._folder / name)):
                raise _changed(self._folder / name)
        found = Manifest(self._contents)
        if self._own is not None:
            check_contents(self._folder, self._own, found)
        return found

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                if self._kept_at is not None and self._verify != ALWAYS:
                    # Workers of one host start together: one hashes, the others then find its hashes.
                    stack.enter_context(_lock(self._kept_at.with_suffix(".lock"), self._stop))
                self._hash_all()
        except _StoppedError:
            pass
        except OSError as error:
            self._error = ConfigError("model", str(error.filename or self._folder), f"cannot be read: {error.strerror}")
        except Exception as error:  # raised again in manifest()
            self._error = error

    def _hash_all(self) -> None:
        began_ns = time.time_ns()
        kept = {} if self._kept_at is None else _read_kept(self._kept_at)
        for name in self._names:
            now, known = self._before[name], kept.get(name)
            if known is not None and self._usable(name, known, now):
                self._contents[name] = FileContent(known.size_bytes, known.blake3)
            else:
                self._contents[name] = FileContent(now.st_size, self._hash(self._folder / name, now))
                self.hashed_bytes += now.st_size
        if self._kept_at is not None and self.hashed_bytes:
            settled = [name for name in self._names if self._before[name].st_mtime_ns < began_ns - _UNSETTLED_NS]
            self._keep(self._kept_at, settled)

    def _usable(self, name: str, known: _Kept, now: os.stat_result) -> bool:
        """A kept hash that the manifest contradicts is taken again before anything is refused: a file can be repaired in
        place, behind the same size, mtime and inode."""
        contradicted = self._own is not None and self._own.files[name].blake3 != known.blake3
        return self._verify != ALWAYS and _is_of(known, now) and not contradicted

    def _hash(self, file: Path, expected: os.stat_result) -> str:
        digest, piece = blake3(), memoryview(bytearray(min(_PIECE_BYTES, max(1, expected.st_size))))
        with file.open("rb", buffering=0) as source:
            if not _same(expected, os.fstat(source.fileno())):
                raise _changed(file)
            while num_bytes := source.readinto(piece):
                if self._stop.is_set():
                    raise _StoppedError
                digest.update(piece[:num_bytes])
        return digest.hexdigest()

    def _keep(self, path: Path, names: Sequence[str]) -> None:
        found = {}
        for name in names:
            stat = self._before[name]
            found[name] = _Kept(stat.st_size, stat.st_mtime_ns, stat.st_ino, self._contents[name].blake3)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        with contextlib.suppress(OSError):  # a cache folder that cannot be written: the next start hashes again
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(_Cache(str(self._folder.resolve()), found)))
            part.replace(path)


def _kept_file(folder: Path, cache: Path | None) -> Path:
    name = blake3(os.fsencode(folder.resolve())).hexdigest(16)
    return (cache or cache_dir() / "weight-hashes") / f"{name}.json"


def _read_kept(path: Path) -> dict[str, _Kept]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Cache).files
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _changed(file: Path) -> ConfigError:
    return ConfigError("model", str(file), "changed while it was loaded")


def _is_of(known: _Kept, found: os.stat_result) -> bool:
    return (known.size_bytes, known.mtime_ns, known.inode) == (found.st_size, found.st_mtime_ns, found.st_ino)


def _same(one: os.stat_result, other: os.stat_result | None) -> bool:
    return other is not None and all(
        getattr(one, name) == getattr(other, name) for name in ("st_size", "st_mtime_ns", "st_ino")
    )


@contextlib.contextmanager
def _lock(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the exclusive lock on `path`. Without it where it cannot be had (no locks here, or after 10 minutes): that costs
    hashing twice, nothing else. Raises: _StoppedError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(_LOCK_POLL_S):
                    raise _StoppedError from None
            except OSError:
                break
        yield
