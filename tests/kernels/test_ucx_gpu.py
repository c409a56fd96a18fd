"""KV between the GPU memory of two processes over UCX, on one GPU."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.gpu


def test_two_processes_exchange_gpu_memory_directly(cuda, capsys):
    pytest.importorskip("ucxx", reason="UCXX is not installed")
    from diptych.common.errors import ConfigError
    from diptych.kvtransfer.build import build_transfer
    from diptych.kvtransfer.config import TransferConfig
    from diptych.kvtransfer.gpu.path import DIRECT, STAGED

    def config(require):
        return TransferConfig(
            transport="ucx-gpu", device="cuda", slab_bytes=64 << 20, num_slabs=2, require_transport=require
        )

    async def start(require, role):
        loop = asyncio.get_running_loop()
        return build_transfer(
            config(require),
            worker_id=f"{role}-0",
            incarnation="x",
            publishes=role == "prefill",
            reads=role == "decode",
            layout_hash=1,
            loop=loop,
        )

    async def check():
        transfer = await start(DIRECT, "decode")
        rate = transfer.bytes_per_s
        await transfer.close()
        with pytest.raises(ConfigError, match="the self-test found ucx-gpu:direct"):
            await start(STAGED, "prefill")
        return rate

    rate = asyncio.run(check())
    with capsys.disabled():
        print(f"\nucx-gpu, 64 MiB between two processes on one GPU: {rate / 1e9:.0f} GB/s")
    assert rate > 10e9
