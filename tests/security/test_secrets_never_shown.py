"""Keys, passwords, the cluster secret and prompts: not in logs at any level, errors, tracebacks, printed settings, explanations,
/status, or the arguments and the environment of processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cli.settings.merge import child_environment, describe, log_line, merge
from diptych.cli.up.config import UpConfig
from diptych.client import AsyncClient
from diptych.common.block_identity import IdentityHeader
from diptych.common.child import PRIVATE, environment
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.secret import call_key, call_token, derive_key, load_secret
from diptych.common.store.redis_url import connect, parse_sentinel_url
from diptych.common.ticket import PURPOSE as TICKETS
from diptych.common.tls import ClusterTls, ServerTls
from diptych.kvtransfer.api import KvAddress
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.wrappers.encryption import PURPOSE as KV
from diptych.router.api.auth.keys import KeyEntry, KeySet, add_key
from diptych.router.config import RouterConfig
from diptych.rpc.operator import operator_key
from diptych.rpc.v1 import worker_pb2
from diptych.worker.config import WorkerConfig

WAIT_S = 300.0
CANARY = "canary-" + "7f3a" * 4
"""In place of a secret."""
PROMPT = "a-prompt-that-nobody-else-may-read"

# ---- settings ----

PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=24).map("Zq7{}Zq8".format)
URLS = (
    "redis://me:{}@there:6379/0", "redis://:{}@there", "rediss://me:{}@[::1]:6379/0", "unix://me:{}@/run/redis.sock",
    "redis+sentinel://me:{}@a:1,[::1]:3/main/0", "redis://there:6379/0?password={}&db=1", "redis://there?Password={}",
    "--redis-url redis://me:{}@there",
)  # fmt: skip


@pytest.mark.parametrize("form", URLS)
@given(password=PASSWORDS)
def test_no_printed_setting_shows_a_password(form: str, password: str) -> None:
    """Whatever characters it has, and whether or not the URL could be used."""
    url = form.format(password if "?" not in form else password.replace("&", "").replace("#", ""))
    for kind in (RouterConfig, WorkerConfig, UpConfig):
        config = dataclasses.replace(kind(), redis_url=url)  # type: ignore[call-arg, type-var]
        for line in (describe(config), log_line("x", config)):
            assert "Zq7" not in line, line  # neither its beginning
            assert "Zq8" not in line, line  # nor its end
            assert "***" in line


@pytest.mark.parametrize("where", ["environment", "file", "command line"])
def test_no_error_of_a_setting_shows_a_password(where: str) -> None:
    url = f"redis://me:{CANARY}@there\0"
    sources: dict[str, Any] = {"environ": {}, "file": None}
    given: dict[str, Any] = {}
    if where == "environment":
        sources["environ"] = {"DIPTYCH_REDIS_URL": url}
    elif where == "file":
        sources["file"] = {"redis_url": url}
    else:
        given = {"redis_url": url}
    with pytest.raises(ConfigError) as caught:
        merge(RouterConfig, given, **sources)
    assert CANARY not in str(caught.value)
    assert caught.value.field == "redis_url"


@pytest.mark.parametrize(
    "url", [f"redis://u:{CANARY}/x@h:1/0", f"redis+sentinel://u:{CANARY}@a:x/m", f"http://:{CANARY}@h"]
)
def test_no_error_of_a_connection_shows_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url, timeout_s=1.0)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None or CANARY not in repr(caught.value.__cause__)


# ---- values, as a traceback or a log line shows them ----


def test_no_repr_of_a_value_that_holds_a_secret_shows_it() -> None:
    secret = CANARY.encode()
    sentinel = parse_sentinel_url(f"redis+sentinel://u:{CANARY}@a/m")
    values = [
        ServerTls(Path("a"), Path("b"), b"", secret),
        ClusterTls(b"", b"", secret),
        sentinel,
        KeySet(secret),
        KeyEntry("id", "tenant", CANARY, 0),
        IdentityHeader(secret.ljust(32)[:32], "m", "t", "float32", 16),
        KvAddress("ucx", "h", 0, secret),
        SlabHandle("p", "i", "a", 0, 1, 0, 1, 0, 1, 7, 1, 1, 1, mac=secret),
    ]
    for value in values:
        assert CANARY[:20] not in repr(value), type(value)
        assert secret[:20].hex() not in repr(value)
        assert type(value).__name__ in repr(value)


LOGS = """
import sys, threading
import structlog, logging
from diptych.common.observe.logging import setup_logging
setup_logging()
word = "".join(chr(ord(c) - 1) for c in sys.argv[1])
def fails(prompt, key={"authorization": word}):
    held = [prompt]
    raise RuntimeError("said")
for log in (structlog.get_logger("a"), logging.getLogger("b")):
    try:
        fails(word)
    except RuntimeError:
        log.exception("failed")
thread = threading.Thread(target=fails, args=(word,))
thread.start()
thread.join()
fails(word)
"""


@pytest.mark.parametrize("form", ["0", "1"], ids=["for people", "json"])
def test_no_traceback_shows_a_variable(form: str) -> None:
    """Also of a thread, and of an error that nobody caught."""
    env = {**os.environ, "DIPTYCH_LOG_JSON": form, "DIPTYCH_LOG_LEVEL": "DEBUG"}
    shifted = "".join(chr(ord(char) + 1) for char in CANARY)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOGS, shifted], env=env, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stderr.count("RuntimeError") >= 4
    assert "said" in done.stderr
    assert CANARY not in done.stderr


# ---- the router's APIs ----

SERVER = """
import asyncio, json, sys
from pathlib import Path
from diptych.common.observe.logging import setup_logging
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.server import ApiServers

class Breaks(FakeRouterApi):
    async def prepare(self, spec):
        if spec.request_id == "breaks":
            raise RuntimeError("a bug")
        return await super().prepare(spec)

async def main():
    setup_logging(role="router")
    api = Breaks(hello_script())
    servers = ApiServers("127.0.0.1", 0, 0, keys=Authenticator(Path(sys.argv[1]), now=lambda: 0.0))
    at = await servers.start(api, api.metrics, lambda tenant: {})
    print(json.dumps([at.http, at.grpc]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await servers.stop(1.0)

asyncio.run(main())
"""


@pytest.mark.parametrize("form", ["0", "1"], ids=["for people", "json"])
async def test_the_router_logs_neither_keys_nor_prompts_at_debug_level(tmp_path: Path, form: str) -> None:
    """Requests that succeed, are refused for their key or their content, and meet a bug; by both APIs."""
    file = tmp_path / "keys.json"
    key, _ = add_key(file, "acme", now=0.0)
    wrong = key[:-4] + "AAAA"
    env = {**os.environ, "DIPTYCH_LOG_JSON": form, "DIPTYCH_LOG_LEVEL": "DEBUG"}
    process = subprocess.Popen(  # noqa: ASYNC220 - a moment, before anything else runs here  # ends: with its stdin
        [sys.executable, "-P", "-c", SERVER, str(file)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        http, rpc = json.loads(await asyncio.to_thread(process.stdout.readline))
        texts = []
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=WAIT_S) as client:
            for given in (key, wrong):
                headers = {"authorization": f"Bearer {given}"}
                bodies: list[dict[str, Any]] = [
                    {"prompt": PROMPT}, {"prompt": PROMPT, "temperature": PROMPT}, {"prompt": [PROMPT]},
                    {"prompt": PROMPT, "request_id": "breaks"}, {"prompt": PROMPT, PROMPT: 1, "tools": [PROMPT]},
                ]  # fmt: skip
                answers = [await client.post("/v1/completions", json=body, headers=headers) for body in bodies]
                answers.append(await client.post("/v1/completions", content=PROMPT.encode(), headers=headers))
                answers.append(await client.get("/status.json", headers=headers))
                answers.append(await client.get("/metrics", headers=headers))
                texts += [answer.text + json.dumps(dict(answer.headers)) for answer in answers]
                statuses = [answer.status_code for answer in answers]
                assert set(statuses) == ({401} if given == wrong else {200, 400, 500}), statuses
                async with AsyncClient(rpc, api_key=given, timeout_s=WAIT_S) as sdk:
                    for more in ({}, {"request_id": "breaks"}, {"temperature": -1.0}):
                        try:
                            await sdk.generate(prompt=PROMPT, **more)  # type: ignore[arg-type]
                        except DiptychError as error:
                            texts.append(str(error))
    finally:
        _, log = await asyncio.to_thread(process.communicate)
    assert log.count("a bug") >= 2  # its traceback
    assert "acme" in log
    for where, text in {"log": log, "answers": "".join(texts)}.items():
        for word in (key, key[17:], wrong, wrong[17:]):
            assert word not in text, where
    assert PROMPT not in log
    assert PROMPT not in "".join(text for text in texts if "a bug" in text)


def test_children_that_connect_to_nobody_get_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRIVATE:
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("DIPTYCH_LOG_LEVEL", "DEBUG")
    assert {"DIPTYCH_REDIS_URL", "DIPTYCH_API_KEY"} <= PRIVATE
    assert CANARY not in environment(X="y").values()
    assert environment(X="y").items() >= {"DIPTYCH_LOG_LEVEL": "DEBUG", "X": "y", "PATH": os.environ["PATH"]}.items()
    # The parts of a cluster get the address of Redis from `up` itself, and the key of its clients not at all.
    assert not {"DIPTYCH_REDIS_URL", "DIPTYCH_API_KEY"} & child_environment(UpConfig).keys()


# ---- a running cluster ----


def processes(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def refusal(address: str, method: str) -> str:
    """Of an empty call without metadata."""
    with grpc.insecure_channel(address) as channel:
        try:
            list(channel.stream_stream(method)(iter(()), timeout=WAIT_S))
        except grpc.RpcError as error:
            return str(error.details())
    return ""


def ask(cluster: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "local_prefill_max_tokens": 0}
    headers = {"x-request-id": "mine-alone", "x-diptych-explain": "1"}
    answer = httpx.post(f"{cluster.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    assert "predicted_ttft_s" in answer.text  # its explanation
    return answer


@pytest.mark.multiproc
def test_a_cluster_shows_its_secret_nowhere(cluster: Any) -> None:
    """Neither the cluster secret nor what is derived from it; nor is a prompt in a log."""
    secret = load_secret(cluster.folder.secret)
    addresses = [cluster.child(name).address for name in cluster.workers()]
    keys = [
        call_key(secret),
        operator_key(secret),
        *(derive_key(secret, purpose) for purpose in (TICKETS, KV, "block identity", "tenant salt")),
    ]
    hidden = {secret.hex(), *(key.hex() for key in keys)}
    hidden |= {call_token(call_key(secret), address) for address in addresses}
    shown = {"answer": ask(cluster).text}
    for path in ("/status", "/status.json", "/metrics", "/v1/models", "/openapi.json", "/nowhere"):
        shown[path] = httpx.get(cluster.http_url + path, timeout=WAIT_S).text
    pids = [cluster.state.pid, *(child.pid for child in cluster.state.children)]
    for pid in pids:
        for process in processes(pid):
            shown[f"arguments of {process.pid}"] = " ".join(process.cmdline())
            shown[f"environment of {process.pid}"] = json.dumps(process.environ())
    logs = {child.name: Path(child.log).read_text(errors="replace") for child in cluster.state.children}
    shown |= logs | {"output": cluster.log(), "state": cluster.folder.state_file.read_text()}
    get_info = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/GetInfo"
    shown |= {name: refusal(cluster.child(name).address, get_info) for name in cluster.workers()}
    for where, text in shown.items():
        assert text, where
        for word in hidden:
            assert word not in text, where
            assert word not in text.lower(), where
    for name, text in logs.items():
        assert PROMPT not in text, name


@pytest.mark.multiproc
def test_what_a_password_needs_only_its_users_get(cluster: Any) -> None:
    """The Redis of `up` has none; what names it is in the environment of those who connect to it, and in no arguments."""
    for child in cluster.state.children:
        for process in processes(child.pid):
            assert "redis.sock" not in " ".join(process.cmdline()) or child.role == "redis", child.name
            found = {name for name in PRIVATE & process.environ().keys() if name.startswith("DIPTYCH_")}
            connects = child.role != "redis" and process.pid == child.pid
            assert found == ({"DIPTYCH_REDIS_URL"} if connects else set()), (child.name, process.cmdline())


@pytest.mark.multiproc
def test_metrics_show_no_request(cluster: Any) -> None:
    ask(cluster)
    for child in cluster.state.children:
        if child.metrics:
            text = httpx.get(f"http://{child.metrics}/metrics", timeout=WAIT_S).text
            assert "diptych_" in text
            for word in (PROMPT, "mine-alone", "tenant"):
                assert word not in text, child.name
