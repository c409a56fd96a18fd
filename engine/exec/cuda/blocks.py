"""KV between a GPU's pool and a flat range: in host memory (one kernel gathers or scatters the blocks, one copy moves the slab),
or in GPU memory, this one's or a peer's (one kernel does it all)."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.messages import DeviceRange
from diptych.kernels.kv_pack import split_tokens
from diptych.kernels.triton_move import PACK_PROGRAMS, PULL_PROGRAMS, move_blocks
from diptych.kernels.triton_pack import pack_blocks, unpack_blocks

_MASK = 2**64 - 1


_PULL_BUFFERS = 32
"""Pulls whose block ids may wait on their way to the GPU; one more waits for the first of them."""


class DevicePull:
    """See engine.runner.Pull. Launched when a step has been (see BlockMover.launch_pulls), or when somebody looks at it."""

    def __init__(self, launch: Callable[[], tuple[Tensor, torch.cuda.Event | None]], expected: int | None) -> None:
        self._launch: Callable[[], tuple[Tensor, torch.cuda.Event | None]] | None = launch
        self._expected = expected
        self._found: Tensor | None = None
        """[1] int64 in host memory, valid once `_ended` has happened (None: already)."""
        self._ended: torch.cuda.Event | None = None

    def launch(self) -> None:
        if self._launch is not None:
            launch, self._launch = self._launch, None
            self._found, self._ended = launch()

    def done(self) -> bool:
        self.launch()
        return self._ended is None or bool(self._ended.query())

    def wait(self) -> None:
        self.launch()
        if self._ended is not None:
            self._ended.synchronize()

    def error(self) -> str:
        assert self._found is not None, "it is not done"
        found = int(self._found[0]) & _MASK
        if self._expected is None or found == self._expected:
            return ""
        return f"checksum {found:016x}, not {self._expected:016x}"


class BlockMover:
    """data: kv_pack.pool_bytes(pool). Slabs on both sides grow to the largest range."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._upload = data, Upload(data.device)
        self._pinned = data.device.type == "cuda"
        self._sent = torch.cuda.Event() if self._pinned else None
        self._slab = torch.empty(0, dtype=torch.uint8, device=data.device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._side = torch.cuda.Stream(data.device) if self._pinned else None
        """Pulls run beside the steps. What they use is allocated on their own stream, so that it is reused in its order."""
        with self._beside():
            self._pull_uploads = deque(Upload(data.device, 1024) for _ in range(_PULL_BUFFERS))
        self._pending: list[DevicePull] = []
        self._written: torch.cuda.Event | None = None

    def _beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side) if self._side is not None else nullcontext()

    def _size(self, num_tokens: int, room: int) -> int:
        size = num_tokens * self._data.shape[1] * self._data.shape[3]
        if room < size:
            raise ValueError(f"the payload has {room} bytes, {size} are needed")
        return size

    def _prepare(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview) -> tuple[Tensor, int]:
        ids, _, _ = split_tokens(self._data, block_ids, num_tokens)
        size = self._size(num_tokens, payload.nbytes)
        if self._sent is not None:
            self._sent.synchronize()  # the last unpack's copy out of the pinned memory
        if self._slab.numel() < size:
            self._slab = torch.empty(size, dtype=torch.uint8, device=self._data.device)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._upload.send((ids,))[0], size

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> int:
        """As kv_pack.pack; the bytes are in `out` when it returns. Returns: bytes written."""
        if out.readonly:
            raise ValueError("the payload is read-only")
        ids, size = self._prepare(block_ids, num_tokens, out)
        pack_blocks(self._data, ids, num_tokens, self._slab)
        self._host[:size].copy_(self._slab[:size])
        np.frombuffer(out, dtype=np.uint8, count=size)[:] = self._host[:size].numpy()
        return size

    def unpack(self, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None:
        """As kv_pack.unpack; `src` is free when it returns, and later steps see the blocks."""
        ids, size = self._prepare(block_ids, num_tokens, src)
        self._host[:size].numpy()[:] = np.frombuffer(src, dtype=np.uint8, count=size)
        self._slab[:size].copy_(self._host[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        unpack_blocks(self._data, ids, num_tokens, self._slab)
        self.wrote()

    def wrote(self) -> None:
        """Something was launched that writes to blocks which may be another's before it has ended: pulls stand behind it. (Steps
        need none: whoever ends while one is on the GPU keeps its blocks until that has landed.)"""
        if self._side is not None:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._data.device))

    def pack_device(self, block_ids: Sequence[int], num_tokens: int, out: DeviceRange) -> int:
        """As kv_pack.pack, into GPU memory; done when it returns. Returns: the kv_sum of what was written."""
        ids, _, _ = split_tokens(self._data, block_ids, num_tokens)
        self._size(num_tokens, out.nbytes)
        total = torch.zeros(1, dtype=torch.int64, device=self._data.device)
        there = self._upload.send((ids,))[0]
        move_blocks(self._data, there, num_tokens, out.address, total, pack=True, programs=PACK_PROGRAMS)
        return int(total) & _MASK

    def pull(self, block_ids: Sequence[int], num_tokens: int, src: DeviceRange) -> DevicePull:
        """As kv_pack.unpack, out of GPU memory and beside the steps. Its blocks are nobody else's: see `wrote`."""
        ids, _, _ = split_tokens(self._data, block_ids, num_tokens)
        self._size(num_tokens, src.nbytes)
        before = self._written
        pull = DevicePull(lambda: self._launch(ids, num_tokens, src.address, before), src.checksum)
        self._pending.append(pull)
        return pull

    def launch_pulls(self) -> None:
        """Called when a step is on the GPU: what it costs to launch a pull is then no part of the step."""
        if self._pending:
            pending, self._pending = self._pending, []
            for pull in pending:
                pull.launch()

    @torch.inference_mode()  # also when it is the engine that looks, between two calls of the runner
    def _launch(
        self, ids: list[int], num_tokens: int, address: int, before: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        # A buffer is overwritten only when the copy out of it has been made, and that stands behind the pull before it: one
        # buffer for all would have each pull wait for the last but one.
        upload = self._pull_uploads[0]
        self._pull_uploads.rotate(-1)
        found = torch.empty(1, dtype=torch.int64, pin_memory=self._pinned)
        with self._beside():
            if self._side is not None and before is not None:
                self._side.wait_event(before)
            there, zero = upload.send((ids, (0, 0)))
            total = zero.view(torch.int64)
            move_blocks(self._data, there, num_tokens, address, total, pack=False, programs=PULL_PROGRAMS)
            found.copy_(total, non_blocking=True)
            ended = torch.cuda.Event() if self._side is not None else None
            if ended is not None:
                ended.record()
        return found, ended
