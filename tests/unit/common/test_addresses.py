"""Issue 15, 4.12: hosts that have IPv6 only. Every address is written and read with brackets where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cli.serve.config import ServeConfig
from diptych.cli.up import processes
from diptych.cli.up.cluster_plan import ClusterPlan
from diptych.cli.up.config import UpConfig
from diptych.cli.up.processes import free_port, require_free_port
from diptych.cli.up.run_folder import RunFolder
from diptych.common import child
from diptych.common.addresses import host_port, is_loopback, is_wildcard, loopback_beside, reachable
from diptych.common.errors import ConfigError
from diptych.common.store.redis_url import connect, parse_sentinel_url
from diptych.router.config import RouterConfig
from diptych.worker.config import WorkerConfig
from diptych_tests.machine import NEEDS_IPV6

ROOT = Path(__file__).resolve().parents[3]


def test_forms() -> None:
    assert host_port("127.0.0.1", 80) == "127.0.0.1:80"
    assert host_port("some.host", 80) == "some.host:80"
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("fe80::1%eth0", 80) == "[fe80::1%eth0]:80"
    assert (loopback_beside("::"), loopback_beside("fd00::2"), loopback_beside("10.0.0.1")) == (
        "::1",
        "::1",
        "127.0.0.1",
    )
    assert (reachable("::"), reachable("0.0.0.0"), reachable("fd00::2")) == ("::1", "127.0.0.1", "fd00::2")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("127.1", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("a.localhost.", True),
        ("127.evil.example", False),
        ("10.0.0.5", False),
        ("fd00::2", False),
        ("::ffff:10.0.0.5", False),
        ("::", False),
        ("0.0.0.0", False),
        ("some.host.example", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    assert is_wildcard(host) == (host in ("::", "0.0.0.0"))


def test_1_ports_of_children_are_none_that_an_outgoing_connection_can_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = tmp_path / "range"
    monkeypatch.setattr(processes, "_EPHEMERAL", kernel)
    for text, ports in (("32768\t60999", range(10_000, 32_768)), ("11000 60999", range(10_000, 11_000))):
        kernel.write_text(text)
        assert {free_port("127.0.0.1") in ports for _ in range(50)} == {True}
    for text in ("1024 65535", "10999 65535"):
        kernel.write_text(text)
        assert free_port("127.0.0.1") > 0
    kernel.unlink()
    assert free_port("127.0.0.1") > 0
    with pytest.raises(ConfigError, match="no free port"):
        free_port("192.0.2.1")


def test_1_no_port_is_given_twice() -> None:
    """Whoever got it may not listen yet."""
    assert len({free_port("127.0.0.1") for _ in range(1000)}) == 1000


def test_15_no_port_is_given_by_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters that start at once: what the first one's worker is to listen on, seconds later."""
    source = "from diptych.cli.up.processes import free_port; print(free_port('127.0.0.1'), flush=True); input()"
    with child.start([sys.executable, "-P", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        monkeypatch.setattr(processes, "_ports_of_nobody", lambda ephemeral: range(port, port + 1))
        assert free_port("127.0.0.1") != port
        other.communicate(b"\n")
    assert free_port("127.0.0.1") == port


@NEEDS_IPV6
def test_ports_of_the_right_family() -> None:
    port = free_port("::1")
    require_free_port("http_port", "::1", port)
    with pytest.raises(ConfigError, match="is not an address"):
        require_free_port("http_port", "[::1]", port)


@pytest.mark.parametrize(
    ("host", "loopback", "url"),
    [
        pytest.param("::1", "::1", "http://[::1]:8000", marks=NEEDS_IPV6),
        pytest.param("::", "::1", "http://[::1]:8000", marks=NEEDS_IPV6),
        pytest.param("fd00::2", "::1", "http://[fd00::2]:8000", marks=NEEDS_IPV6),
        ("127.0.0.1", "127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "127.0.0.1", "http://127.0.0.1:8000"),
    ],
)
def test_a_cluster_is_of_one_family(host: str, loopback: str, url: str, tmp_path: Path) -> None:
    plan = ClusterPlan(UpConfig(host=host, insecure=True), RunFolder(tmp_path), tmp_path, "m", threads=1)
    assert plan.http_url == url
    assert plan.grpc_address == url.removeprefix("http://").replace("8000", "50050")
    where = host_port(loopback, 1).removesuffix("1")
    assert plan.redis_url == f"unix://{tmp_path}/redis.sock"
    (spec, *_) = plan.worker_specs()
    command = spec.command()
    assert command[command.index("--host") + 1] == command[command.index("--metrics-host") + 1] == loopback
    for address in (plan.addresses[spec.name], plan.metrics[spec.name]):
        assert address.startswith(where)


def test_loopback_of_either_family_needs_no_key() -> None:
    for host in ("::1", "127.0.0.1"):
        RouterConfig(model="m", host=host)
        WorkerConfig(model="m", role="decode", worker_id="d", host=host, secret_file="s")
        UpConfig(host=host)
        assert ServeConfig(host=host).parts(model="m", name="m", secret_file="s")[1].host == host
    for host in ("::", "fd00::2", "127.evil.example"):
        with pytest.raises(ConfigError, match="host="):
            UpConfig(host=host)


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("[::1]:26380", (("::1", 26380),)),
        ("[fd00::2]", (("fd00::2", 26379),)),
        ("a:1,[::1]:2,10.0.0.1", (("a", 1), ("::1", 2), ("10.0.0.1", 26379))),
    ],
)
def test_redis_urls(hosts: str, found: tuple[tuple[str, int], ...]) -> None:
    parsed = parse_sentinel_url(f"redis+sentinel://u:p@{hosts}/main/3")
    assert parsed is not None
    assert (parsed.sentinels, parsed.service, parsed.db, parsed.password) == (found, "main", 3, "p")
    assert connect("redis://[::1]:6380/0", timeout_s=1.0).first == ("::1", 6380)


def test_addresses_are_written_in_one_place() -> None:
    """`{host}:{port}` in an f-string would be no address for an IPv6 host."""
    found = []
    for room in (
        "cli",
        "client",
        "common",
        "decode",
        "engine",
        "kvtransfer",
        "loadtest",
        "prefill",
        "router",
        "rpc",
        "worker",
    ):
        for path in (ROOT / room).rglob("*.py"):
            if path.name == "addresses.py" or path.name.startswith(("bench_", "fake_")) or "bench" in path.parent.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr) and joins_host_and_port(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def joins_host_and_port(text: ast.JoinedStr) -> bool:
    parts = text.values
    for host, colon, port in zip(parts, parts[1:], parts[2:], strict=False):
        if isinstance(colon, ast.Constant) and colon.value == ":" and isinstance(host, ast.FormattedValue):
            names = ast.unparse(host).lower(), ast.unparse(port).lower()
            if "host" in names[0] or "loopback" in names[0] or "port" in names[1]:
                return True
    return False


def test_the_search_finds_such_a_text() -> None:
    for source in ('f"{host}:{port}"', 'f"http://{self.host}:{http_port}/x"', 'f"{LOOPBACK}:{n}"'):
        (node,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr)]
        assert joins_host_and_port(node)
