"""Useful KV bandwidth between two processes of this host, as a share of the same library's rate for one raw message.

    python -m diptych.bench.kvtransfer.loopback --transport ucx --out bench/results/loopback.json

kv:   2,000 scattered blocks of 64 KiB: packed, moved, verified and unpacked, pipelined over slabs, announced over a
pipe raw:  one message of 64 MiB between the same two processes over the same transport Both alternate, so that other
load affects both. Reported are medians and ranges, and the CPU seconds of both processes per GB, which depend less on
other load. At the end both are idle for a while, to measure the cost of an idle transfer as a share of one core. blocks
(NIXL only): the same 2,000 blocks with one descriptor each, pool to pool, without packing or verification; and with one
for each 16 and 4 KiB of them, as for an engine with one tensor per layer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from diptych.bench.kvtransfer.blocks import BLOCK_BYTES, KEY, LAYOUT, BlockPool
from diptych.bench.result import spread, surroundings, write
from diptych.kvtransfer.api import KvAddress, PeerRef, Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import SlabHandle, decode
from diptych.kvtransfer.wrappers.ciphers import MODES, OFF

RAW_BYTES = 64 << 20
NUM_BLOCKS = 2000
POOL_BLOCKS = 2400
_DEADLINE_S = 60.0
_PIECES, _PIECE_ROUNDS = (16 << 10, 4 << 10), 3
_SETTLE_S, _IDLE_S = 1.0, 8.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """Variants of the pipeline.

    newest_first: prefill packs into the slab that was returned last, as its engine does. switch_interval_s: of both
    processes' interpreters; workers have the same.
    """

    reads_in_flight: int = 4
    switch_interval_s: float = 0.0005
    newest_first: bool = True


class Bench:
    """Decode's side. `start` brings up both processes."""

    def __init__(self, settings: dict[str, Any], knobs: Knobs) -> None:
        self._settings, self._knobs = settings, knobs
        sys.setswitchinterval(knobs.switch_interval_s)
        self._source = BlockPool(POOL_BLOCKS, filled=True)
        self._pool = BlockPool(POOL_BLOCKS, filled=False)
        self._step_thread = ThreadPoolExecutor(1)
        self._agent: Any = None
        self.path = ""
        self.peer_path = ""
        self.kv_cpu_end = 0.0
        """CPU time when the last block was unpacked, without the check of the bytes."""

    async def start(self) -> None:
        arguments = json.dumps([self._settings, POOL_BLOCKS, RAW_BYTES, asdict(self._knobs)])
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "diptych.bench.kvtransfer.peer_process", arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        hello = json.loads(await self._line())
        self._kv_peer, self._raw_peer = (
            PeerRef(
                f"p-{name}", "0", KvAddress(hello[name]["transport"], hello[name]["host"], 0, bytes.fromhex(hello[name]["blob"]))
            )
            for name in ("kv", "raw")
        )  # fmt: skip
        self._kv = self._make(self._settings)
        self._raw = self._make(
            {
                **self._settings,
                "slab_bytes": RAW_BYTES + 4096,
                "num_slabs": 1,
                "verify_checksum": False,
                "kv_encryption": OFF,
            }
        )
        self.path, self.peer_path = self._kv.path, hello["path"]
        if "blocks" in hello:
            # Imported here: it loads NIXL.
            from diptych.bench.kvtransfer.descriptors import BlockAgent

            self._agent = BlockAgent("d-blocks", self._pool)
            self._agent.meet(hello["blocks"])

    def _make(self, settings: dict[str, Any]) -> Transfer:
        loop = asyncio.get_running_loop()
        config = TransferConfig(**settings)
        return build_transfer(
            config, worker_id="d", incarnation="0", reads=True, layout_hash=LAYOUT, loop=loop, encryption_key=KEY
        )

    async def _line(self) -> str:
        assert self._child.stdout is not None
        line = await asyncio.wait_for(self._child.stdout.readline(), _DEADLINE_S)
        if not line:
            raise RuntimeError("the publishing process has ended")
        return line.decode()

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode() + b"\n")

    def cpu_s(self) -> float:
        """CPU time of both processes so far."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def raw(self) -> float:
        """Bytes per second of one message."""
        self._tell("raw")
        handle = decode(bytes.fromhex(await self._line()))
        began = time.perf_counter()
        self._raw.finish(await self._raw.read(self._raw_peer, handle, deadline_s=_DEADLINE_S))
        return RAW_BYTES / (time.perf_counter() - began)

    async def kv(self, seed: int) -> float:
        """Useful bytes per second, from the order to pack until the last block is unpacked."""
        ids = np.random.default_rng(seed).permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist()
        window = asyncio.Semaphore(self._knobs.reads_in_flight)
        loop = asyncio.get_running_loop()
        left = NUM_BLOCKS

        async def fetch(handle: SlabHandle) -> None:
            async with window:
                slab = await self._kv.read(self._kv_peer, handle, deadline_s=_DEADLINE_S)
                assert isinstance(slab.payload, memoryview)
                some = ids[handle.first_token : handle.first_token + handle.num_tokens]
                await loop.run_in_executor(self._step_thread, self._pool.unpack, some, slab.payload)
                self._kv.finish(slab)

        began = time.perf_counter()
        self._tell(f"kv {seed} {NUM_BLOCKS}")
        async with asyncio.TaskGroup() as group:
            while left:
                handle = decode(bytes.fromhex(await self._line()))
                group.create_task(fetch(handle))
                left -= handle.num_tokens
        elapsed = time.perf_counter() - began
        self.kv_cpu_end = self.cpu_s()
        if not self._source.same(self._pool, ids):
            raise RuntimeError("the blocks that arrived are not the ones that were sent")
        self._pool.clear()
        return NUM_BLOCKS * BLOCK_BYTES / elapsed

    @property
    def has_descriptors(self) -> bool:
        return self._agent is not None

    async def descriptors(self, seed: int, piece_bytes: int = BLOCK_BYTES) -> float:
        """Bytes per second of NIXL with one descriptor for each `piece_bytes` of a block."""
        ids = np.random.default_rng(seed).permutation(POOL_BLOCKS)[:NUM_BLOCKS].tolist()
        self._tell("descriptors")
        await self._line()  # the peer serves
        seconds: float = await asyncio.get_running_loop().run_in_executor(
            self._step_thread, self._agent.read, ids, piece_bytes
        )
        if not self._source.same(self._pool, ids):
            raise RuntimeError("the blocks that arrived are not the ones that were sent")
        self._pool.clear()
        return NUM_BLOCKS * BLOCK_BYTES / seconds

    async def idle(self) -> float:
        """CPU of one idle transfer, as a share of a core; there are two, one in each process."""
        await asyncio.sleep(_SETTLE_S)
        began, cpu = time.perf_counter(), self.cpu_s()
        await asyncio.sleep(_IDLE_S)
        return (self.cpu_s() - cpu) / (time.perf_counter() - began) / 4

    async def close(self) -> None:
        await self._kv.close()
        await self._raw.close()
        self._tell("quit")
        await asyncio.wait_for(self._child.wait(), 30)
        self._step_thread.shutdown()


def _beside(kv: list[float], descriptors: list[float]) -> dict[str, Any]:
    return {
        "descriptors_bytes_per_s": spread(descriptors),
        "times_descriptors": spread([a / b for a, b in zip(kv, descriptors, strict=True)]),
    }


async def measure(settings: dict[str, Any], knobs: Knobs, rounds: int) -> dict[str, Any]:
    bench = Bench(settings, knobs)
    await bench.start()
    try:
        await bench.raw()
        await bench.kv(0)
        raw, kv, shares, descriptors, raw_cpu, kv_cpu = [], [], [], [], 0.0, 0.0
        if bench.has_descriptors:
            await bench.descriptors(0)
        for i in range(1, rounds + 1):
            start = bench.cpu_s()
            raw += [await bench.raw(), await bench.raw()]
            middle = bench.cpu_s()
            kv.append(await bench.kv(i))
            raw_cpu, kv_cpu = raw_cpu + middle - start, kv_cpu + bench.kv_cpu_end - middle
            shares.append(kv[-1] / statistics.mean(raw[-2:]))
            if bench.has_descriptors:
                descriptors.append(await bench.descriptors(i))
            print(
                f"  round {i}: raw {raw[-1] / 1e9:.2f} GB/s, kv {kv[-1] / 1e9:.2f} GB/s, share {shares[-1]:.0%}"
                + (f", a descriptor a block {descriptors[-1] / 1e9:.2f} GB/s" if descriptors else ""),
                flush=True,
            )
        pieces = {
            size: spread([await bench.descriptors(i, size) for i in range(_PIECE_ROUNDS)])
            for size in _PIECES if bench.has_descriptors
        }  # fmt: skip
        idle = await bench.idle()
    finally:
        await bench.close()
    return {
        "path": bench.path,
        "settings": settings,
        "knobs": asdict(knobs),
        "raw_bytes_per_s": spread(raw),
        "kv_bytes_per_s": spread(kv),
        "share": spread(shares),
        "share_of_medians": statistics.median(kv) / statistics.median(raw),
        **(_beside(kv, descriptors) if descriptors else {}),
        **({"smaller_descriptors_bytes_per_s": pieces} if pieces else {}),
        "idle_cpu_share": idle,
        "raw_cpu_s_per_gb": raw_cpu / (2 * rounds * RAW_BYTES / 1e9),
        "kv_cpu_s_per_gb": kv_cpu / (rounds * NUM_BLOCKS * BLOCK_BYTES / 1e9),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--slab-bytes", type=int, default=4 << 20)
    parser.add_argument("--kv-encryption", choices=MODES, default=OFF, help="of the blocks; the raw message has none")
    parser.add_argument("--num-slabs", type=int, default=8)
    parser.add_argument("--reads-in-flight", type=int, default=4)
    parser.add_argument("--switch-interval-s", type=float, default=Knobs().switch_interval_s)
    parser.add_argument("--oldest-first", action="store_true", help="pack into the slab that waits longest")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {
        "transport": args.transport, "slab_bytes": args.slab_bytes, "num_slabs": args.num_slabs,
        "kv_encryption": args.kv_encryption,
    }  # fmt: skip
    print(
        f"{args.transport}, encryption {args.kv_encryption}, slabs {args.num_slabs} x {args.slab_bytes >> 10} KiB, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    knobs = Knobs(args.reads_in_flight, args.switch_interval_s, not args.oldest_first)
    result = uvloop.run(measure(settings, knobs, args.rounds))
    report = {
        "bench": "kv transfer over loopback: 2,000 scattered blocks of 64 KiB against one raw message of 64 MiB",
        "machine": surroundings(), **result,
    }  # fmt: skip
    print(
        f"{result['path']}: raw {result['raw_bytes_per_s']['median'] / 1e9:.2f} GB/s, "
        f"kv {result['kv_bytes_per_s']['median'] / 1e9:.2f} GB/s, share {result['share']['median']:.0%}; "
        f"CPU {result['raw_cpu_s_per_gb']:.2f} and {result['kv_cpu_s_per_gb']:.2f} s a GB; idle {result['idle_cpu_share']:.1%}"
    )
    if args.out:
        write(args.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
