"""Silence is counted while the loop runs: a blocked loop makes no worker dead."""

from diptych.common.clock import FakeClock
from diptych.router.cluster.loop_uptime import TICK_S, LoopUptime
from diptych.router.cluster.worker_link import WorkerLink
from diptych_tests.records import worker_record


def live(clock: FakeClock, listening: LoopUptime, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        clock.advance(TICK_S)
        listening.tick()


def test_it_runs_with_the_loop_and_stands_with_it() -> None:
    clock = FakeClock(100.0)
    listening = LoopUptime(clock.now)
    live(clock, listening, 3.0)
    assert abs(listening.receiving_s() - 3.0) < 1e-6
    clock.advance(60.0)
    assert abs(listening.receiving_s() - 3.0 - 2 * TICK_S) < 1e-6
    listening.tick()
    assert abs(listening.receiving_s() - 3.0 - 2 * TICK_S) < 1e-6
    live(clock, listening, 1.0)
    assert abs(listening.receiving_s() - 4.0 - 2 * TICK_S) < 1e-6


async def test_a_stalled_router_finds_no_worker_dead_and_a_silent_one_is() -> None:
    clock = FakeClock(5.0)
    listening = LoopUptime(clock.now)
    record = worker_record()
    link = WorkerLink(record, receiving_s=listening.receiving_s, probe_s=0.25, dead_s=2.0, on_change=lambda: None)
    link._serving = link._probed = True
    for _ in range(10):  # ten stalls of four seconds, with a moment between
        clock.advance(4.0)
        assert link.why_not() == ""
        listening.tick()
        live(clock, listening, 0.1)
    assert link.silent_s < 2.01
    live(clock, listening, 2.1)
    assert "does not answer" in link.why_not()
    await link.close("the test is over")
