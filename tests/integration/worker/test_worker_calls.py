"""A stranger's calls to a worker: only health checks are answered without a token of the cluster secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.errors import ConfigError
from diptych.common.secret import call_key, call_token
from diptych.rpc.call_token import HEADER
from diptych.rpc.channels import open_channel
from diptych.rpc.stubs import DecodeStub, WorkerStub
from diptych.rpc.v1 import decode_pb2, prefill_pb2, worker_pb2

METHODS = {
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["Prefill"],
    "source": prefill_pb2.DESCRIPTOR.services_by_name["Source"],
    "decode": decode_pb2.DESCRIPTOR.services_by_name["Decode"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["Worker"],
}
"""All services of a worker, from their definition: a method that is added is tried, too."""


async def refusal(channel: grpc.aio.Channel, service: str, method: str, metadata: Any = None) -> tuple[Any, str]:
    """(code, text) of an empty call."""
    call = channel.stream_stream(f"/{METHODS[service].full_name}/{method}")(metadata=metadata, timeout=60.0)
    try:
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()


def methods(role: str) -> list[tuple[str, str]]:
    offered = {"prefill": ("prefill", "source", "worker"), "decode": ("decode", "source", "worker")}[role]
    return [(service, method.name) for service in offered for method in METHODS[service].methods]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_every_method_refuses_a_stranger(pd: ModuleType, role: str) -> None:
    async with pd.cluster() as cluster:
        worker = cluster.prefill[0] if role == "prefill" else cluster.decode
        elsewhere = "127.0.0.1:1"
        wrong = {
            "none": None,
            "empty": [(HEADER, "")],
            "of another cluster": [(HEADER, call_token(call_key(b"x" * 32), worker.address))],
            "of another worker": [(HEADER, call_token(pd.CALL_KEY, elsewhere))],
            "twice": 2 * [(HEADER, call_token(pd.CALL_KEY, worker.address))],
        }
        async with open_channel(worker.address) as channel:
            for service, method in methods(role):
                for kind, metadata in wrong.items():
                    code, text = await refusal(channel, service, method, metadata)
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (service, method, kind)
                    assert text == (
                        f"the worker at {worker.address} answers only calls with a token of the cluster secret: "
                        "name the cluster's file in --secret-file"
                    )
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert len(methods(role)) >= 7
        assert (await worker.audit(full=True)).attempts == {}


async def test_the_token_opens_each_kind_of_method(pd: ModuleType) -> None:
    async with pd.cluster() as cluster:
        async with pd.worker_channel(cluster.decode.address) as channel:
            info = await WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), metadata=(("a", "b"),))
            assert info.worker_id == "decode-0"
            async for part in WorkerStub(channel).DumpBlocks(worker_pb2.DumpBlocksRequest()):
                assert part.epoch
            call = DecodeStub(channel).Attach(nothing())
            await call.initial_metadata()
            call.cancel()
        # Decode's own calls to prefill have it.
        async with pd.FakeRouter(cluster.decode.address) as router:
            answer = await router.run(cluster.submit_message(attempt="a", prompt=pd.PROMPT))
            assert answer.explanation.prefill == "prefill-0"


async def nothing() -> AsyncIterator[decode_pb2.Command]:
    for command in ():
        yield command


async def test_a_worker_does_not_start_without_the_secret(pd: ModuleType) -> None:
    with pytest.raises(ConfigError, match="secret_file"):
        async with pd.cluster(num_prefill=0, decode_config={"secret_file": ""}):
            pass
