"""The script of `make test-hostile`: its conditions take effect, and its report is correct."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from diptych.common import child
from diptych_tests import waiting
from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]
hostile = load_script("tests/hostile.py")

# Some hundred times a second: two that counted as fast as they can took all the cores from what looks at them.
COUNTS = """
import os, sys, time
n = 0
while True:
    n += 1
    open(sys.argv[1] + ".new", "w").write(str(n))
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.003)  # sleep: it counts
"""
# One process, and none of the plugins that are slow to load.
FLAGS = ["--pytest=-n 0 -p no:schemathesis -p no:hypothesispytest -p no:anyio"]
CASES = """
import json
import os
from pathlib import Path

def test_tells():
    told = {name: os.environ.get(name) for name in ("CC", "DIPTYCH_NATIVE_LANES")}
    body = told | {"cores": len(os.sched_getaffinity(0))}
    Path(__file__).with_name(f"told-{told['DIPTYCH_NATIVE_LANES']}.json").write_text(json.dumps(body))

def test_fails_on_one_core():
    assert len(os.sched_getaffinity(0)) > 1
"""


def test_every_folder_and_file_that_it_names_is_there():
    for name in (*hostile.UNTIMED, *hostile.WITHOUT_C, *hostile.SMOKE):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("lanes", [8, 16])
def test_each_condition_takes_its_part_the_smoke_or_what_is_given(monkeypatch, lanes):
    monkeypatch.setattr(hostile.machine, "register_lanes", lambda: lanes)
    by_name = {condition.name: condition for condition in hostile.CONDITIONS}
    for timed in ("throttled", "one-core", "busy"):
        assert "--ignore=tests/sim" in hostile.selection(by_name[timed], False, [])
    own, other = sorted((by_name["lanes-8"], by_name["lanes-16"]), key=lambda one: one.name != f"lanes-{lanes}")
    assert "--ignore=tests/unit/engine_exec" not in hostile.selection(other, False, [])
    assert hostile.selection(other, False, [])[0] == "tests"
    # The conditions of time run at this width what they do not leave out; every test that loads C is in one of both.
    assert hostile.selection(own, False, []) == ["tests/kernels", "tests/unit/engine_exec", "tests/unit/house"]
    assert hostile.selection(by_name["together"], False, []) == list(hostile.SMOKE)
    assert hostile.selection(by_name["busy"], True, []) == list(hostile.SMOKE)
    assert hostile.selection(by_name["together"], False, ["tests/sim"]) == ["tests/sim"]
    with pytest.raises(SystemExit):
        hostile.parse(["--only", "throttled,nowhere"])


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        ("3 failed, 20 passed, 1 skipped, 4 deselected in 61.20s (0:01:01)", (3, 20, 1)),
        ("==== 1 passed, 2 errors in 1.00s ====", (0, 1, 0)),
        ("7 passed in 0.10s", (0, 7, 0)),
        ("[gw1] node down: Not properly terminated", None),
    ],
)
def test_the_log_is_read_as_pytest_writes_it(tmp_path, last, counts):
    names = [
        "FAILED tests/a.py::test_x[a b] - assert 1 - 2",
        "ERROR tests/b.py::test_y",
        "FAILED tests/a.py::test_x[a b]",
    ]
    (tmp_path / "log").write_text("\n".join(["..F [ 40%]", "E. [100%]", *names, last, ""]))
    found, failed = hostile.read_log(tmp_path / "log")
    assert failed == ["tests/a.py::test_x[a b]", "tests/b.py::test_y"]
    if counts is None:
        assert found == {}
    else:
        assert tuple(found.get(word, 0) for word in ("failed", "passed", "skipped")) == counts
    assert hostile.progress_of(tmp_path / "log") == "100%"


def test_conditions_reach_the_tests_and_failures_are_reported(tmp_path, capsys, monkeypatch):
    for name in ("CC", "DIPTYCH_NATIVE_LANES"):  # of a hostile run that this test is in
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "test_cases.py").write_text(CASES)
    flags = [*FLAGS, "--only", "one-core,lanes-8", "--out", str(tmp_path / "out"), str(tmp_path)]
    both = len(os.sched_getaffinity(0)) > 1
    assert hostile.main(flags) == 1
    pinned, lanes = (json.loads((tmp_path / f"told-{lanes}.json").read_text()) for lanes in (None, 8))
    assert pinned["cores"] == 1
    assert lanes["cores"] == len(os.sched_getaffinity(0))
    reported = json.loads((tmp_path / "out" / "results.json").read_text())
    outcomes = {outcome["condition"]: outcome for outcome in reported["conditions"]}
    one, other = outcomes["one-core"], outcomes["lanes-8"]
    assert [name.rpartition("::")[2] for name in one["failed"]] == ["test_fails_on_one_core"]
    assert (one["tests"], other["tests"]) == (2, 2)
    assert bool(other["failed"]) is not both
    assert any(line.startswith("vectors: ") for line in reported["machine"])
    assert "| one-core | 2 | 1 | 0 |" in capsys.readouterr().out


def outcome_of(condition):
    return hostile.Outcome(condition.name, "", 0.0, 1, [], 0)


def test_instructions_run_beside_what_leaves_cores_and_the_rest_alone():
    meet, now, beside, ran = {"lanes-8": threading.Barrier(2), "no-compiler": threading.Barrier(2)}, [], {}, []
    meet |= {"throttled": meet["lanes-8"], "one-core": meet["no-compiler"]}

    def run_one(condition, stop):
        beside[condition.name] = list(now)
        now.append(condition.name)
        if condition.name in meet:
            meet[condition.name].wait(60)
        ran.append(condition.name)
        now.remove(condition.name)
        return outcome_of(condition)

    outcomes = hostile.run_all(hostile.CONDITIONS, run_one, beside=True)
    assert {outcome.condition for outcome in outcomes} == {condition.name for condition in hostile.CONDITIONS}
    assert [name for name in ran if name.startswith("lanes")] == ["lanes-8", "lanes-16"]
    assert max(map(ran.index, ("throttled", "lanes-16"))) < min(map(ran.index, ("one-core", "no-compiler")))
    assert all(not beside[name] for name in ("busy", "together", "together-no-compiler"))
    only = [condition for condition in hostile.CONDITIONS if condition.name in ("lanes-8", "no-compiler")]
    assert hostile.order(only, beside=True) == [[[condition]] for condition in only]


def test_without_memory_for_two_all_run_alone():
    ran = []

    def run_one(condition, stop):
        ran.append(condition)
        return outcome_of(condition)

    hostile.run_all(hostile.CONDITIONS, run_one, beside=False)
    assert ran == list(hostile.CONDITIONS)
    assert [len(stage) for stage in hostile.order(hostile.CONDITIONS, beside=False)] == [1] * len(ran)


def test_a_fault_in_one_run_ends_what_runs_beside_it():
    begun = threading.Event()
    ran = []

    def run_one(condition, stop):
        ran.append(condition.name)
        if condition.name == "throttled":
            assert begun.wait(60)
            raise RuntimeError("no folder for the log")
        begun.set()
        assert stop.wait(60), "nobody ended it"
        return outcome_of(condition)

    with pytest.raises(RuntimeError, match="no folder"):
        hostile.run_all(hostile.CONDITIONS, run_one, beside=True)
    assert sorted(ran) == ["lanes-8", "throttled"]


def test_a_run_without_tests_has_not_passed(tmp_path):
    assert hostile.main([*FLAGS, "--only", "lanes-16", "--out", str(tmp_path / "out"), str(tmp_path)]) == 1
    [outcome] = json.loads((tmp_path / "out" / "results.json").read_text())["conditions"]
    assert "pytest ended with" in outcome["said"]


def counting(path: Path) -> subprocess.Popen[bytes]:
    process = child.start([sys.executable, "-S", "-c", COUNTS, str(path)])
    waiting.wait_until(path.exists, what="it counts")
    return process


def status(process: subprocess.Popen[bytes]) -> str:
    return psutil.Process(process.pid).status()


def test_stop_and_continue_leaves_processes_that_others_stopped(tmp_path):
    parent = counting(tmp_path / "n")
    other = counting(tmp_path / "m")
    try:
        other.send_signal(signal.SIGSTOP)
        waiting.wait_until(lambda: status(other) == psutil.STATUS_STOPPED, what="it is stopped")
        seen = set()

        def stopped_and_gone_on() -> bool:
            assert status(other) == psutil.STATUS_STOPPED
            seen.add((status(parent) == psutil.STATUS_STOPPED, (tmp_path / "n").read_text()))
            return len({n for stopped, n in seen if stopped}) > 1

        with hostile.stop_and_continue(parent.pid, 1 / 4), hostile.stop_and_continue(other.pid, 1 / 4):
            waiting.wait_until(stopped_and_gone_on, what="the process stands and goes on", every_s=0.02)
        assert status(parent) != psutil.STATUS_STOPPED
        assert status(other) == psutil.STATUS_STOPPED
    finally:
        for process in (parent, other):
            process.kill()
            process.wait()


def test_a_quota_stops_who_has_used_it_up(tmp_path):
    group = hostile.make_quota_group(0.02)
    if group is None:
        pytest.skip("no control group can be made here")
    process = counting(tmp_path / "n")
    try:
        (group / "cgroup.procs").write_text(str(process.pid))

        def throttled() -> int:
            stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            return int(stat["nr_throttled"])

        waiting.wait_until(lambda: throttled() > 3, what="the quota was used up")
    finally:
        process.kill()
        process.wait()
        hostile._remove(group)
    assert not group.exists()


def test_busy_loops_end_with_their_block():
    before = {process.pid for process in psutil.Process().children()}
    with hostile.busy_loops(2):
        loops = [process for process in psutil.Process().children() if process.pid not in before]
        assert len(loops) == 2
        waiting.wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.05 for p in loops), what="they compute")
    assert not any(process.is_running() for process in loops)


def test_a_run_that_takes_too_long_is_ended_and_failed(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import time\n\ndef test_long():\n    time.sleep(3600)  # sleep: ended by the limit\n"
    )
    condition = hostile.Condition("long", "too long", limit_s=1.0)
    outcome = hostile.run(condition, [str(tmp_path)], tmp_path, ["-n", "0"], [0], threading.Event())
    assert outcome.said == "not done within 1 s"
    assert not outcome.passed


def test_asked_to_end_it_leaves_nothing_behind(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import os, time\nfrom pathlib import Path\n\n"
        "def test_long():\n"
        "    Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(3600)  # sleep: ended with the run\n"
    )
    command = [sys.executable, "-P", str(ROOT / "tests" / "hostile.py"), *FLAGS, "--only", "throttled"]
    process = child.start([*command, "--out", str(tmp_path / "out"), str(tmp_path)])
    try:
        pid = tmp_path / "pid"
        waiting.wait_until(lambda: pid.exists() and pid.read_text(), what="the test runs")
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
    waiting.wait_until(lambda: not psutil.pid_exists(int(pid.read_text())), what="the test's process is gone")
    assert not list(Path("/sys/fs/cgroup").glob(f"**/diptych-hostile-{process.pid}"))
