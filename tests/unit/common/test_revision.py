from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.model_files import weight_files
from diptych.common.text.revision import tokenizer_revision


def write_weights(file: Path, data: bytes, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def folder(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    target = shutil.copytree(make_model(), tmp_path / "model")
    write_weights(target / "model.safetensors", bytes(range(256)) * 64)
    return target


def test_a_copy_with_other_times_has_the_same_revision(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    os.utime(copy / "tokenizer.json", (1, 1))
    assert tokenizer_revision(copy) == tokenizer_revision(folder)
    assert len(tokenizer_revision(folder)) == 32


def test_the_chat_template_belongs_to_the_tokenizer(folder: Path) -> None:
    before = tokenizer_revision(folder)
    (folder / "chat_template.jinja").write_text("other")
    assert tokenizer_revision(folder) != before


def test_the_index_names_the_weights(folder: Path) -> None:
    write_weights(folder / "consolidated.safetensors", b"not read")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors", "c": "a.safetensors", "d": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"a\.safetensors, b\.safetensors"):
        weight_files(folder)
    write_weights(folder / "a.safetensors", b"1")
    write_weights(folder / "b.safetensors", b"2")
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    index.write_text("[]")
    with pytest.raises(ConfigError, match="weight_map"):
        weight_files(folder)


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer_revision(tmp_path)
