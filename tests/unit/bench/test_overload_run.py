"""`make bench-overload-http`: what it refuses at once, and a machine that was too slow for any good answer."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from diptych_tests.overload_run import SETTLED_S, Attempt, arrivals, figures, holds, main, quantiles, run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modes", "off"], "--modes off: on, and then others of"),
        (["--modes", "on,on"], "--modes on,on"),
        (["--modes", "on,never"], "--modes on,never"),
        (["--seconds", "5"], "--seconds 5: must be above 5"),
        (["--surge-s", "2"], "--surge-s 2: must be above 5"),
    ],
)
def test_19_what_would_fail_after_minutes_is_refused_at_once(flags, words, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--out", str(tmp_path / "out.json")])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_19_no_good_answer_at_all_is_a_record_and_no_crash() -> None:
    """The peak of a machine that is too busy is 0."""
    phases = [(15.0, 1.0), (SETTLED_S + 5.0, 5.0), (30.0, 1.0)]
    late = [Attempt(float(at), 100, 200, ttft_s=9.0) for at in range(60)]
    found = figures(late, phases, (0.0, 0.0))
    assert found["goodput_of_peak"] is None
    assert found["tokens_of_peak"] is None
    assert found["accepted_in_time"] == 0.0
    good = [Attempt(float(at), 100, 200, ttft_s=1.0) for at in range(60)]
    assert figures(good, phases, (1.0, 100.0))["goodput_of_peak"] == 1.0


PHASES = [(15.0, 1.0), (SETTLED_S + 5.0, 5.0), (30.0, 1.0)]
JUDGED = {"refusals_judged": {"yes": 2, "no": 0}}


def test_19_a_load_has_as_many_arrivals_as_it_is_called() -> None:
    """The peak of 45 s is not that of a lucky draw."""
    for seed in range(3):
        times = arrivals(PHASES, random.Random(seed))
        assert len(times) == 15 + 50 + 30
        assert times == sorted(times)
        assert sum(15.0 <= at < 25.0 for at in times) == 50


def test_19_accepted_requests_that_are_late_break_a_promise() -> None:
    """Before, only the good ones were counted: a router that accepts everything had as many of them."""
    good = [Attempt(at / 2, 100, 200, ttft_s=1.0, took_s=2.0) for at in range(110)]
    assert all(holds(figures(good, PHASES, (1.0, 100.0)) | JUDGED).values())
    late = [replace(one, ttft_s=7.0) for one in good if 15.0 < one.at < 25.0]
    broken = holds(figures(good + late, PHASES, (1.0, 100.0)) | JUDGED)
    assert [name for name, kept in broken.items() if not kept] == ["accepted requests are in time"]


def test_19_what_the_run_does_not_wait_for_was_accepted_and_is_late() -> None:
    waits = [Attempt(21.0, 100, given_up=True), Attempt(22.0, 300, 200, ttft_s=5.0, given_up=True)]
    refused = Attempt(23.0, 100, 529, took_s=0.01, retry_after_s=1.0)
    served = Attempt(24.0, 100, 200, ttft_s=1.0, took_s=2.0)
    found = figures([*waits, refused, served], PHASES, (1.0, 100.0))
    assert (found["accepted"], found["accepted_in_time"], found["refused"]) == (3, 0.3333, 1)
    assert found["accepted_ttft_s"] == {"p50": 5.0, "p99": None, "max": None}
    assert found["accepted_late"] == [(100, None), (300, 5.0)]
    assert found["statuses"] == {"given up": 2, "529": 1, "200": 1}
    assert quantiles([]) == {"p50": None, "p99": None, "max": None}


async def test_19_a_client_asks_again_for_the_same_and_the_run_ends_without_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[int, list[tuple[int, int]]] = {}

    async def send(http: object, attempt: Attempt, number: int, max_tokens: int) -> None:
        asked.setdefault(number, []).append((attempt.num_prompt, max_tokens))
        try:
            if number == 0:
                await asyncio.Event().wait()
            attempt.status, attempt.retry_after_s = 529, 1e-4
        except asyncio.CancelledError:
            attempt.given_up = True
            raise

    monkeypatch.setattr("diptych_tests.overload_run.send", send)
    monkeypatch.setattr("diptych_tests.overload_run._GIVE_UP_S", 0.1)
    sent = await run(None, [(0.05, 60.0)], 1, range(10))  # type: ignore[arg-type]
    assert [len(asked[number]) for number in range(3)] == [1, 4, 4]
    assert all(len(set(several)) == 1 for several in asked.values())
    assert sum(one.given_up for one in sent) == 1
    assert math.isinf(next(one for one in sent if one.given_up).ttft_s)
