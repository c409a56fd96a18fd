"""Requests of `diptych up` to its router with keys and TLS; with certificates made for the test."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest
import trustme

from diptych.cli.up.readiness import first_answer, is_ready
from diptych.common.tls import load_server_tls
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych_tests.http_api import api_servers

grpc.aio.init_grpc_aio()


def issue(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued = trustme.CA().issue_cert("public.example")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(cert), append=True)
    issued.private_key_pem.write_to_path(str(key))
    return cert, key


async def test_the_probes_know_key_and_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = issue(tmp_path, "own")
    other, _ = issue(tmp_path, "other")
    api_key, _ = add_key(tmp_path / "keys.json", "acme", now=0.0)
    keys = Authenticator(tmp_path / "keys.json", now=time.monotonic)
    router_api = FakeRouterApi(hello_script())
    async with api_servers(router_api, keys=keys, tls=load_server_tls(cert, key)) as at:
        host, _, port = at.http.rpartition(":")

        def ready(tls_cert: Path | None) -> bool:
            return is_ready(host, int(port), timeout_s=300.0, tls_cert=tls_cert)[0]

        monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
        assert not await asyncio.to_thread(ready, cert)
        monkeypatch.setenv("DIPTYCH_API_KEY", api_key)
        assert await asyncio.to_thread(ready, cert)
        assert not await asyncio.to_thread(ready, other)
        answer = await asyncio.to_thread(lambda: first_answer(host, int(port), timeout_s=300.0, tls_cert=cert))
        assert answer.text == "Hello there"
