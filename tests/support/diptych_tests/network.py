"""Hosts without containers: network namespaces behind one bridge, and faults of the links between them. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "iptables", "tc")),
    reason="needs root, iproute2 and iptables",
)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


class Host:
    """A namespace with one interface. `inside`: in front of a command that is to run in it; it execs the command."""

    def __init__(self, name: str, address: str, bridge: str, stack: ExitStack) -> None:
        self.name, self.address = name, address
        self.inside = ["ip", "netns", "exec", name]
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"{name}o", "master", bridge)
        run("ip", "link", "set", f"{name}o", "up")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")

    def link(self, state: str) -> None:
        """ "up" or "down"."""
        run("ip", "-n", self.name, "link", "set", "eth0", state)

    def vanish(self) -> None:
        """Its cable is gone: nobody is told."""
        run("ip", "link", "del", f"{self.name}o")

    def drop(self, *, of: Host | None = None, to: Host | None = None, share: float = 1.0) -> None:
        """Drop packets that come from, or go to, another host."""
        random = [] if share == 1.0 else ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        for chain, flag, other in (("INPUT", "-s", of), ("OUTPUT", "-d", to)):
            if other is not None:
                run(*self.inside, "iptables", "-A", chain, flag, other.address, *random, "-j", "DROP")

    def deliver(self) -> None:
        """No packet is dropped any more."""
        run(*self.inside, "iptables", "-F")

    def limit(self, rate: str = "") -> None:
        """What it sends goes at this rate, as `8mbit`; empty: at any."""
        tbf = ["root", "tbf", "rate", rate, "burst", "4kb", "latency", "10s"] if rate else ["root"]
        run(*self.inside, "tc", "qdisc", "replace" if rate else "del", "dev", "eth0", *tbf)


@contextmanager
def network(*names: str) -> Iterator[tuple[str, dict[str, Host]]]:
    """The address of this side, and hosts by name. Skips the test where there can be no namespaces."""
    number = 1 + os.getpid() % 250
    bridge, addresses = f"dpf{number:x}", (f"10.214.{number}.{n}" for n in range(1, 250))
    with ExitStack() as stack:
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(run, "ip", "link", "del", bridge)
            here = next(addresses)
            run("ip", "addr", "add", f"{here}/24", "dev", bridge)
            run("ip", "link", "set", bridge, "up")
            hosts = {
                name: Host(f"{bridge}h{i}", address, bridge, stack)
                for i, (name, address) in enumerate(zip(names, addresses, strict=False))
            }
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield here, hosts
