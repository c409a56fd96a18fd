"""Limits of this host, read from the kernel, for GetStats and `diptych doctor`. Information only."""

from __future__ import annotations

import os
import resource
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diptych.common.cores import usable_cores

UNLIMITED = 2**64 - 1
RDMA_MODULES = ("ib_core", "ib_uverbs", "rdma_ucm")
"""Kernel modules needed by user-space RDMA with any card; its own driver shows as a device."""
UCX_FOLDERS = {
    "nixl-cu12": "nixl_cu12.libs/ucx",
    "nixl-cu13": "nixl_cu13.libs/ucx",
    "libucx (of ucxx)": "libucx/lib/ucx",
}
"""Folders of loadable UCX parts in packages that contain UCX, below site-packages."""
INFINIBAND_PART = "libuct_ib.so*"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about the host.

    Args:
        memlock_bytes, max_open_files: UNLIMITED: without limit.
        shm_bytes, shm_free_bytes: of /dev/shm; 0: there is none.
        rdma_missing: what RDMA lacks, in words; empty: nothing.
    """

    wall_clock_s: float
    cpus: int
    load_1m: float
    open_files: int
    max_open_files: int
    memlock_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    rdma_devices: tuple[str, ...]
    rdma_missing: tuple[str, ...]
    hostname: str


def read_host_facts(root: Path = Path("/"), site: Path | None = None) -> HostFacts:
    """Read the facts. `root`: parent of proc/, sys/ and dev/; another folder in tests. `site`: site-packages; None:
    this interpreter's."""
    devices = _names(root / "sys/class/infiniband")
    ucx = ucx_parts(Path(sysconfig.get_path("platlib")) if site is None else site)
    shm_bytes, shm_free = _shm(root / "dev/shm")
    return HostFacts(
        wall_clock_s=time.time(),
        cpus=usable_cores(root),
        load_1m=os.getloadavg()[0],
        open_files=len(_names(root / "proc/self/fd")),
        max_open_files=_limit(resource.RLIMIT_NOFILE),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        rdma_devices=tuple(devices),
        rdma_missing=(*_rdma_missing(root, devices), *_ucx_missing(ucx)),
        hostname=socket.gethostname(),
    )


def _rdma_missing(root: Path, devices: list[str]) -> list[str]:
    missing = [] if devices else ["no InfiniBand or RoCE device in /sys/class/infiniband"]
    for module in RDMA_MODULES:  # a module built into the kernel is in /sys/module, too
        if not (root / "sys/module" / module).exists():
            missing.append(f"kernel module {module} is not loaded (modprobe {module})")
    if devices and (root / "proc/driver/nvidia").exists() and not (root / "sys/module/nvidia_peermem").exists():
        missing.append(
            "kernel module nvidia_peermem is not loaded (modprobe nvidia_peermem; a driver with DMA-BUF needs none)"
        )
    if devices and not any(name.startswith("uverbs") for name in _names(root / "dev/infiniband")):
        missing.append("no /dev/infiniband/uverbs*: give the devices to this container")
    return missing


@cache
def ucx_parts(site: Path) -> dict[str, bool]:
    """Installed packages with UCX, and whether it supports InfiniBand and RoCE."""
    folders = {package: site / folder for package, folder in UCX_FOLDERS.items()}
    return {package: any(at.glob(INFINIBAND_PART)) for package, at in folders.items() if at.is_dir()}


def _ucx_missing(parts: dict[str, bool]) -> list[str]:
    if any(parts.values()):
        return []
    seen = f"the UCX of {' and '.join(parts)} has" if parts else "there is"
    return [f"{seen} no part for InfiniBand (libuct_ib): install {_nixl_package()}, whose UCX has it"]


def _nixl_package() -> str:
    """The package for torch's CUDA version, if this process has loaded a torch with CUDA."""
    cuda: str | None = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return f"nixl-cu{cuda.partition('.')[0]}" if cuda else "nixl-cu12"


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _shm(folder: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
