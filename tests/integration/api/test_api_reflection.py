"""gRPC reflection: grpcurl and similar clients can list the methods, if enabled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from diptych.common.errors import ConfigError
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.config import RouterConfig
from diptych_tests.http_api import api_servers

grpc.aio.init_grpc_aio()


def described(address: str) -> dict[str, set[str]]:
    """Methods by service, as a client without stubs gets them."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        found = {}
        for name in database.get_services():
            found[name] = {method.name for method in pool.FindServiceByName(name).methods}
        return found


async def ask(**options: Any) -> dict[str, set[str]]:
    async with api_servers(FakeRouterApi(hello_script()), **options) as at:
        return await asyncio.to_thread(described, at.grpc)


async def test_it_lists_services_and_messages() -> None:
    services = await ask(reflection=True)
    assert {"Generate", "ListModels"} <= services["diptych.rpc.v1.Router"]
    assert "Check" in services["grpc.health.v1.Health"]


async def test_off_it_is_an_unknown_method() -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await ask()
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_with_keys_it_needs_one(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "acme", now=0.0)
    keys = Authenticator(tmp_path / "keys.json", now=time.monotonic)
    with pytest.raises(grpc.RpcError) as refused:
        await ask(keys=keys, reflection=True)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_auto_is_on_where_only_this_machine_can_reach_the_router() -> None:
    assert RouterConfig().serves_reflection
    assert RouterConfig(host="::1").serves_reflection
    assert not RouterConfig(host="0.0.0.0", insecure=True).serves_reflection
    assert RouterConfig(host="0.0.0.0", insecure=True, grpc_reflection="on").serves_reflection
    assert not RouterConfig(grpc_reflection="off").serves_reflection
    with pytest.raises(ConfigError, match="grpc_reflection"):
        RouterConfig(grpc_reflection="yes")
