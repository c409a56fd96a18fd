"""Other users of the machine: every listening socket of a running cluster is in the table of docs/deploy.md, and a
stranger gets no further there than the table says. No secret is where others could read it."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.rpc.v1 import decode_pb2, prefill_pb2, worker_pb2

pytestmark = pytest.mark.multiproc

WAIT_S = 300.0
DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
SERVICES = [*decode_pb2.DESCRIPTOR.services_by_name.values(), *prefill_pb2.DESCRIPTOR.services_by_name.values()]
SERVICES += worker_pb2.DESCRIPTOR.services_by_name.values()
METHODS = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
LOOKASIDE = "/diptych.rpc.v1.Lookaside/Attach"
NOBODY = 65534


def committed_table() -> Counter[tuple[str, str]]:
    """(process, socket) of each row."""
    text = DEPLOY.read_text(encoding="utf-8").split("| process | socket |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \| (\w+) \|", text, re.MULTILINE)
    assert len(rows) == 10
    return Counter(rows)


def processes(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def tcp_ports(pid: int) -> Iterator[tuple[str, int]]:
    """(host, port) of each listening socket of a process and its children; UDP sockets, too."""
    for process in processes(pid):
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN or (found.type == socket.SOCK_DGRAM and found.laddr):
                yield found.laddr.ip.removeprefix("::ffff:"), found.laddr.port


def unix_sockets(pid: int) -> set[str]:
    """Listening Unix sockets of a process and its children: a path, or @name of an abstract one."""
    accepting = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & 0x10000:
            accepting[f"socket:[{inode}]"] = path[0] if path else ""
    own = {os.readlink(fd) for process in processes(pid) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
    return {path for inode, path in accepting.items() if inode in own}


def client_port(cluster, name: str) -> int:
    """Of decode's endpoint for clients, as its log says."""
    lines = [json.loads(line) for line in Path(cluster.child(name).log).read_text().splitlines()]
    (address,) = [line["address"] for line in lines if line["event"] == "accepting tickets of clients"]
    return int(address.rpartition(":")[2])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def census(cluster) -> dict[tuple[str, str], list[int]]:
    """(process, socket) -> ports; asserts that each is on loopback."""
    found: dict[tuple[str, str], list[int]] = {}
    assert not list(tcp_ports_of_one(cluster.state.pid))
    for child in cluster.state.children:
        known = {port_of(child.address): "grpc"} if child.role != "redis" else {}
        if child.metrics:
            known[port_of(child.metrics)] = "metrics"
        if child.role == "decode":
            known[client_port(cluster, child.name)] = "client"
        if child.role == "router":
            known = {port_of(cluster.http_url): "http", port_of(cluster.grpc_address): "grpc"}
        for host, port in tcp_ports(child.pid):
            assert host == "127.0.0.1", (child.name, host, port)
            found.setdefault((child.role, known.get(port, "kv")), []).append(port)
        for path in unix_sockets(child.pid):
            assert path == str(cluster.folder.redis_socket), (child.name, path)
            found.setdefault((child.role, "unix"), []).append(0)
    return found


def tcp_ports_of_one(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_every_listening_socket_is_in_the_table(cluster) -> None:
    found = census(cluster)
    table = committed_table()
    roles = Counter(child.role for child in cluster.state.children)
    assert found.keys() == table.keys()
    for (role, kind), ports in found.items():
        # UCX opens its own, now and then a further one for a connection (seen: two of one prefill worker).
        assert len(ports) == roles[role] or (kind == "kv" and len(ports) > roles[role]), (role, kind, ports)


def outcome(address: str, method: str) -> tuple[grpc.StatusCode, str]:
    """Of an empty call without metadata."""
    with grpc.insecure_channel(address) as channel:
        try:
            list(channel.stream_stream(method)(iter(()), timeout=WAIT_S))
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_workers_answer_a_stranger_health_checks_only(cluster) -> None:
    for name in cluster.workers():
        address = cluster.child(name).address
        for method in METHODS:
            code, text = outcome(address, method)
            assert code is grpc.StatusCode.UNAUTHENTICATED, (name, method, code)
            assert "token of the cluster secret" in text
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        cluster.audit(name)


def test_the_port_for_clients_serves_tickets_only(cluster) -> None:
    for child in cluster.state.children:
        if child.role != "decode":
            continue
        address = f"127.0.0.1:{client_port(cluster, child.name)}"
        for method in METHODS - {LOOKASIDE}:
            assert outcome(address, method)[0] is grpc.StatusCode.UNIMPLEMENTED, method
        redeem = decode_pb2.TicketCommands(redeem=[decode_pb2.Redeem(attempt="a", ticket=b"DT2" + bytes(64))])
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(
                LOOKASIDE,
                request_serializer=decode_pb2.TicketCommands.SerializeToString,
                response_deserializer=decode_pb2.StepBatch.FromString,
            )(iter([redeem]), timeout=WAIT_S)
            ends = [event.end for batch in call for event in batch.events]
        assert [end.failure.reason for end in ends] == ["TICKET_REFUSED"]


def test_redis_has_no_port_and_its_socket_is_its_users(cluster) -> None:
    path = cluster.folder.redis_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tcp_ports(cluster.child("redis").pid))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        assert connection.recv(64) == b"+PONG\r\n"


AS_A_STRANGER = """
import json, os, socket, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
refused = {{}}
for path in sys.argv[2:]:
    try:
        open(path, "rb").read()
        refused[path] = False
    except PermissionError:
        refused[path] = True
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    refused[sys.argv[1]] = False
except PermissionError:
    refused[sys.argv[1]] = True
print(json.dumps(refused))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_opens_neither_redis_nor_the_secret(cluster) -> None:
    """Asked by that user's rights, with the run folder open to him: the files protect themselves."""
    folder = cluster.folder
    files = [folder.secret, folder.state_file, *(f"/proc/{c.pid}/environ" for c in cluster.state.children)]
    opened = [parent for parent in (folder.root, *folder.root.parents) if not parent.stat().st_mode & 0o001]
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    try:
        for parent in opened:
            parent.chmod(modes[parent] | 0o055)
        command = [sys.executable, "-I", "-S", "-c", AS_A_STRANGER.format(nobody=NOBODY)]
        command += [str(folder.redis_socket), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)
    refused = json.loads(done.stdout)
    assert len(refused) == len(files) + 1
    assert all(refused.values()), refused


def test_serve_answers_a_stranger_no_more(colocated) -> None:
    urls = (colocated.http_url, colocated.grpc_address, colocated.metrics_url.removesuffix("/metrics"))
    public = {port_of(url) for url in urls}
    own = [(host, port) for host, port in tcp_ports(colocated.process.pid) if port not in public]
    assert [host for host, _ in own] == ["127.0.0.1"]
    (worker,) = [f"127.0.0.1:{port}" for _, port in own]
    assert {outcome(worker, method)[0] for method in METHODS} == {grpc.StatusCode.UNAUTHENTICATED}
    assert not unix_sockets(colocated.process.pid)
    body = {"prompt": "Hello", "max_tokens": 2}
    assert httpx.post(f"{colocated.http_url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200
