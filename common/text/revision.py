"""Revisions of a model's and a tokenizer's content: equal on two hosts with the same files, whatever their times and
paths.

Reading all weights would take seconds at every start. So the revision covers their size, header (names, shapes, dtypes,
offsets) and samples spread evenly over the file: enough to distinguish two models, fine-tunes or conversions. It does
not detect edits between the samples.
"""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.text.chat_template import TOOL_TEMPLATE_FILE

_REVISION_BYTES = 16
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE_FILE,
)


def model_revision(path: Path) -> str:
    """32 hexadecimal digits over config.json and the weights that a loader of `path` reads. Raises: ConfigError when
    config.json or weights are missing or a weight file is not safetensors."""
    digest = blake3(b"diptych model revision v1")
    _add(digest, "config.json", _read(path / "config.json"))
    for file in weight_files(path):
        _add(digest, file.name, _weights_identity(file))
    return digest.hexdigest(_REVISION_BYTES)


def tokenizer_revision(path: Path) -> str:
    """32 hexadecimal digits over tokenizer.json, its configuration and the chat template. Raises: ConfigError when
    tokenizer.json is missing."""
    digest = blake3(b"diptych tokenizer revision v1")
    _add(digest, "tokenizer.json", _read(path / "tokenizer.json"))
    for name in _TOKENIZER_FILES[1:]:
        if (path / name).is_file():
            _add(digest, name, _read(path / name))
    return digest.hexdigest(_REVISION_BYTES)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the model, by name: those of the index, else model.safetensors, else all."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError("model", str(index), "must map tensor names to files in weight_map") from error
        files = [path / name for name in names]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError("model", str(path), f"weights are missing: {', '.join(missing) or '*.safetensors'}")
    return files


def _weights_identity(file: Path) -> bytes:
    size = file.stat().st_size
    digest = blake3(size.to_bytes(8, "little"))
    with file.open("rb") as source:
        header_size = int.from_bytes(source.read(8), "little")
        if not 2 <= header_size <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError("model", str(file), "not a safetensors file")
        digest.update(source.read(header_size))
        first, last = 8 + header_size, max(8 + header_size, size - _SAMPLE_BYTES)
        for i in range(_NUM_SAMPLES):
            source.seek(first + (last - first) * i // (_NUM_SAMPLES - 1))
            digest.update(source.read(_SAMPLE_BYTES))
    return digest.digest()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("model", str(file.parent), f"{file.name} cannot be read: {error.strerror}") from error


def _add(digest: blake3, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
