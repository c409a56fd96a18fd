"""Bytes of files on their way to a GPU. Several threads read into pinned memory, and each sends what it has read.

A tensor of a mapped file is faulted in page by page and staged by the driver, on one thread: 6 GB/s."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

NUM_THREADS = 8
PIECE_BYTES = 16 << 20


class FileReader:
    """Use as a context manager, which ends the threads.

    Args:
        device: of the tensors; a CPU in tests.
        piece_bytes: that a thread reads at once; each has a buffer of this size.
    """

    def __init__(self, device: torch.device, *, num_threads: int = NUM_THREADS, piece_bytes: int = PIECE_BYTES) -> None:
        self._on_device = device.type == "cuda"
        self._num_threads, self._piece_bytes = num_threads, piece_bytes
        self._lanes: SimpleQueue[tuple[Tensor, torch.cuda.Stream | None]] = SimpleQueue()
        whole = torch.empty(num_threads * piece_bytes, dtype=torch.uint8, pin_memory=self._on_device)
        for buffer in whole.split(piece_bytes):
            self._lanes.put((buffer, torch.cuda.Stream(device) if self._on_device else None))
        self._threads = ThreadPoolExecutor(num_threads, "file-reader")

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def read(self, path: Path, offset: int, out: Tensor) -> None:
        """Fill `out`, which is contiguous, with the file's bytes from `offset` on.

        Raises: EOFError for a file that is too short; OSError.
        """
        there = out.view(-1).view(torch.uint8)
        size = there.numel()
        step = max(1, min(self._piece_bytes, -(-size // self._num_threads)))
        ready = None
        if self._on_device:
            ready = torch.cuda.Event()
            ready.record()  # what used this memory before has ended then
        file = os.open(path, os.O_RDONLY)
        try:
            pieces = [
                self._threads.submit(self._piece, file, offset + start, there[start : start + step], ready)
                for start in range(0, size, step)
            ]
            wait(pieces)
        finally:
            os.close(file)
        for piece in pieces:
            piece.result()

    @torch.inference_mode()
    def _piece(self, file: int, offset: int, out: Tensor, ready: torch.cuda.Event | None) -> None:
        lane = self._lanes.get_nowait()  # there is one for each thread
        try:
            buffer, stream = lane
            here = buffer[: out.numel()]
            left: memoryview = here.numpy().data
            while left:
                count = os.preadv(file, [left], offset)
                if not count:
                    raise EOFError(f"the file ends at byte {offset}")
                left, offset = left[count:], offset + count
            if stream is None:
                out.copy_(here)
                return
            with torch.cuda.stream(stream):
                if ready is not None:
                    stream.wait_event(ready)
                out.copy_(here, non_blocking=True)
            stream.synchronize()
        finally:
            self._lanes.put(lane)
