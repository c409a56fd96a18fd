"""Memory that several processes of one host can map: an anonymous file, whose descriptor another process is given.

`find` says in which area given bytes lie, so that code which got a view of some memory need not know who allocated it.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

_areas: dict[int, weakref.ref[SharedArea]] = {}
"""Of this process, by address."""


class SharedArea:
    """`size_bytes` of memory, zeros at first. It never moves, and is there as long as this object or a view of it is.

    Args (fields):
        memory: the bytes; slices of a memoryview of it are views.
        descriptor: of the file; another process that is given it maps the same bytes (`attached`).
    """

    def __init__(self, size_bytes: int, descriptor: int | None = None) -> None:
        self.size_bytes = size_bytes
        if descriptor is None:
            self.descriptor = os.memfd_create("diptych-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size_bytes)
        else:
            self.descriptor = descriptor
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.memory = mmap.mmap(self.descriptor, size_bytes)
        self.address = _address(memoryview(self.memory))
        _areas[self.address] = weakref.ref(self)
        weakref.finalize(self, _areas.pop, self.address).atexit = False


def attached(descriptor: int) -> SharedArea:
    """The area of another process whose descriptor came here; it is closed with the area."""
    return SharedArea(os.fstat(descriptor).st_size, descriptor)


def find(view: memoryview) -> tuple[SharedArea, int] | None:
    """The area of this process that all bytes of `view` are in, and where they begin; None: they are in none."""
    if not view.nbytes:
        return None
    address = _address(view)
    for reference in list(_areas.values()):
        area = reference()
        if area is not None and area.address <= address and address + view.nbytes <= area.address + area.size_bytes:
            return area, address - area.address
    return None


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
