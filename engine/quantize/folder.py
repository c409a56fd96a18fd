"""The folder that is written: safetensors with an index where there are several, config.json, and what lies beside."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.model_files import INDEX_FILE, SINGLE_FILE, TOKENIZER_FILES, weight_files

MOST_FILE_BYTES = 4 << 30
_BESIDE = (
    *TOKENIZER_FILES, "added_tokens.json", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.model", "vocab.json",
)  # fmt: skip
"""Copied as they are. A manifest of the source's content is not among them: it would refuse the new weights."""
_LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")


def check_new(out: Path) -> None:
    """Raises: ConfigError when there is something of that name."""
    if out.exists() or out.is_symlink():
        raise ConfigError("out", str(out), "exists already: name a folder that does not")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` when the body ends, and is deleted when it is left by an exception, with the parents
    that were made for it.

    Raises: ConfigError when there is something of that name, or it cannot be created.
    """
    check_new(out)
    made = [parent for parent in out.absolute().parents if not parent.exists()]
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.absolute().parent))
    except OSError as error:
        _remove_empty(made)
        raise ConfigError("out", str(out), f"cannot be created: {error.strerror or error}") from None
    try:
        yield work
        work.chmod(0o755)  # mkdtemp's are for their owner only
        try:
            work.rename(out)
        except OSError as error:  # somebody made it meanwhile
            raise ConfigError("out", str(out), f"cannot be created: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Args: folders: the innermost first. One that holds anything, or is gone, stays as it is, and so do those around it."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


class WeightWriter:
    """Tensors into safetensors files of a bounded size.

    Args: most_bytes: of one file, where a tensor is not larger.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_FILE_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises: ConfigError naming `out` when the disk takes no more."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._most_bytes:
            self._write()
        self._waiting[name] = tensor.detach().cpu().contiguous()
        self._waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what waits, and the index. Raises: as `add`."""
        self._write()
        if len(self._names) == 1:
            self._part(0).rename(self._folder / SINGLE_FILE)
            return
        files = [f"model-{i + 1:05d}-of-{len(self._names):05d}.safetensors" for i in range(len(self._names))]
        for i, file in enumerate(files):
            self._part(i).rename(self._folder / file)
        places = {name: file for file, names in zip(files, self._names, strict=True) for name in names}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        write_json(self._folder / INDEX_FILE, index)

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}"

    def _write(self) -> None:
        path = self._part(len(self._names))
        try:
            save_file(self._waiting, path, metadata={"format": "pt"})
            path.chmod(0o644)  # the library's are for their owner only
        except Exception as error:  # the library's own for a full disk
            raise ConfigError("out", str(self._folder), f"cannot be written: {error}") from None
        self._names.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint that was opened before, in the dtype in which it is stored."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                yield name, file.get_tensor(name)


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer, chat templates, sampling defaults and licenses."""
    found = [source / name for name in _BESIDE] + [file for one in _LICENSES for file in sorted(source.glob(one))]
    for file in found:
        if file.is_file():
            to = target / file.relative_to(source)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, to)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
