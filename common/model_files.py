"""Names of the files in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from diptych.common.errors import ConfigError

TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE_FILE,
)
"""What decides how text becomes token ids; all but the first may be absent."""


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
