"""A client without a certificate of the cluster can neither register a worker nor call one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import trustme

from diptych.common.errors import NoWorkerError
from diptych.common.secret import call_token
from diptych.common.tls import ClusterTls, load_cluster_tls
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.rpc import channels
from diptych.rpc.channels import open_channel
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych_tests.router_fleet import make_model_folder, running

WAIT_S = 60.0


class Authority:
    """An authority, and what its members are configured with."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._ca = trustme.CA()
        issued = self._ca.issue_cert("127.0.0.1")
        self.files = {name: str(folder / name) for name in ("cluster_ca", "cluster_cert", "cluster_key")}
        self._ca.cert_pem.write_to_path(self.files["cluster_ca"])
        issued.cert_chain_pems[0].write_to_path(self.files["cluster_cert"])
        issued.private_key_pem.write_to_path(self.files["cluster_key"])
        found = load_cluster_tls(*self.files.values())
        assert found is not None
        self.tls: ClusterTls = found


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def strangers(tmp_path: Path, ours: Authority) -> dict[str, ClusterTls | None]:
    """Clients and servers that are not members, by what they have."""
    other = Authority(tmp_path / "other").tls
    return {
        "nothing": None,
        "another authority": other,
        "ours to trust, another's certificate": replace(other, ca=ours.tls.ca),
    }


async def code_of(address: str, tls: ClusterTls | None, token: str = "") -> grpc.StatusCode:
    """Of GetInfo."""
    async with open_channel(address, tls, token) as channel:
        try:
            await WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_worker_answers_members_only(
    pd: ModuleType, ours: Authority, strangers: dict[str, ClusterTls | None]
) -> None:
    """Nor does the secret's token help: with mTLS a worker has no other door."""
    config: dict[str, Any] = {"decode_config": ours.files, "prefill_config": ours.files}
    async with pd.cluster(**config) as cluster:
        for worker in cluster.workers:
            assert await code_of(worker.address, ours.tls) is grpc.StatusCode.OK
            for name, tls in strangers.items():
                assert await code_of(worker.address, tls) is grpc.StatusCode.UNAVAILABLE, name
            token = call_token(pd.CALL_KEY, worker.address)
            assert await code_of(worker.address, None, token) is grpc.StatusCode.UNAVAILABLE


@contextlib.contextmanager
def serving_as(tls: ClusterTls | None, patch: pytest.MonkeyPatch) -> Any:
    """Fake workers that start within have this certificate, or no TLS."""
    bind = channels.bind
    with patch.context() as within:
        within.setattr(channels, "bind", lambda server, host, port: bind(server, host, port, _server(tls)))
        yield


def _server(tls: ClusterTls | None) -> grpc.ServerCredentials | None:
    """One that asks for no certificate: it takes whoever calls."""
    return None if tls is None else grpc.ssl_server_credentials([(tls.key, tls.cert)])


@pytest.fixture
async def fleet(tmp_path: Path, ours: Authority) -> AsyncIterator[Any]:
    async with running(make_model_folder(tmp_path / "tiny"), tmp_path, **ours.files) as found:
        yield found


async def test_a_lease_without_a_certificate_registers_no_worker(
    fleet: Any, ours: Authority, strangers: dict[str, ClusterTls | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written into the store, as by whoever can reach it. The router places nothing there and sends it no prompt."""
    fakes = {}
    for number, (name, tls) in enumerate(strangers.items()):
        with serving_as(tls, monkeypatch):
            fakes[name] = await fleet.add(f"fake-{number}")
    with serving_as(ours.tls, monkeypatch):
        await fleet.add("p0", "prefill")
    cluster = fleet.frontend._cluster
    await fleet.until(lambda: len(cluster.snapshot().prefill) == 1)  # the member of ours is reached
    with pytest.raises(NoWorkerError):
        await fleet.ask()
    for name, fake in fakes.items():
        assert fake.num_streams == 0, name
        assert not fake.submits, name
    with serving_as(ours.tls, monkeypatch):
        real = await fleet.add("real")
    await fleet.until(lambda: len(cluster.snapshot().decode) == 1)
    await fleet.ask()
    assert len(real.submits) == 1
    assert not any(fake.submits for fake in fakes.values())


async def test_a_worker_that_takes_a_members_address_without_its_certificate_gets_nothing(
    fleet: Any, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that died: same name, life and port."""
    with serving_as(ours.tls, monkeypatch):
        await fleet.add("p0", "prefill")
        real = await fleet.add("d0")
    await fleet.until_ready()
    await fleet.ask()
    await real.kill()
    port = int(real.address.rpartition(":")[2])
    with serving_as(None, monkeypatch):
        fake = await FakeDecode(worker_id="d0", incarnation="i1").start(port)
        fleet.workers.append(fake)
    with pytest.raises(Exception, match=r"d0|decode"):
        await fleet.ask()
    assert fake.num_streams == 0
    assert len(real.submits) == 1
