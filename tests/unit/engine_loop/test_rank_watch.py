"""Whether ranks are alive, by what the watching thread reads: counters, process states and time of the CPU."""

from __future__ import annotations

import os
import signal
import sys

from diptych.common import child
from diptych.common.shared_memory import SharedArea, attached, find
from diptych.engine import progress
from diptych.engine.ranks.board import AHEAD, Agreement, Board
from diptych.engine.ranks.watch import POLL_S, ProcessState, Silence, Watch, read_process
from diptych_tests.waiting import wait_until

IDLE = [ProcessState(), ProcessState()]


def looks(watch, seconds, *, busy=True, processes=IDLE, counters=lambda n: [0, 0], start=0):
    """As the thread looks for so long. Returns: the first reason, and after how many seconds."""
    for n in range(start, start + round(seconds / POLL_S)):
        states = processes(n) if callable(processes) else processes
        reason = watch.look(n * POLL_S, busy=busy, counters=counters(n), processes=states)
        if reason:
            return reason, round((n - start) * POLL_S, 3)
    return "", seconds


def test_a_step_in_which_no_rank_goes_on_is_given_up_and_a_long_one_is_not():
    assert looks(Watch(3.0), 9.0) == ("no rank made progress for 3 s", 3.0)
    assert looks(Watch(3.0), 600.0, counters=lambda n: [0, n // 25]) == ("", 600.0)
    assert looks(Watch(3.0), 60.0, busy=False) == ("", 60.0)


def test_time_of_the_cpu_is_a_sign_of_life_where_the_cpu_computes():
    def working(n):
        return [ProcessState(cpu_s=n * POLL_S * 0.5), ProcessState()]

    def waiting(n):
        return [ProcessState(cpu_s=n * POLL_S * 0.05), ProcessState()]

    assert looks(Watch(3.0), 60.0, processes=working) == ("", 60.0)

    def starved(n):
        return [ProcessState(), ProcessState(runs=n % 10 == 0, cpu_s=n * POLL_S * 0.01)]

    assert looks(Watch(3.0), 60.0, processes=starved) == ("", 60.0)
    assert looks(Watch(3.0), 60.0, processes=waiting)[0] == "no rank made progress for 3 s"
    assert looks(Watch(3.0, cpu_counts=False), 60.0, processes=working)[0] == "no rank made progress for 3 s"


def test_a_process_that_ends_or_is_stopped_is_lost_also_when_nothing_is_computed():
    ended = [ProcessState(), ProcessState(ended=True)]
    stopped = [ProcessState(stopped=True), ProcessState()]
    assert looks(Watch(3.0), 9.0, busy=False, processes=ended) == ("rank 1 ended", 0.0)
    assert looks(Watch(3.0), 9.0, busy=False, processes=stopped) == ("rank 0 is stopped", 1.5)
    now_and_then = lambda n: stopped if n % 12 else IDLE  # noqa: E731
    assert looks(Watch(3.0), 60.0, processes=now_and_then, counters=lambda n: [n, n]) == ("", 60.0)


def test_a_pause_of_the_watching_process_is_no_silence_of_the_ranks():
    """The whole worker was stopped, or its machine: its ranks had no time either."""
    watch = Watch(3.0)
    assert looks(watch, 1.0) == ("", 1.0)
    assert looks(watch, 1.0, start=100_000) == ("", 1.0)
    assert looks(watch, 3.0, start=100_010)[0] == "no rank made progress for 3 s"


def test_23_a_host_that_says_nothing_is_lost_also_when_nothing_is_computed():
    """Its cable was taken out: no connection ends."""
    watch = Watch(3.0)

    def look(n, pulses):
        return watch.look(n * POLL_S, busy=False, counters=[0, 0], processes=IDLE, pulses=pulses)

    assert not any(look(n, {1: n, 2: n // 25}) for n in range(600))
    assert not any(look(n, {1: n, 2: 24}) for n in range(600, 629))
    assert look(630, {1: 630, 2: 24}) == "node 2 gave no sign of life for 3 s"


def test_23_a_host_ends_its_ranks_when_the_worker_says_nothing_and_not_when_it_was_paused_itself():
    silence = Silence(10.0)
    assert not any(silence.lasts(n * POLL_S, came=n % 50 == 0) for n in range(600))
    assert not silence.lasts(1000.0, came=False), "the whole machine slept"
    assert not any(silence.lasts(1000.0 + n * POLL_S, came=False) for n in range(1, 45))
    assert any(silence.lasts(1000.0 + n * POLL_S, came=False) for n in range(45, 110))


def test_the_state_of_a_process():
    process = child.start([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    try:
        assert not read_process(process.pid).ended
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: read_process(process.pid).stopped, what="it is stopped")
    finally:
        process.kill()
    wait_until(lambda: read_process(process.pid).ended, what="it has ended, and nothing has waited for it")
    process.wait()
    assert read_process(process.pid).ended
    assert read_process(os.getpid()).cpu_s > 0.0
    assert read_process(os.getpid()).runs


def test_ranks_give_a_step_up_at_the_same_layer():
    """Whenever the engine asks, and whichever rank is in front: rank 1 by one layer at most, as in a model."""
    for asked_at in range(10):
        board = Board(2)
        other = Board(2, attached(os.dup(board.area.descriptor)))
        first, second = Agreement(board, 7, decides=True), Agreement(other, 7, decides=False)
        ended = []
        for layer in range(20):
            if layer == asked_at:
                board.give_up(7)
            both = (first(), second()) if layer % 2 else (second(), first())[::-1]
            ended.append(both)
            if any(both):
                break
        assert ended[-1] == (True, True)
        assert len(ended) == asked_at + 1 + AHEAD
        assert not any(map(any, ended[:-1]))
        board.begin_step()
        assert not Agreement(board, 8, decides=True)()
        board.give_up(7)
        assert not Agreement(board, 8, decides=True)(), "another step is not given up"


def test_progress_counts_where_another_process_sees_it():
    board = Board(2)
    try:
        progress.count_at(board.words, board.place_of(1))
        progress.progress()
        progress.progress()
        assert board.counters() == [0, 2]
    finally:
        progress._words = None
    progress.progress()
    assert board.counters() == [0, 2]


def test_shared_memory_is_found_by_a_view_and_mapped_by_its_descriptor():
    area = SharedArea(8192)
    view = memoryview(area.memory)[100:300]
    assert find(view) == (area, 100)
    assert find(memoryview(bytearray(200))) is None
    assert find(memoryview(area.memory)[5:5]) is None
    other = attached(os.dup(area.descriptor))
    assert other.size_bytes == 8192
    view[:3] = b"abc"
    assert other.memory[100:103] == b"abc"
    assert find(memoryview(other.memory)[1:2]) == (other, 1)
    descriptor = other.descriptor
    del other
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")
    assert view[:3] == b"abc"
