"""Wall clocks that jump by an hour, each process's by itself, and monotonic clocks with another beginning in each:
nothing expires, nothing is lost, and no time that is reported is negative."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as aioredis

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
HOUR_NS = 3600 * 10**9
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_ns;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_OFFSET");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *page = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
  if (page != MAP_FAILED) offset_ns = page;
  close(fd);
}

int clock_gettime(clockid_t id, struct timespec *ts) {
  int failed = syscall(SYS_clock_gettime, id, ts);
  if (!failed && offset_ns && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
    int64_t ns = ts->tv_sec * 1000000000LL + ts->tv_nsec + *offset_ns;
    ts->tv_sec = ns / 1000000000LL;
    ts->tv_nsec = ns % 1000000000LL;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  struct timespec ts;
  (void)tz;
  clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (out) *out = ts.tv_sec;
  return ts.tv_sec;
}
"""


class Clocks:
    """The wall clock of each process, by its name."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self._folder = folder
        source = folder / "clock.c"
        source.write_text(SHIM)
        self.library = folder / "clock.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(self.library), str(source)]
        subprocess.run(command, check=True, capture_output=True)

    def prefix(self, name: str) -> list[str]:
        self.set(name, 0)
        return ["env", f"CLOCK_OFFSET={self._folder / name}.clock", f"LD_PRELOAD={self.library}"]

    def set(self, name: str, offset_ns: int) -> None:
        """In place: the process has it mapped."""
        fd = os.open(self._folder / f"{name}.clock", os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, struct.pack("=q", offset_ns), 0)
        os.close(fd)


async def not_negative(cluster: FakeModelCluster) -> None:
    for line in (await cluster.get("/metrics")).text.splitlines():
        if "_seconds" in line and not line.startswith("#"):
            assert float(line.rpartition(" ")[2]) >= 0, line


def times(answer: Any) -> list[float]:
    why = answer.explanation
    return [why.ttft_s, why.total_s, why.reserved_s, why.first_token_s, why.kv_complete_s, why.prefill_queue_s]


async def test_wall_clocks_jump_an_hour_forth_and_back(tmp_path: Path, compiler: str) -> None:
    clocks = Clocks(tmp_path, compiler)
    async with fake_model_cluster(tmp_path, decode=2, prefix=clocks.prefix) as cluster, cluster.client() as client:
        numbers = itertools.count()
        incarnations = {one["id"]: one["incarnation"] for one in (await cluster.status())["cluster"]["workers"]}
        for who, offset in itertools.product(("router", "decode-0", "prefill-0", "redis"), (HOUR_NS, -HOUR_NS, 0)):
            for name in ("decode-0", "decode-1"):
                await cluster.hold(name, after_steps=6)
            asks = [ask(next(numbers)) for _ in range(3)]
            answering = [asyncio.create_task(client.generate(**asked)) for asked in asks]
            await waiting.until(
                lambda: any(cluster.gates.held(name) for name in ("decode-0", "decode-1")), every_s=0.01
            )
            clocks.set(who, offset)
            for name in ("decode-0", "decode-1"):
                cluster.gates.open(name)
            for asked, answer in zip(asks, await asyncio.gather(*answering), strict=True):
                check(answer, asked)
                assert not answer.explanation.attempts
                assert min(times(answer)) >= 0, answer.explanation
            await leases_are_written(cluster)
            await cluster.until_usable()
        await not_negative(cluster)
        now = {one["id"]: one["incarnation"] for one in (await cluster.status())["cluster"]["workers"]}
        assert now == incarnations
        await cluster.idle_again()


async def leases_are_written(cluster: FakeModelCluster) -> None:
    """Each is renewed from now on."""
    client = aioredis.Redis(port=cluster.redis_port, protocol=2)
    names = [f"{{diptych}}:worker:{name}" for name in cluster.workers()]
    try:

        async def renewed() -> bool:
            return all([await client.pttl(name) > 4000 for name in names])

        await waiting.until(renewed, "every lease is whole")
    finally:
        await client.aclose()


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux")
async def test_monotonic_clocks_with_another_beginning_in_each_process(tmp_path: Path) -> None:
    """As on hosts that booted at different times: no two processes compare theirs."""
    days = {"prefill-0": 1, "decode-0": 400, "decode-1": 30}

    def prefix(name: str) -> list[str]:
        base = str(days.get(name, 0) * 86_400)
        return ["unshare", "--time", "--monotonic", base, "--boottime", base] if base != "0" else []

    async with fake_model_cluster(tmp_path, decode=2, prefix=prefix) as cluster, cluster.client() as client:
        for number in range(12):
            answer = await client.generate(**ask(number))
            check(answer, ask(number))
            assert min(times(answer)) >= 0, answer.explanation
            assert max(times(answer)) < 60, answer.explanation
        await not_negative(cluster)
        await cluster.idle_again()
