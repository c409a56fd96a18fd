"""GPU memory that the ranks of one host write into each other's: allocated here, exported as a handle, mapped there.

Speaks to the CUDA driver alone: memory of torch's allocator moves among tensors, and its handles with it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from diptych.common.errors import ConfigError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PeerMemory:
    """Memory of the calling thread's GPU, zeros at first. Raises: ConfigError where there is none, or the driver refuses."""

    def __init__(self, size_bytes: int) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError("device", "cuda", f"there is no CUDA driver: {error}") from None
        self._mapped: list[int] = []
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self.address = address.value
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """By which another process of this host opens it."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map what another process allocated. Returns: its address here. Raises: ConfigError: this GPU does not reach it."""
        found = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        self._mapped.append(found.value)
        return found.value

    def close(self) -> None:
        """Idempotent. Nothing may be using it any more, here or there."""
        for address in self._mapped:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._mapped.clear()
        if self.address:
            self._call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            reason = (text.value or str(code).encode()).decode()
            raise ConfigError("tensor_parallel_size", "cuda", f"the GPUs cannot share memory: {name}: {reason}")
