"""A ring whose payloads lie in GPU memory. Its frames stay in host memory, where publish() and check_slab() write and read them.

prefill   payload(slab): GPU memory of ours, to pack into
decode    received(slab): over ipc GPU memory of the peer, mapped here: nothing was copied yet, unpacking reads over the link;
          over ucx-gpu memory of ours, where the payload has arrived
"""

from __future__ import annotations

import numpy as np

from diptych.common.errors import TransferError
from diptych.engine.messages import DeviceRange
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.layout import Ring, RingSpec, payload_capacity


class GpuRing(Ring):
    """Frames are pages of anonymous memory that are never touched between header and trailer: they cost what they hold.

    Args:
        address, handle: of num_slabs * slab_bytes in GPU memory (kvtransfer/gpu/memory.py); decode's side of ipc has none.
    """

    verifies_later = True

    def __init__(self, spec: RingSpec, address: int = 0, handle: bytes = b"") -> None:
        super().__init__(spec)
        self._address = address
        self.handle = handle
        self._arrived: dict[int, int] = {}

    def payload(self, index: int) -> DeviceRange:
        return DeviceRange(self._address + index * self.spec.slab_bytes, payload_capacity(self.spec.slab_bytes))

    def index_of(self, message: np.ndarray) -> int:
        """Which slab `message` (of `message()`) is."""
        offset = message.ctypes.data - self.array.ctypes.data
        return int(offset // self.spec.slab_bytes)

    def arrive(self, index: int, address: int) -> None:
        """The peer's slab that local slab `index` stands for lies at `address`."""
        self._arrived[index] = address

    def received(self, index: int, handle: SlabHandle, *, verify: bool) -> DeviceRange:
        address = self._arrived.pop(index, 0)
        if not address:
            raise TransferError(f"slab {handle.slab} of {handle.worker_id} was never granted")
        return DeviceRange(address, handle.size_bytes, handle.checksum if verify else None)
