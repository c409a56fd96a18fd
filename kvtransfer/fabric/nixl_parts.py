"""What the NIXL transport keeps about peers, reads and answers; and how NIXL is loaded."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diptych.common.errors import ConfigError

TELLING_BYTES = 64 << 10
"""A read of fewer bytes does not show its path: control messages travel on TCP, too."""


def load_nixl() -> Any:
    """NIXL's Python API. Where UCXX was loaded before it, its UCX keeps NIXL's module for shared memory out of the process; a
    worker loads one of the two, and the self-test shows which. Raises: ConfigError."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    why = []
    for package in ("nixl_cu12", "nixl_cu13"):  # extras `nixl` and `nixl-cu13`
        try:
            importlib.import_module(package)
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            why.append(str(error))
    raise ConfigError("transport", "nixl", f"NIXL cannot be loaded (extra `nixl`, on CUDA 13 `nixl-cu13`): {why[0]}")


@dataclass(slots=True, eq=False)
class Peer:
    """`conn` and `token` stand in our control messages. `path`: what its reads come on; empty: not known yet."""

    name: str
    agent: str
    conn: int
    token: bytes
    same_host: bool = True
    lost: str = ""
    path: str = ""


@dataclass(slots=True)
class Read:
    peer: Peer
    dest: np.ndarray
    xfer: Any = None
    address: int = 0
    """Where prefill lets us read; 0: its answer has not come."""
    tcp_before: int = -1
    """Of the read that shows its peer's path: bytes that had arrived over TCP before it began."""

    @property
    def measures_path(self) -> bool:
        return not self.peer.path and self.dest.nbytes >= TELLING_BYTES


@dataclass(slots=True)
class Answers:
    """Slabs that a peer may be reading, by read id."""

    ops: dict[int, int] = field(default_factory=dict)
