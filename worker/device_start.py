"""What a GPU needs at a worker's start that is no Python code, begun before Python code is imported for seconds."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import MutableMapping

from diptych.common.degrees import Degrees


def begin_device(device: str, devices: str, degrees: Degrees) -> None:
    """For the worker of this process, before it imports what uses a GPU. One rank sees only the GPU that it has; of several ranks
    none is this process, which has no GPU then.

    Args: device, devices: of the settings. Raises: ConfigError for a GPU that is not there.
    """
    if device != "cuda" or degrees.num_ranks > 1:
        return
    if devices:
        show_only(devices, os.environ)
    begin_context(device)


def show_only(devices: str, environ: MutableMapping[str, str]) -> None:
    """Let CUDA see one GPU. Args: devices: its index among those that CUDA shows. Raises: ConfigError when it is not there."""
    from diptych.worker.ranks import gpus_of_ranks
    from diptych.worker.visible_gpus import find_gpus

    [gpu] = gpus_of_ranks(find_gpus(environ), devices, 1)
    environ["CUDA_VISIBLE_DEVICES"], environ["CUDA_DEVICE_ORDER"] = gpu.visible, "PCI_BUS_ID"


def begin_context(device: str) -> None:
    """Let the driver make this process's context on its GPU, on a thread: it takes some 0.5 s, in which other threads have
    the interpreter. Nothing depends on it: without a driver, or where it fails, torch says later what is wrong.

    Args: device: of the settings; nothing is done for a CPU.
    """
    if device == "cuda":
        threading.Thread(target=_retain, name="gpu-context", daemon=True).start()


def _retain() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        # The one that torch uses; it is never given back.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
