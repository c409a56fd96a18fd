"""What a GPU needs at a worker's start that is no Python code, begun before Python code is imported for seconds."""

from __future__ import annotations

import ctypes
import threading


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
