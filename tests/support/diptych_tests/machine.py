"""Properties of the machine that a result should not depend on. Every failing test reports them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from functools import cache

import pytest

from diptych.common.compiled import LANES_VARIABLE, NativeError, find_compiler, register_lanes


@cache
def _compiler_version() -> str:
    try:
        path = find_compiler()
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=300, check=True).stdout
    except (NativeError, OSError, subprocess.SubprocessError) as error:
        return f"no compiler ({error})"
    return f"{path}: {shown.splitlines()[0]}"


@cache
def has_ipv6() -> bool:
    """Whether there is an IPv6 loopback. Engines of containers often give none."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def facts() -> list[str]:
    """Vectors, compiler, cores, load, and IPv6 where there is none."""
    asked = os.environ.get(LANES_VARIABLE)
    return [
        f"vectors: {register_lanes()} floats a register" + (f", {LANES_VARIABLE}={asked}" if asked else ""),
        f"compiler: {_compiler_version()}",
        f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()} ({platform.machine()})",
        "load: {:.2f} {:.2f} {:.2f} (1, 5, 15 minutes)".format(*os.getloadavg()),
        *([] if has_ipv6() else ["no IPv6"]),
    ]
