"""Revision of a tokenizer's content, equal on two hosts with the same files, whatever their times and paths."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.model_files import TOKENIZER_FILES

_REVISION_BYTES = 16


def tokenizer_revision(path: Path) -> str:
    """32 hexadecimal digits over tokenizer.json, its configuration and the chat template. Raises: ConfigError when
    tokenizer.json is missing."""
    digest = blake3(b"diptych tokenizer revision v1")
    _add(digest, "tokenizer.json", _read(path / "tokenizer.json"))
    for name in TOKENIZER_FILES[1:]:
        if (path / name).is_file():
            _add(digest, name, _read(path / name))
    return digest.hexdigest(_REVISION_BYTES)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("model", str(file.parent), f"{file.name} cannot be read: {error.strerror}") from error


def _add(digest: blake3, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
