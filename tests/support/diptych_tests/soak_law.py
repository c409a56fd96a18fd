"""What the memory of a process under load may do: grow with what is used for the first time, and not with each request. Pure.

A process has its memory at first use: pools and rings page by page, allocators' arenas, caches up to their bounds. A slow machine
uses later what a fast one uses early, so the law is about work, not time. A life's first WARM requests say nothing. Of the others
the second half counts, cut into BINS of equal work. There first use comes in single steps, each when a batch is larger than any
before it: an allocator keeps what the largest needed. A leak is in every bin. So what counts is the median of the growth from bin
to bin, and all of it together has a bound of its own. Memory that is one mapping of a fixed size is left out by name (FIXED): it
cannot leak, and its pages come with the highest number of transfers at once.

                     MiB |              ____|~~~~~    first use: flat but for steps
                         |     __----'      . -'      a leak: goes on
                         | .-'       . - '
                         +------|-------|------------  requests
                              WARM    half
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

WARM, WARM_ROUTER = 300, 2300
"""Requests of the cluster since the process began. By then the pool of `make soak` was used several times over, and the router
has the 2,048 requests that it remembers."""
LEAST = 300
"""Requests after these: fewer say nothing."""
NOISE_MIB, LEAK_KIB, STEPS_MIB = 0.3, 0.2, 8.0
"""What the second half may add by the median of its bins, that and for each request, and by all of them together."""
BINS = 8
FIXED = ("/memfd:diptych-kv",)
"""The staging ring."""


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
    """Of the second half: so many requests; the MiB that came by the median of its bins, those that may come, all that came."""

    requests: int
    mib: float
    most_mib: float
    total_mib: float

    @property
    def holds(self) -> bool:
        return self.mib <= self.most_mib and self.total_mib <= STEPS_MIB + self.most_mib

    @property
    def sees_kib(self) -> float:
        """The smallest leak, for each request, that would have been found."""
        return 1024.0 * self.most_mib / self.requests


def growth(life: Sequence[Sample], warm: int = WARM) -> Growth | None:
    """Of one process. None: it did too little."""
    kept = [one for one in life if one.requests >= life[0].requests + warm]
    if not kept or kept[-1].requests - kept[0].requests < LEAST:
        return None
    begin, end = (kept[0].requests + kept[-1].requests) / 2, kept[-1].requests
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for one in kept:
        if one.requests >= begin:
            bins[min(BINS - 1, int((one.requests - begin) / (end - begin) * BINS))].append(one.mib)
    levels = [statistics.median(each) for each in bins if each]
    if len(levels) < BINS:  # it stood still for most of its life
        return None
    steps = [after - before for before, after in pairwise(levels)]
    requests = round((end - begin) * (BINS - 1) / BINS)  # from the middle of the first bin to that of the last
    most_mib = NOISE_MIB + LEAK_KIB * requests / 1024.0
    return Growth(requests, statistics.median(steps) * len(steps), most_mib, sum(steps))


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
