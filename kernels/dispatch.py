"""Which implementation of the ops serves a device. Chosen once at start; nothing falls back later.

    "native"   C, compiled at the first start: what a CPU uses in float32 and bfloat16 where it can be had
    "torch"    plain torch ops: any device
    "triton"   compiled kernels: what a CUDA device uses; on a CPU only through Triton's interpreter, in tests

Triton is imported by the modules kernels/triton_*.py only, and those only by whoever chose "triton".
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from diptych.kernels import paged_attention

TORCH, TRITON, NATIVE = "torch", "triton", "native"
_BY_DEVICE: dict[str, ModuleType] = {"cpu": paged_attention, "cuda": paged_attention}


def choose_backend(device_type: str, wanted: str | None = None) -> str:
    """wanted: None: the device's own. Returns: "torch", "native" or "triton". Whether "native" can be had, a compiler and the
    model decide: see engine.exec.native.

    Raises: ValueError for another name, for "native" on another device, or when Triton is wanted (by the device or the
    caller) and not installed.
    """
    chosen = wanted or {"cuda": TRITON, "cpu": NATIVE}.get(device_type, TORCH)
    if chosen not in (TORCH, TRITON, NATIVE):
        raise ValueError(f"no kernels called {chosen!r}; known: {NATIVE}, {TORCH}, {TRITON}")
    if chosen == NATIVE and device_type != "cpu":
        raise ValueError(f"{NATIVE} kernels are for the CPU, not for device {device_type!r}")
    if chosen == TRITON and find_spec("triton") is None:
        raise ValueError(f"device {device_type!r} needs the package triton; it comes with torch's CUDA builds")
    return chosen


def attention_ops(device_type: str) -> ModuleType:
    """The torch path: the module with write_kv, paged_decode, gather_kv and chunk_attention for "cpu" or "cuda".

    Raises: ValueError for another device.
    """
    try:
        return _BY_DEVICE[device_type]
    except KeyError:
        raise ValueError(f"no attention for device {device_type!r}; known: {sorted(_BY_DEVICE)}") from None
