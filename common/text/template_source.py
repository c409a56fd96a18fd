"""A model's chat templates as its folder has them, and the variables that they are given. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.common.errors import ConfigError
from diptych.common.model_files import TOOL_TEMPLATE_FILE

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Template text of the model folder `path`: chat_template.jinja, else tokenizer_config.json; None: it has none."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one without tools
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ConfigError("chat_template", type(source).__name__, "must be text")
    return source


def load_tool_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The separate template that some models have for tools; None: the model has one template."""
    file = path / TOOL_TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    named = tokenizer_config.get("chat_template")
    if not isinstance(named, list) or (path / "chat_template.jinja").is_file():
        return None
    source = next((entry.get("template") for entry in named if entry.get("name") == "tool_use"), None)
    return source if isinstance(source, str) else None


def special_token_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Template variables such as bos_token and eos_token; tokens that are not set are left out."""
    found = {}
    for name in _TOKEN_NAMES:
        value = tokenizer_config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
