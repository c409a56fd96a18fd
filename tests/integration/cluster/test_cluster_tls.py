"""mTLS between the cluster's processes: peers without a certificate of the cluster are rejected, as servers and as
clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.errors import ConfigError
from diptych.common.tls import ClusterTls, load_cluster_tls
from diptych.rpc.channels import bind, cluster_server_credentials, new_server, open_channel
from diptych.rpc.health import Health
from diptych.worker.config import WorkerConfig

WAIT_S = 60.0

grpc.aio.init_grpc_aio()


def issue(authority: trustme.CA, folder: Path, name: str = "127.0.0.1") -> tuple[ClusterTls, dict[str, str]]:
    folder.mkdir()
    cert = authority.issue_cert(name)
    files = {"cluster_ca": folder / "ca.pem", "cluster_cert": folder / "cert.pem", "cluster_key": folder / "key.pem"}
    authority.cert_pem.write_to_path(str(files["cluster_ca"]))
    for blob in cert.cert_chain_pems:
        blob.write_to_path(str(files["cluster_cert"]), append=True)
    cert.private_key_pem.write_to_path(str(files["cluster_key"]))
    tls = load_cluster_tls(*files.values())
    assert tls is not None
    return tls, {key: str(file) for key, file in files.items()}


async def ask(port: int, tls: ClusterTls | None) -> str:
    async with open_channel(f"127.0.0.1:{port}", tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def test_only_members_speak_with_each_other(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    member, _ = issue(authority, tmp_path / "member")
    stranger, _ = issue(other, tmp_path / "stranger")
    elsewhere, _ = issue(authority, tmp_path / "elsewhere", "other.example")
    servers = []
    try:
        ports = []
        for tls in (member, stranger, elsewhere):
            server = new_server()
            servers.append(server)
            health = Health()
            await health.install(server)
            ports.append(bind(server, "127.0.0.1", 0, cluster_server_credentials(tls)))
            await server.start()
        assert await ask(ports[0], member) == "OK"
        assert await ask(ports[2], replace(member, name="other.example")) == "OK"
        assert await ask(ports[0], replace(member, name="other.example")) == "UNAVAILABLE"
        assert await ask(ports[0], elsewhere) == "OK"  # a member, whatever its host
        assert await ask(ports[0], None) == "UNAVAILABLE"
        assert await ask(ports[0], stranger) == "UNAVAILABLE"
        # A client that trusts the cluster but has another authority's certificate, and vice versa: both sides check.
        assert await ask(ports[0], replace(stranger, ca=member.ca)) == "UNAVAILABLE"
        assert await ask(ports[1], replace(member, ca=stranger.ca)) == "UNAVAILABLE"
        assert await ask(ports[1], member) == "UNAVAILABLE"  # no server of ours
        assert await ask(ports[2], member) == "UNAVAILABLE"  # of ours, but not of this host
    finally:
        for server in servers:
            await server.stop(0.0)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    _, files = issue(trustme.CA(), tmp_path / "a")
    _, others = issue(trustme.CA(), tmp_path / "b")
    assert load_cluster_tls("", "", "") is None
    bad = [
        (files | {"cluster_key": ""}, "cluster_key"),
        (files | {"cluster_ca": str(tmp_path / "nothing")}, "cluster_ca"),
        (files | {"cluster_ca": files["cluster_key"]}, "cluster_ca"),
        (files | {"cluster_cert": str(tmp_path / "nothing")}, "cluster_cert"),
        (files | {"cluster_key": others["cluster_key"]}, "cluster_cert"),
    ]
    for given, name in bad:
        with pytest.raises(ConfigError) as caught:
            load_cluster_tls(*given.values())
        assert caught.value.field == name, given


def test_a_worker_that_others_can_reach_needs_mtls_or_insecure(tmp_path: Path) -> None:
    _, files = issue(trustme.CA(), tmp_path / "a")
    with pytest.raises(ConfigError, match="cluster_ca"):
        WorkerConfig(host="0.0.0.0")
    WorkerConfig(host="0.0.0.0", insecure=True)
    WorkerConfig(host="0.0.0.0", **files)  # type: ignore[arg-type]
    WorkerConfig(host="127.0.0.1")
