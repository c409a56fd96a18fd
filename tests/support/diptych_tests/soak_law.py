"""What the memory of a process under load may do: grow with what is used for the first time, and not with each request. Pure.

A process has its memory at first use: pools and rings page by page, allocators' arenas, caches up to their bounds. A slow machine
uses later what a fast one uses early, so the law is about work, not time. A life's first WARM requests say nothing. Of the others
the second half counts: first use is nearly over there, and a leak goes on. Memory that is one mapping of a fixed size is left
out by name (FIXED): it cannot leak, and its pages come with the highest number of transfers at once.

                     MiB |            ________~~~~    first use: flat in the second half
                         |     __----'      . -'      a leak: goes on
                         | .-'       . - '
                         +------|-------|------------  requests
                              WARM    half
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WARM, WARM_ROUTER = 300, 2300
"""Requests of the cluster since the process began. By then the pool of `make soak` was used several times over, and the router
has the 2,048 requests that it remembers."""
LEAST = 300
"""Requests after these: fewer say nothing."""
ONE_OFF_MIB, LEAK_KIB = 0.75, 0.2
"""What the second half may add in all, and for each request of it."""
FIXED = ("/memfd:diptych-kv",)
"""The staging ring."""
_END = 0.2
"""The share of the samples of that half by which its begin and its end are judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`requests`: ended so far, of the cluster; `mib`: what the process alone has, without FIXED."""

    seconds: float
    requests: int
    mib: float
    descriptors: int
    fixed_mib: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Of the second half: so many requests, the MiB that came, and those that may come. `sees_kib`: the smallest leak, for each
    request, that would have been found."""

    requests: int
    mib: float
    most_mib: float

    @property
    def holds(self) -> bool:
        return self.mib <= self.most_mib

    @property
    def sees_kib(self) -> float:
        return 1024.0 * self.most_mib / self.requests


def growth(life: Sequence[Sample], warm: int = WARM) -> Growth | None:
    """Of one process. None: it did too little."""
    kept = [one for one in life if one.requests >= life[0].requests + warm]
    if not kept or kept[-1].requests - kept[0].requests < LEAST:
        return None
    half = (kept[0].requests + kept[-1].requests) / 2
    late = [one for one in kept if one.requests >= half]
    count = max(1, round(_END * len(late)))
    first, last = late[:count], late[-count:]
    came = statistics.median(one.mib for one in last) - statistics.median(one.mib for one in first)
    requests = last[len(last) // 2].requests - first[len(first) // 2].requests
    return Growth(requests, came, ONE_OFF_MIB + LEAK_KIB * requests / 1024.0) if requests else None


def private_mib(smaps: Iterable[str]) -> tuple[float, float]:
    """Of /proc/PID/smaps. Returns: MiB that the process alone has, without FIXED, and those of FIXED."""
    found, fixed, is_fixed = 0, 0, False
    for line in smaps:
        name, _, rest = line.partition(":")
        if name in ("Private_Clean", "Private_Dirty"):
            kib = int(rest.split()[0])
            found, fixed = (found, fixed + kib) if is_fixed else (found + kib, fixed)
        elif "-" in line.partition(" ")[0]:  # a mapping begins
            is_fixed = any(part in line for part in FIXED)
    return found / 1024.0, fixed / 1024.0
