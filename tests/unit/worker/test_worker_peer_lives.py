"""A prefill worker restarts while a handshake with its earlier incarnation is pending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diptych.common.compat import Compat, identified
from diptych.common.errors import WorkerLostError
from diptych.common.kv_format import full_format
from diptych.rpc import convert
from diptych.rpc.v1 import worker_pb2
from diptych.worker.peers import PeerDirectory
from diptych.worker.refs import WorkerRef

_, COMPAT = identified(
    Compat(
        model="fake", model_revision="model", tokenizer_revision="tokenizer",
        kv=full_format(1, 1, 8, block_size=16, dtype="float32"), compute_dtype="float32", attention_version="1",
        sampler_version="1",
    ),
    bytes(32),
)  # fmt: skip
OLD, NEW = WorkerRef("p0", "old", "old:1"), WorkerRef("p0", "new", "new:1")


class Channel:
    """The new incarnation answers at once, the old one never."""

    def __init__(self, address: str) -> None:
        self._address = address

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return self._get_info

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        return None

    async def close(self) -> None:
        return

    async def _get_info(self, request: object, timeout: float) -> worker_pb2.GetInfoResponse:
        if self._address == OLD.address:
            await asyncio.get_running_loop().create_future()
        return worker_pb2.GetInfoResponse(
            worker_id="p0", incarnation="new", role=worker_pb2.WORKER_ROLE_PREFILL, pid=1,
            compat=convert.compat_to_proto(COMPAT), kv_address=worker_pb2.KvAddress(transport="inproc", host="h", port=1),
        )  # fmt: skip


async def forget(peer: object) -> None:
    return


async def test_waiters_for_the_former_incarnation_learn_that_it_is_lost() -> None:
    peers = PeerDirectory(COMPAT, forget=forget, open_channel=Channel)  # type: ignore[arg-type]
    waiting = [asyncio.create_task(peers.connect(OLD)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await peers.connect(NEW)).pid == 1
    for task in waiting:
        with pytest.raises(WorkerLostError, match="another incarnation"):
            await task
    await peers.close()


async def test_a_wait_that_is_cancelled_is_cancelled() -> None:
    peers = PeerDirectory(COMPAT, forget=forget, open_channel=Channel)  # type: ignore[arg-type]
    waiting = asyncio.create_task(peers.connect(OLD))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await peers.close()
