"""Where blocks of KV are kept outside of the process: this worker's folder (block_folder.py), or a store of others (mooncake.py).

A keeper answers for nothing: what it returns is checked against identity, key and checksum (block_file.py), and what it has lost,
or lets go, is computed again. So little is asked of it: bytes under a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.engine.disk_messages import DiskBlock


@dataclass(frozen=True, slots=True)
class Found:
    """What was there at the start.

    Args:
        blocks: what is to leave first comes last.
        damaged: other files, by reason. They were removed, but for those whose names are none of ours.
        other_bytes: of folders of other identities, which were removed.
    """

    blocks: tuple[DiskBlock, ...] = ()
    damaged: dict[str, int] = field(default_factory=dict)
    other_bytes: int = 0


class BlockKeeper(Protocol):
    """Blocks of one identity. Every method may wait, and is called by the two threads of a DiskBlockStore: each block by one of
    them at a time."""

    is_shared: bool
    """Others write blocks, too, and it lets go of some by itself: a block of which this worker does not know may be there."""

    @property
    def block_bytes(self) -> int:
        """Of every block."""
        ...

    def open(self) -> Found:
        """Once, before all else. Raises: ConfigError naming the setting."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...

    def write(self, block: DiskBlock, pieces: Sequence[memoryview]) -> str:
        """Args: pieces: of block_bytes together. Returns: what `sync` is to be given. Raises: BadBlockError: this one cannot be
        written, others can; OSError. Nothing is there then."""
        ...

    def sync(self, written: Sequence[str]) -> None:
        """What was written lasts from now on. Raises: OSError."""
        ...

    def read(self, block: DiskBlock, into: Sequence[memoryview]) -> None:
        """Fill `into`, pieces of block_bytes together. Raises: BadBlockError; they hold anything then."""
        ...

    def has(self, block: DiskBlock) -> bool:
        """Whether there is anything under its name."""
        ...

    def drop_cached(self, block: DiskBlock) -> None:
        """The next read of it is no read of this machine's memory, if that can be said. Raises: OSError."""
        ...

    def remove(self, block: DiskBlock) -> None:
        """One that is not there is no error. Raises: OSError."""
        ...
