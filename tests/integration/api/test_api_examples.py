"""Every example runs to its end against a router whose frontend is a script, with keys on."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import grpc.aio
import pytest

from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych_tests.http_api import api_servers

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAYS = {
    "sdk_stream.py": "Hello there",
    "sdk_many.py": "tree: Hello there",
    "sdk_logprobs.py": "choice 0: 'Hello there' (stop)",
    "sdk_form.py": "fits the schema: Hello there",
    "openai_stream.py": "Hello there",
    "http_plain.py": "Hello there",
}
WAIT_S = 60.0

grpc.aio.init_grpc_aio()


def test_every_example_is_run_here_and_named_in_the_readme() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
async def test_without_a_router_it_ends_with_a_code_and_words(name: str) -> None:
    with socket.socket() as taken:  # bound and never listening: connections are refused for as long as it is ours
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        target = address if name.startswith("sdk_") else f"http://{address}/v1"
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(EXAMPLES / name), target),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await asyncio.wait_for(child.communicate(), WAIT_S)
    said = err.decode()
    assert child.returncode == 1, said
    assert "Traceback" not in said
    assert address in said


@pytest.mark.parametrize("name", sorted(SAYS))
async def test_example(name: str, tmp_path: Path) -> None:
    key, _ = add_key(tmp_path / "keys.json", "acme", now=0.0)
    router_api = FakeRouterApi(hello_script())
    async with api_servers(router_api, keys=Authenticator(tmp_path / "keys.json", now=time.monotonic)) as addresses:
        target = addresses.grpc if name.startswith("sdk_") else f"http://{addresses.http}/v1"
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(EXAMPLES / name),
            target,
            env=os.environ | {"DIPTYCH_API_KEY": key, "OPENAI_API_KEY": key},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(child.communicate(), WAIT_S)
    assert child.returncode == 0, err.decode()
    assert SAYS[name] in out.decode()
    assert {spec.tenant for spec in router_api.specs} == {"acme"}
