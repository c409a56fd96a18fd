"""What the files of a checkpoint hold: size and BLAKE3 of each, and the fingerprint that follows from them.

A folder may bring its own manifest (`diptych-manifest.json`, written by `diptych model FOLDER --manifest`). Files that
differ from it are then never served.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.model_files import INDEX_FILE, TOKENIZER_FILES, weight_files

MANIFEST_FILE = "diptych-manifest.json"
MANIFEST_VERSION = 1
FINGERPRINT_BYTES = 16
_MOST_BYTES = 16 << 20
"""Of a manifest file: about 100,000 shards."""
_CONFIG = "config.json"
_BESIDE = (_CONFIG, "generation_config.json", INDEX_FILE, *TOKENIZER_FILES)
_WEIGHTS = ".safetensors"


class FileContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Args: blake3: 64 hexadecimal digits over the whole file."""

    size_bytes: int
    blake3: str


class Manifest(msgspec.Struct, frozen=True):
    """Args: files: by path in the folder; all that a worker or a router reads of the folder."""

    files: dict[str, FileContent]

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over names and content of config.json and the weights. The tokenizer has its own
        revision (common/text/revision.py)."""
        digest = blake3(b"diptych weights fingerprint v1")
        for name in sorted(name for name in self.files if name == _CONFIG or name.endswith(_WEIGHTS)):
            for part in (name, self.files[name].blake3):
                digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
        return digest.hexdigest(FINGERPRINT_BYTES)

    def encode(self) -> bytes:
        """The content of a manifest file."""
        body = {"version": MANIFEST_VERSION, "fingerprint": self.fingerprint, "files": self.files}
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


class _ManifestFile(msgspec.Struct, frozen=True):
    version: int
    fingerprint: str
    files: dict[str, FileContent]


def checkpoint_files(folder: Path) -> list[str]:
    """Names of the files that a manifest covers, weights last. Raises: ConfigError when config.json or weights are missing."""
    if not (folder / _CONFIG).is_file():
        raise ConfigError("model", str(folder), f"must hold a {_CONFIG}")
    return [*(name for name in _BESIDE if (folder / name).is_file()), *(file.name for file in weight_files(folder))]


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's own manifest; None: it has none. Raises: ConfigError when it is broken, or written by another version."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError("model", str(path), f"must be at most {_MOST_BYTES} bytes")
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError("model", str(path), f"cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(raw, type=_ManifestFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"not a manifest: {error}") from None
    if found.version != MANIFEST_VERSION:
        raise ConfigError("model", str(path), f"version {found.version}, where {MANIFEST_VERSION} is known")
    manifest = Manifest(found.files)
    if manifest.fingerprint != found.fingerprint:
        raise ConfigError("model", str(path), "its fingerprint is not that of its files: it was edited or cut off")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Appears whole or not at all. Raises: ConfigError when the folder cannot be written."""
    path, part = folder / MANIFEST_FILE, folder / f".{MANIFEST_FILE}.{os.getpid()}"
    try:
        part.write_bytes(manifest.encode())
        part.replace(path)
    except OSError as error:
        raise ConfigError("model", str(path), f"cannot be written: {error.strerror}") from error
    return path


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Before anything is read. Raises: ConfigError naming a file of another size, one too many or a missing one."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name in sorted(manifest.files.keys() | sizes.keys()):
        if name not in manifest.files:
            raise ConfigError("model", str(folder / name), f"is not in {MANIFEST_FILE}")
        wanted = manifest.files[name].size_bytes
        if name not in sizes:
            raise ConfigError("model", str(folder / name), f"is missing; {MANIFEST_FILE} names it")
        if sizes[name] != wanted:
            raise ConfigError("model", str(folder / name), f"has {sizes[name]} bytes; {MANIFEST_FILE} says {wanted}")


def check_contents(folder: Path, manifest: Manifest, found: Manifest) -> None:
    """Raises: ConfigError naming a file of `found` whose content is not the manifest's."""
    for name, content in found.files.items():
        wanted = manifest.files.get(name)
        if wanted is None:
            raise ConfigError("model", str(folder / name), f"is not in {MANIFEST_FILE}")
        if content != wanted:
            rule = f"its content has BLAKE3 {content.blake3}; {MANIFEST_FILE} says {wanted.blake3}"
            raise ConfigError("model", str(folder / name), rule)


def hash_beside_weights(folder: Path) -> Manifest:
    """Of config.json and the tokenizer's files, where they are: for a router, which reads no weights."""
    names = [name for name in _BESIDE if (folder / name).is_file()]
    contents = {name: (folder / name).read_bytes() for name in names}
    return Manifest({name: FileContent(len(raw), blake3(raw).hexdigest()) for name, raw in contents.items()})
