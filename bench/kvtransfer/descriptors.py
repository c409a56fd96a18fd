"""The alternative to packing: NIXL alone, one descriptor for each scattered block (or smaller pieces of it), pool to
pool, without packing or verification."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from diptych.bench.kvtransfer.blocks import BLOCK_BYTES, BlockPool
from diptych.kvtransfer.fabric.nixl_parts import load_nixl

_DEADLINE_S = 60.0
_DONE = b"done"


class BlockAgent:
    """A NIXL agent over one pool. Prefill's side runs `serve`, decode's reads."""

    def __init__(self, name: str, pool: BlockPool) -> None:
        api = load_nixl()
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._base = pool.pool.data_ptr()
        self._agent.register_memory([(self._base, pool.pool.nbytes, 0, "pool")], mem_type="DRAM")

    def hello(self) -> dict[str, Any]:
        return {"metadata": self._agent.get_agent_metadata().hex(), "base": self._base}

    def serve(self) -> None:
        """Progress on a separate thread until a reader is done: TCP needs both sides."""

        def spin() -> None:
            limit = time.monotonic() + _DEADLINE_S
            while time.monotonic() < limit:
                if any(_DONE in bodies for bodies in self._agent.get_new_notifs().values()):
                    return

        threading.Thread(target=spin, daemon=True).start()

    def meet(self, hello: dict[str, Any]) -> None:
        self._peer = self._agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
        self._peer_base = hello["base"]

    def read(self, ids: list[int], piece_bytes: int = BLOCK_BYTES) -> float:
        """Read blocks `ids` of the peer's pool into the same ones here, with a descriptor for each `piece_bytes` of a
        block. Returns: seconds. Raises: RuntimeError."""
        began = time.perf_counter()
        pieces = np.arange(0, BLOCK_BYTES, piece_bytes, dtype=np.uint64)
        starts = (np.array(ids, np.uint64)[:, None] * np.uint64(BLOCK_BYTES) + pieces).reshape(-1)
        rows = np.zeros((len(starts), 3), np.uint64)
        rows[:, 1] = piece_bytes
        lists = []
        for base in (self._base, self._peer_base):
            rows[:, 0] = starts + np.uint64(base)
            lists.append(self._agent.get_xfer_descs(rows, mem_type="DRAM"))
        local, remote = lists
        transfer = self._agent.initialize_xfer("READ", local, remote, self._peer, _DONE)
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC" and time.perf_counter() - began < _DEADLINE_S:
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"{len(rows)} descriptors: {state}")
            return time.perf_counter() - began
        finally:
            self._agent.release_xfer_handle(transfer)
