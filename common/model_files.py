"""Names of the files in a model's folder, and how its JSON is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.common.errors import ConfigError

TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE_FILE,
)
"""What decides how text becomes token ids; all but the first may be absent."""


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON file of a model's folder, such as config.json. Raises: ConfigError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("model", str(file), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError("model", str(file), f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("model", str(file), "must hold a JSON object")
    return value


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that hold the model's weights, by name: those of the index, else model.safetensors.

    What is loaded and what is hashed are these. Raises: ConfigError when the index is broken, a file is missing, or an
    adapter lies beside them.
    """
    if (path / ADAPTER_FILE).is_file():  # transformers would apply it
        raise ConfigError("model", str(path), f"holds {ADAPTER_FILE}: adapters are not supported, serve a merged model")
    index = path / INDEX_FILE
    if not index.is_file():
        if (path / SINGLE_FILE).is_file():
            return [path / SINGLE_FILE]
        raise ConfigError(
            "model", str(path), f"weights are missing: no {SINGLE_FILE} and no {INDEX_FILE} in the folder"
        )
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError("model", str(index), f"must map tensor names to files in weight_map: {error!r}") from None
    missing = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if missing or not names:
        raise ConfigError(
            "model", str(path), f"shards of the index are missing: {', '.join(missing) or 'it names none'}"
        )
    return [path / name for name in names]
