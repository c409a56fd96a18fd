"""Memory that stands in for a GPU's."""

from __future__ import annotations

import ctypes
import mmap
import os

from diptych.common.errors import TransferError


class HostMemory:
    """SharedMemory in files of memory; says which mappings are open."""

    path = "ipc:host"

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self.open_handles: list[bytes] = []
        self.broken = False

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        fd = os.memfd_create("ring")
        os.ftruncate(fd, size_bytes)
        return self._map(fd), f"{os.getpid()}/{fd}".encode()

    def _map(self, fd: int) -> int:
        area = mmap.mmap(fd, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._maps[address] = area
        return address

    def open(self, handle: bytes) -> int:
        if self.broken:
            raise TransferError("no link between the two")
        pid, fd = handle.decode().split("/")
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            self.open_handles.append(handle)
            return self._map(file.fileno())

    def close(self, handle: bytes) -> None:
        self.open_handles.remove(handle)

    def free(self, address: int) -> None:
        self._maps.pop(address)

    def probe(self, address: int, size_bytes: int) -> float:
        return len(ctypes.string_at(address, size_bytes)) * 1e9
