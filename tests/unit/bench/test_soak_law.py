"""The soak's law of memory, on made-up lives of a process: it finds a leak of a kibibyte a request, and lets first use pass, at
any speed of the machine."""

from __future__ import annotations

import math
import random

import grpc
import pytest

from diptych_tests.clusters import Cluster
from diptych_tests.soak_law import WARM, WARM_ROUTER, Sample, growth, private_mib

REQUESTS = 4000


def life(mib_of, *, requests=REQUESTS, every_s=5.0, a_minute=110.0, seed=1):
    """Sampled every five seconds, beside noise of a tenth of a MiB."""
    rng = random.Random(seed)
    seconds = [every_s * i for i in range(int(requests / a_minute * 60.0 / every_s))]
    done = [round(one * a_minute / 60.0) for one in seconds]
    return [Sample(at, n, mib_of(n) + rng.uniform(-0.1, 0.1), 40) for at, n in zip(seconds, done, strict=True)]


def first_use(n):
    """A pool of 140 MiB, arenas that grow in steps more and more rarely, a cache up to its bound."""
    return 900.0 + 140.0 * -math.expm1(-n / 40) + 1.5 * math.floor(2 * math.log1p(n / 20)) + min(n, 800) * 0.004


@pytest.mark.parametrize("a_minute", [15.0, 46.0, 110.0, 900.0])
@pytest.mark.parametrize("seed", range(5))
def test_19_first_use_passes_at_any_speed(a_minute, seed) -> None:
    found = growth(life(first_use, a_minute=a_minute, seed=seed))
    assert found is not None
    assert found.holds, found


@pytest.mark.parametrize("a_minute", [15.0, 46.0, 110.0, 900.0])
@pytest.mark.parametrize("seed", range(5))
def test_19_a_leak_of_a_kibibyte_a_request_is_found(a_minute, seed) -> None:
    found = growth(life(lambda n: first_use(n) + n / 1024.0, a_minute=a_minute, seed=seed))
    assert found is not None
    assert not found.holds, found
    assert found.sees_kib < 1.0


def test_19_a_batch_larger_than_any_before_it_is_no_leak_and_many_are() -> None:
    late = growth(life(lambda n: first_use(n) + 3.0 * (n > 2900) + 2.0 * (n > 3500)))
    assert late is not None
    assert late.total_mib > 4.0
    assert late.holds
    much = growth(life(lambda n: first_use(n) + 12.0 * (n > 2900)))
    assert much is not None
    assert not much.holds
    often = growth(life(lambda n: first_use(n) + 0.5 * (n // 200)))
    assert often is not None
    assert not often.holds


def test_19_a_short_life_finds_larger_leaks_only_and_says_so() -> None:
    short = {"requests": WARM + 600}
    small = growth(life(lambda n: 900.0 + n / 1024.0, **short))
    large = growth(life(lambda n: 900.0 + 4.0 * n / 1024.0, **short))
    assert small is not None
    assert large is not None
    assert small.holds
    assert not large.holds
    assert 1.0 < small.sees_kib < 4.0


@pytest.mark.parametrize("requests", [10, WARM, WARM + 250])
def test_19_too_few_requests_say_nothing(requests) -> None:
    assert growth(life(first_use, requests=requests)) is None


def test_19_a_router_that_fills_its_memory_of_requests_does_not_leak() -> None:
    """It remembers 2,048."""
    filling = life(lambda n: 110.0 + min(n, 2048) * 6.0 / 1024.0)
    assert not growth([one for one in filling if one.requests < 2200]).holds
    assert growth(filling, WARM_ROUTER).holds
    assert not growth(life(lambda n: 110.0 + n / 1024.0, requests=6000), WARM_ROUTER).holds


def test_19_an_idle_life_does_not_divide_by_zero() -> None:
    still = [Sample(5.0 * i, 700 if i > 3 else i * 100, 900.0, 40) for i in range(50)]
    assert growth(still) is None


SMAPS = """\
55f8f7116000-55f8f83d8000 rw-p 00000000 00:00 0                          [heap]
Size:              19000 kB
Private_Clean:         4 kB
Private_Dirty:      1020 kB
7f2d54000000-7f2d58000000 rw-s 00000000 00:01 469151                     /memfd:diptych-kv (deleted)
Private_Dirty:      3072 kB
VmFlags: rd wr sh mr mw me ms sd
7f2d58000000-7f2d58192000 rw-p 00000000 00:00 0
Private_Dirty:      2048 kB
"""


def test_19_the_ring_is_told_apart() -> None:
    assert private_mib(SMAPS.splitlines()) == (3.0, 3.0)


def test_19_a_worker_that_is_still_starting_at_the_end_is_waited_for(monkeypatch) -> None:
    """The last one killed has no process yet, and then one that does not answer: neither is something left over."""
    answers = iter([StopIteration(), grpc.RpcError(), False, True])

    def idle(cluster, name):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Cluster, "idle", idle)
    Cluster(None, None, None).wait_idle_of("decode-1")
    assert next(answers, "all asked") == "all asked"
