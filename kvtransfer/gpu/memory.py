"""Memory of one GPU that two processes of a host share: allocated here, exported as a handle, mapped there.

Speaks to the CUDA driver alone (libcuda.so.1), so that no allocator of a framework stands between the ring and its handle. A
mapping stays valid until it is closed, also when the process that allocated it has died: the driver counts references.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from diptych.common.errors import ConfigError, TransferError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class SharedMemory(Protocol):
    """What a ring of the ipc transport lies in."""

    path: str
    """For example "ipc:cuda"."""

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """Returns: address here, and the handle that another process of this host may open. Raises: TransferError."""
        ...

    def open(self, handle: bytes) -> int:
        """Map memory that any process of this host (this one, too) has allocated. Returns: its address here.

        Raises: TransferError.
        """
        ...

    def close(self, handle: bytes) -> None:
        """Unmap what `open` mapped; nothing may read it any more."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        ...

    def probe(self, address: int, size_bytes: int) -> float:
        """Read `size_bytes` there the way that payloads are read. Returns: bytes/s. Raises: TransferError."""
        ...


class DeviceMemory(SharedMemory, Protocol):
    """What both rings of the ucx-gpu transport lie in."""

    def bind(self) -> None:
        """Whatever the calling thread asks of the device from now on is about this memory's."""
        ...

    def view(self, address: int, size_bytes: int) -> Any:
        """What UCXX sends from and receives into."""
        ...

    def write(self, address: int, data: bytes) -> None: ...

    def fetch(self, address: int, size_bytes: int) -> bytes: ...


class _View:
    """Bytes of GPU memory, by the interface that UCXX and others know."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


Probe = Callable[[int, int], float]


class GpuMemory:
    """Args:
    device_index: of the GPU, as the driver counts those that this process sees.
    probe: times a read of (address, size_bytes) on it; returns bytes/s.
    Raises: ConfigError when there is no driver or no such GPU.
    """

    path = "ipc:cuda"

    def __init__(self, device_index: int, probe: Probe) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError("transport", "ipc", f"there is no CUDA driver: {error}") from None
        self._probe = probe
        self._own: dict[bytes, int] = {}
        self._mapped: dict[bytes, tuple[int, int]] = {}
        """Handle -> address, and how often it is open."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(device), device_index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except TransferError as error:
            raise ConfigError("transport", "ipc", error.message) from None
        self._context = context

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        address, handle = ctypes.c_uint64(), _Handle()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        raw = bytes(handle)
        self._own[raw] = address.value
        return address.value, raw

    def open(self, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise TransferError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
        if handle in self._own:  # CUDA opens no handle in the process that made it
            return self._own[handle]
        address, count = self._mapped.get(handle, (0, 0))
        if not count:
            found = ctypes.c_uint64()
            with self._current():
                self._call(
                    "cuIpcOpenMemHandle_v2", ctypes.byref(found), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
                )
            address = found.value
        self._mapped[handle] = (address, count + 1)
        return address

    def close(self, handle: bytes) -> None:
        address, count = self._mapped.pop(handle, (0, 0))
        if count > 1:
            self._mapped[handle] = (address, count - 1)
        elif count:
            with self._current():
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def free(self, address: int) -> None:
        self._own = {handle: own for handle, own in self._own.items() if own != address}
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def probe(self, address: int, size_bytes: int) -> float:
        return self._probe(address, size_bytes)

    def bind(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def view(self, address: int, size_bytes: int) -> Any:
        return _View(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        with self._current():
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def fetch(self, address: int, size_bytes: int) -> bytes:
        here = ctypes.create_string_buffer(size_bytes)
        with self._current():
            self._call("cuMemcpyDtoH_v2", here, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        return here.raw

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The GPU's context on whatever thread this is."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or str(code).encode()).decode()}")
