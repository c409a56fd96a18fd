"""Which implementation of the ops serves a device. Chosen once at start; nothing falls back later."""

from __future__ import annotations

from types import ModuleType

from diptych.kernels import paged_attention

_BY_DEVICE: dict[str, ModuleType] = {"cpu": paged_attention, "cuda": paged_attention}


def attention_ops(device_type: str) -> ModuleType:
    """The module with write_kv, paged_decode, gather_kv and chunk_attention for "cpu" or "cuda".

    Raises: ValueError for another device.
    """
    try:
        return _BY_DEVICE[device_type]
    except KeyError:
        raise ValueError(f"no attention for device {device_type!r}; known: {sorted(_BY_DEVICE)}") from None
