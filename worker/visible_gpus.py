"""GPUs of this machine that CUDA shows, and how two of them are connected, by NVML: nothing is allocated on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from diptych.common.errors import ConfigError

NVLINK, PCIE, OTHER_NODE = "NVLink", "PCIe", "PCIe between NUMA nodes"
LINKS = ("", NVLINK, PCIE, OTHER_NODE)
"""How two GPUs are connected, the best first; empty: it is one GPU, or NVML does not say."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `visible`: its entry in CUDA_VISIBLE_DEVICES. `uuid`: NVML's name of it."""

    visible: str
    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""


Links = Mapping[frozenset[str], str]
"""UUIDs of two GPUs -> how they are connected; what NVML does not say is missing."""


@contextmanager
def _nvml() -> Iterator[Any]:
    """Raises: ConfigError, in one sentence, when NVML cannot be used."""
    try:
        import pynvml
    except ImportError:
        raise ConfigError(
            "device", "cuda", "finding GPUs needs the package nvidia-ml-py, which is not installed"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError("device", "cuda", f"no CUDA GPU here: NVML says {error}; --device cpu needs none") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise ConfigError("device", "cuda", f"NVML cannot list the GPUs here: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def find_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """GPUs in CUDA_VISIBLE_DEVICES, in its order; all if it is not set. Raises: ConfigError, in one sentence, when there is
    none."""
    with _nvml() as nvml:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
            found.append(Gpu(str(index), name, int(memory.total), int(memory.free), uuid))
    return choose_visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def choose_visible(found: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects. `visible`: CUDA_VISIBLE_DEVICES; None: not set. Raises: ConfigError when none
    is left."""
    if visible is None:
        chosen = list(found)
    else:
        chosen = []
        for entry in (part.strip() for part in visible.split(",")):
            match = [
                gpu for gpu in found if entry == gpu.visible or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))
            ]
            if not match:
                break  # as CUDA does: entries after an invalid one are ignored
            chosen.append(replace(match[0], visible=entry))
    if not chosen:
        seen = f"CUDA_VISIBLE_DEVICES={visible} leaves none of {len(found)}" if visible is not None else "there is none"
        raise ConfigError("device", "cuda", f"no CUDA GPU here: {seen}; --device cpu needs none")
    return chosen


def find_links(gpus: Sequence[Gpu]) -> Links:
    """How each two of them are connected. Raises: ConfigError when NVML cannot be used."""
    uuids = list(dict.fromkeys(gpu.uuid for gpu in gpus))
    with _nvml() as nvml:
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        pairs = [(one, other) for index, one in enumerate(uuids) for other in uuids[index + 1 :]]
        links = {frozenset(pair): _link(nvml, *(handles[uuid] for uuid in pair)) for pair in pairs}
    return {pair: link for pair, link in links.items() if link}


def _link(nvml: Any, one: Any, other: Any) -> str:
    """Empty: NVML does not say."""
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return NVLINK
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except nvml.NVMLError:
        return ""
    return OTHER_NODE if level == nvml.NVML_TOPOLOGY_SYSTEM else PCIE


def worst_link(gpus: Sequence[Gpu], links: Links) -> str:
    """Of each two different ones of them; empty: there are no two, or NVML does not say."""
    uuids = list(dict.fromkeys(gpu.uuid for gpu in gpus))
    pairs = [frozenset((one, other)) for index, one in enumerate(uuids) for other in uuids[index + 1 :]]
    if not pairs or any(pair not in links for pair in pairs):
        return ""
    return max((links[pair] for pair in pairs), key=LINKS.index)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
