"""Between the step thread and what keeps blocks in files (kvtransfer.disk): neither waits for the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block in a file.

    Args:
        tenant: common.secret.tenant_folder of the one whose request computed it; files are kept and purged by it.
        index: of the block in its prompt.
    """

    key: bytes
    tenant: str
    index: int


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """The end of a `write`: a command to the step thread. `error`: why `failed` are not on the disk; empty: all are."""

    blocks: tuple[DiskBlock, ...]
    failed: tuple[DiskBlock, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """A part of a `read`: a command to the step thread. The next `num_blocks` blocks lie in `pieces`, which are to be given back.

    Args:
        pieces: as `pieces_of` divides a buffer.
        buffer: of the pieces.
        seconds: spent on reading and checking them.
        bad: the block behind them that is not what it should be, and `error`: how. Nothing follows.
        gone: if it is missing: those behind it that are missing, too (a purge, a lost volume).
    """

    job: int
    num_blocks: int
    pieces: tuple[memoryview, ...]
    buffer: int
    seconds: float
    last: bool
    bad: DiskBlock | None = None
    error: str = ""
    gone: Sequence[DiskBlock] = ()


DiskReply = BlocksWritten | BlocksRead


class BlockStore(Protocol):
    """Files of blocks, in the hands of threads of their own. No method waits for the disk, but `close`."""

    @property
    def found(self) -> Sequence[DiskBlock]:
        """What was there at the start; what is to leave first comes last."""
        ...

    @property
    def is_shared(self) -> bool:
        """Others write blocks, too: those that are not in `found` may be there. It lets go of blocks by itself."""
        ...

    @property
    def damaged(self) -> Mapping[str, int]:
        """Files that were found at the start and are no whole blocks of this worker, by reason."""
        ...

    @property
    def piece_bytes(self) -> Sequence[int]:
        """Of which a block consists, see `pieces_of`."""
        ...

    @property
    def chunk_blocks(self) -> int:
        """Blocks that a buffer holds."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """Measured at the start: reading and checking; 0.0: it could not be measured."""
        ...

    def begin(self, reply: Callable[[DiskReply], None]) -> None:
        """Start the threads. Args: reply: callable from any thread."""
        ...

    def write_buffer(self) -> memoryview | None:
        """A free one; None: all are being written, or the disk has failed lately. It ends with `write`."""
        ...

    def write(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> None:
        """`buffer` holds the KV of the blocks, as `pieces_of` divides it. BlocksWritten follows; without blocks nothing does."""
        ...

    def remove(self, blocks: Sequence[DiskBlock]) -> None:
        """In the order of the writes."""
        ...

    def read(self, job: int, blocks: Sequence[DiskBlock]) -> None:
        """BlocksRead follow, until one is the last."""
        ...

    def cancel(self, job: int) -> None:
        """At most one BlocksRead follows."""
        ...

    def give_back(self, buffer: int) -> None:
        """Of a BlocksRead."""
        ...

    def close(self, deadline_s: float) -> None:
        """Write what is queued, within the deadline, and end the threads. Idempotent."""
        ...


def pieces_of(buffer: memoryview, num_blocks: int, piece_bytes: Sequence[int]) -> tuple[memoryview, ...]:
    """A buffer with so many blocks: for each KV group of each rank its KV of all of them, one block after the other.

    Args: piece_bytes: of one block, by rank and by group within it.
    """
    ends = [num_blocks * end for end in accumulate(piece_bytes)]
    return tuple(buffer[end - num_blocks * size : end] for end, size in zip(ends, piece_bytes, strict=True))
