"""Read a checkpoint (safetensors, one file or sharded). Strict: every tensor must be there, with its shape and with numbers
in it, and none may be left over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.model_files import weight_files
from diptych.engine.exec.cuda.file_reader import NUM_THREADS, FileReader

_READ = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip
"""What is read by its place in the file; other tensors are taken from the mapped file."""
_LEAST_READ_BYTES = 1 << 20
"""Smaller tensors are taken from the mapped file."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a tensor in its file, in bytes from the file's beginning."""

    begin: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path) -> dict[str, _Place]:
    """Of the tensors of a file that safetensors has opened: it checked the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _READ:
            begin, end = entry["data_offsets"]
            found[name] = _Place(8 + size + begin, end - begin, _READ[entry["dtype"]], tuple(entry["shape"]))
    return found


def _cut_off(path: Path) -> str:
    """The first tensor that a file is too short for, as its header tells; empty: the header cannot tell."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= os.path.getsize(path) else {}
        room = os.path.getsize(path) - 8 - size
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
    beyond = sorted((end, name) for name, end in ends.items() if end > room)
    return f"the file ends before the end of tensor {beyond[0][1]}" if beyond else ""


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = _cut_off(path) or f"not a readable safetensors file: {error}"
        raise ConfigError("model", str(path), reason) from None


class Checkpoint:
    """Implements methods.base.TensorSource over all shards of a folder.

    Args: threads: that read large tensors; 0: they are taken from the mapped file. None: as the device needs it.
    Raises: ConfigError for a folder without safetensors, with a broken index, a broken shard or a tensor in two shards.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, threads: int | None = None) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._shards: dict[str, tuple[Path, Any]] = {}
        self._files: dict[str, Path] = {}
        self._places: dict[str, _Place] = {}
        self._taken: list[tuple[str, Path, torch.dtype, Tensor]] = []
        for path in weight_files(folder):
            file = _open(path)
            names = file.keys()
            for tensor in names:
                if tensor in self._shards:
                    raise ConfigError("model", str(path), f"tensor {tensor} is also in {self._shards[tensor][0].name}")
                self._shards[tensor], self._files[tensor] = (path, file), path
        if threads is None:
            threads = NUM_THREADS if device.type == "cuda" else 0
        self._reader = FileReader(device, num_threads=threads) if threads else None
        if self._reader is not None:
            for path in {path for path, _ in self._shards.values()}:
                self._places.update(_places(path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.clear()
        self._taken.clear()
        if self._reader is not None:
            self._reader.__exit__(kind, error, trace)

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> Tensor:
        """See TensorSource.take. Whether it holds numbers only, `finish` says: on a GPU that costs one sync for all."""
        path, file = self._shards.pop(name, (self._folder, None))
        if file is None:
            raise ConfigError("model", str(self._folder), f"tensor {name} is missing")
        tensor, is_ours = self._read(name, path, file, shape, where)
        floats = tensor.dtype.is_floating_point
        if not floats and not as_stored:
            raise ConfigError("model", str(path), f"tensor {name} holds {tensor.dtype}, not floating-point numbers")
        # No view of the file: it changes when the file is written over, and ends the process when it is cut off.
        tensor = tensor.to(device=self._device, dtype=tensor.dtype if as_stored else self._dtype, copy=not is_ours)
        if floats:
            summed = tensor.float() if as_stored else tensor  # torch adds up no floats of 8 bits
            self._taken.append((name, path, tensor.dtype, summed.sum(dtype=torch.float32)))
        return tensor

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See TensorSource.shape."""
        found = self._shards.get(name)
        return None if found is None else tuple(found[1].get_slice(name).get_shape())

    def file_of(self, name: str) -> str:
        """See TensorSource.file_of."""
        return str(self._files.get(name, self._folder))

    def _read(
        self, name: str, path: Path, file: Any, shape: tuple[int, ...], where: tuple[slice, ...]
    ) -> tuple[Tensor, bool]:
        """Returns: the part of the tensor as stored, and whether it is a copy on the device; otherwise it may be a view of the
        file."""
        place = self._places.get(name)
        spans = [range(*one.indices(size)) for one, size in zip(where, shape, strict=False)]
        divided = [len(span) < size for span, size in zip(spans, shape, strict=False)]
        try:
            found = tuple(file.get_slice(name).get_shape())
            if found != shape:
                asked = f"tensor {name} has shape {found}, where config.json asks for {shape}"
                raise ConfigError("model", str(path), asked)
            if self._reader is None or place is None or place.size < _LEAST_READ_BYTES or any(divided[1:]):
                return (file.get_slice(name)[where] if any(divided) else file.get_tensor(name)), False
            rows = spans[0] if spans else range(shape[0])
            out = torch.empty((len(rows), *shape[1:]), dtype=place.dtype, device=self._device)
            self._reader.read(path, place.begin + rows.start * (place.size // shape[0]), out)
            return out, True
        except (SafetensorError, OSError, EOFError) as error:
            raise ConfigError("model", str(path), f"tensor {name} cannot be read: {error}") from None

    def drop(self, suffixes: Iterable[str]) -> None:
        """Forget tensors that carry nothing new."""
        for name in [name for name in self._shards if name.endswith(tuple(suffixes))]:
            del self._shards[name]

    def leave(self, names: Iterable[str]) -> None:
        """Forget the tensors of other pipeline stages. Args: names: less the last word of a tensor's name."""
        layers = set(names)
        for name in [name for name in self._shards if name.rpartition(".")[0] in layers]:
            del self._shards[name]

    def finish(self) -> None:
        """Raises: ConfigError when tensors are left over, or one that was taken holds NaN or infinity."""
        if self._shards:
            name, (path, _) = min(self._shards.items())
            raise ConfigError("model", str(path), f"tensor {name} is unexpected, one of {len(self._shards)}")
        if self._taken:
            finite = torch.stack([total for *_, total in self._taken]).isfinite().tolist()
            for (name, path, dtype, _), good in zip(self._taken, finite, strict=True):
                if not good and not _all_numbers(name, path, dtype):
                    kind = str(dtype).removeprefix("torch.")
                    raise ConfigError("model", str(path), f"tensor {name} holds NaN or infinity in {kind}")


def _all_numbers(name: str, path: Path, dtype: torch.dtype) -> bool:
    """The sum alone may have overflowed."""
    tensor: Tensor = _open(path).get_tensor(name)
    return bool(tensor.to(dtype).float().isfinite().all())
