"""The test suite on hostile machines, one condition at a time; `make test-hostile`.

No test may depend on the speed, load or CPU of the machine. docs/testing.md says how tests ensure that, and what these
runs found.

Each condition runs the part of the suite that it can affect:

* Time (throttled, one-core, busy): everything that has threads, processes, sockets or deadlines. Not run are tests that
  compute on one thread of one process without a clock (UNTIMED), which would only take longer.
* Instructions (lanes-8, lanes-16, no-compiler): every test that compiles or loads C, also in a child process: what
  reaches `diptych.common.compiled.find_compiler`. A run with a print there showed which folders do not (WITHOUT_C). Those
  of faults and of strangers load it, too, but what they see are processes and messages: time's conditions run them.
  At the width that the machine's own kernels have, the conditions of time have run all but UNTIMED: there only the rest.
* All at once (together, together-no-compiler): SMOKE, one test or a few of every kind in which the others found
  something.

`throttled` leaves three quarters of the machine unused and `one-core` all cores but one, and instructions do not depend on
time: `lanes-8` and `lanes-16` run beside the first, one after the other, and `no-compiler` beside the second, on the other
cores, where there is memory for both. All other conditions run alone.

Every result goes to hostile-out/: a log of each condition, and results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from diptych.common import child

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))
from diptych_tests import machine  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MARKS = "not slow and not gpu and not netns and not containers and not clients"
PROCESSES = 2
MEMORY_FOR_TWO = 20e9
"""Free, for two runs of the suite at once: up to ten clusters, with a gigabyte in each of their workers (seen: 19e9)."""
PERIOD_S = 0.1
PROGRESS_S = 30.0

# On one thread, without a clock. Each with why.
UNTIMED = {
    "tests/kernels": "kernels beside their references, in the caller's thread",
    "tests/sim": "schedules in simulated time",
    "tests/deploy": "files that are read and rendered; containers are not run here",
    "tests/unit/engine_sched": "the scheduler is pure: steps are numbers",
    "tests/unit/engine_exec": "models beside their references; the runner waits for nothing",
    "tests/unit/house": "the source tree as text, and tools that read it",
}
# Where no C of ours is compiled or loaded, in the test's process or a child's, or where it decides nothing.
WITHOUT_C = {
    "tests/chaos": "processes that die, links that break: whatever computes in them",
    "tests/security": "what strangers see and may do",
    "tests/deploy": "files that are read and rendered",
    "tests/sim": "engines with a fake runner, routers without placement",
    "tests/unit/cli": "commands, with fakes behind them",
    "tests/unit/client": "the SDK, which stands alone",
    "tests/unit/common": "text, identity, codecs",
    "tests/unit/decode": "policy, with fakes",
    "tests/unit/engine_grammar": "grammars only",
    "tests/unit/engine_loop": "an engine with a fake runner",
    "tests/unit/engine_sched": "the scheduler is pure",
    "tests/unit/kvtransfer": "layouts and the ledger",
    "tests/unit/loadtest": "sees a server from outside only",
    "tests/unit/prefill": "policy, with fakes",
    "tests/unit/router/api": "parsing and forming of requests",
    "tests/unit/router/tools": "parsers of tool calls",
    "tests/unit/rpc": "conversion of messages",
    "tests/unit/worker": "parts of a worker, with a fake runner",
}
# Forms of requests and answers: the same C computes under all of them, and tests/e2e/test_identity.py compares what it computes.
FORMS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "api_audit", "api_fuzz_live", "api_grid", "bad_input", "boards", "cancel", "clients", "doctor", "ipv6", "metrics_add_up",
        "metrics_add_up_gated",
        "rolling_restart", "start_hangs", "status_page", "supervisor", "traces", "up", "up_detached", "up_router_processes",
        "up_secured",
    )
)  # fmt: skip
WITHOUT_C |= dict.fromkeys(FORMS, "forms of requests and answers, and processes")
SMOKE = (
    "tests/unit/engine_exec/test_exec_native.py",
    "tests/unit/router/placement/test_router_native.py",
    "tests/integration/api/test_api_grpc.py",
    "tests/integration/api/test_api_drain.py",
    "tests/integration/kvtransfer/test_kvtransfer_ucx.py",
    "tests/integration/pd/test_pd_faults.py",
    "tests/integration/router/test_router_wait_queue.py",
    "tests/e2e/test_serve.py",
    "tests/e2e/test_identity.py",
)


@dataclass(frozen=True)
class Condition:
    """One condition.

    Args:
        leave_out: folders of tests that it cannot affect.
        smoke: it runs SMOKE, whatever was asked for.
        beside: name of a condition at whose time it may run, in one process: more would take more memory (a process that
            uses clusters 4 GB), and find no core free.
        quarter: the suite gets a quarter of a core for each of its processes.
        one_core: the suite and all its children are pinned to one core.
        busy_loops: processes that only compute, on the same cores.
        env: further variables.
        limit_s: after this time the run fails.
    """

    name: str
    why: str
    leave_out: Mapping[str, str] = field(default_factory=dict)
    smoke: bool = False
    beside: str = ""
    quarter: bool = False
    one_core: bool = False
    busy_loops: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 2700.0

    @property
    def parts(self) -> Sequence[str]:
        """What it runs of the suite."""
        if self.env.get("DIPTYCH_NATIVE_LANES") == str(machine.register_lanes()):
            return [folder for folder in UNTIMED if folder not in WITHOUT_C]
        return ["tests", *(f"--ignore={folder}" for folder in self.leave_out)]


NO_COMPILER = {"CC": "no-compiler-here"}
TWO_LOOPS = 2
CONDITIONS = (
    Condition("throttled", "a quarter of a core for each process of the suite", UNTIMED, quarter=True, limit_s=3600.0),
    Condition("one-core", "pinned to one core", UNTIMED, one_core=True),
    Condition("busy", "two busy loops beside it", UNTIMED, busy_loops=TWO_LOOPS),
    Condition(
        "lanes-8", "vectors of 8 floats, as AVX2 has them", WITHOUT_C,
        beside="throttled", env={"DIPTYCH_NATIVE_LANES": "8"},
    ),
    Condition(
        "lanes-16", "vectors of 16 floats, as AVX-512 has them", WITHOUT_C,
        beside="throttled", env={"DIPTYCH_NATIVE_LANES": "16"},
    ),
    Condition(
        "no-compiler", "no C compiler: torch and numpy serve", WITHOUT_C, beside="one-core", env=NO_COMPILER,
    ),
    Condition(
        "together", "throttled, on one core, beside two busy loops, with vectors of 8 floats",
        smoke=True, quarter=True, one_core=True, busy_loops=TWO_LOOPS, env={"DIPTYCH_NATIVE_LANES": "8"},
    ),
    Condition(
        "together-no-compiler", "throttled, on one core, beside two busy loops, without a compiler",
        smoke=True, quarter=True, one_core=True, busy_loops=TWO_LOOPS, env=NO_COMPILER,
    ),
)  # fmt: skip


@dataclass
class Outcome:
    """failed: names of tests that failed, or whose set-up failed; said: how the run ended, if not by itself."""

    condition: str
    why: str
    seconds: float
    tests: int
    failed: list[str]
    skipped: int
    said: str = ""
    throttled_by: str = ""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.said and self.tests > 0


# ---- throttling ------------------------------------------------------------------------------------------------------


def make_quota_group(cores: float) -> Path | None:
    """A control group whose processes together get so many cores' time; None where none can be made.

    A group is weighed as a whole against each process outside it: with more weight it gets its quota, too, not far less.
    """
    name = f"diptych-hostile-{os.getpid()}"
    period_us = int(PERIOD_S * 1e6)
    v2, v1 = Path("/sys/fs/cgroup") / name, Path("/sys/fs/cgroup/cpu") / name
    quota_us = int(period_us * cores)
    settings = {
        v2: [("cpu.weight", "10000"), ("cpu.max", f"{quota_us} {period_us}")],
        v1: [
            ("cpu.shares", "16384"),
            ("cpu.cfs_period_us", str(period_us)),
            ("cpu.cfs_quota_us", str(quota_us)),
        ],
    }
    for group, files in settings.items():
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for file, value in files:
                if not (group / file).exists():
                    raise FileNotFoundError(file)
                (group / file).write_text(value)
            return group
        except OSError:
            group.rmdir()
    return None


_WATCHER = "diptych_tests/detached.py"
_WATCHER_S = 130.0
"""Longer than detached.ENDS_S, which it gives a cluster that starts."""


def descendants(root: int) -> list[psutil.Process]:
    """`root` and its descendants, parents before their children."""
    try:
        top = psutil.Process(root)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def _signal(processes: Sequence[psutil.Process], signum: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signum)


@contextlib.contextmanager
def stop_and_continue(root: int, share: float) -> Iterator[None]:
    """Without a CPU quota: `root` and its descendants run for `share` of every period.

    Processes stopped by a test stay stopped: the sender of a signal is an ancestor, and parents are stopped first, so a
    process found stopped was stopped by a test.
    """
    done = threading.Event()

    def beat() -> None:
        while not done.wait(PERIOD_S * share):
            ours = []
            for process in descendants(root):
                if not _is_stopped(process):
                    _signal([process], signal.SIGSTOP)
                    ours.append(process)
            done.wait(PERIOD_S * (1 - share))
            _signal(ours[::-1], signal.SIGCONT)

    thread = threading.Thread(target=beat, name="stop-and-continue")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- one run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Each ends with us, whatever happens to us."""
    loops = [child.start([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


# What it sets is inherited by all that the suite starts.
_PREPARE = (
    "import os, sys\n"
    "cores, group = sys.argv[1:3]\n"
    "if cores: os.sched_setaffinity(0, map(int, cores.split(',')))\n"
    "if group: open(group + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The suite, where it still runs, with all that it has started. Who watches a detached cluster for it kills that, and then
    ends: the cluster is nobody's descendant."""
    ours = descendants(process.pid)
    watchers = [one for one in ours if _watches(one)]
    _signal([one for one in ours if one not in watchers], signal.SIGKILL)
    process.wait()
    _, late = psutil.wait_procs(watchers, timeout=_WATCHER_S)
    _signal(late, signal.SIGKILL)


def _watches(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith(_WATCHER) for word in process.cmdline())
    return False


def selection(condition: Condition, smoke: bool, given: Sequence[str]) -> list[str]:
    """pytest's arguments that name tests."""
    if given:
        return list(given)
    if smoke or condition.smoke:
        return list(SMOKE)
    return list(condition.parts)


def progress_of(log: Path) -> str:
    marks = re.findall(rb"\[ *(\d+)%\]", log.read_bytes())
    return f"{marks[-1].decode()}%" if marks else "starting"


def read_log(log: Path) -> tuple[dict[str, int], list[str]]:
    """Counts by outcome from pytest's last line ({} if missing), and the failed tests."""
    lines = log.read_text(errors="replace").splitlines() or [""]
    counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)[,\s]", lines[-1] + " ")}
    failed = [re.split(r"^(?:FAILED|ERROR) | - ", line)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return counts if " in " in lines[-1] else {}, sorted(set(failed))


def run(
    condition: Condition,
    selected: Sequence[str],
    out: Path,
    flags: Sequence[str],
    cores: Sequence[int],
    stop: threading.Event,
) -> Outcome:
    """Run pytest under one condition, in a separate process, which ends when `stop` is set."""
    log = out / f"{condition.name}.log"
    processes = 1 if condition.beside else PROCESSES
    command = [
        sys.executable, "-P", "-m", "pytest", "-v", "-n", str(processes), "--dist", "loadscope", "--no-loadscope-reorder",
        "--max-worker-restart", "0",  # one that was killed for memory: its tests would be waited for in vain
        "-p", "no:cacheprovider", "-m", MARKS, "--durations=20", *flags, *selected,
    ]  # fmt: skip
    group = make_quota_group(PROCESSES / 4) if condition.quarter else None
    pinned = cores[:1] if condition.one_core else cores[1:] if condition.beside == "one-core" else []
    wanted = [",".join(map(str, pinned)), str(group or "")]
    by = "" if not condition.quarter else "quota" if group is not None else "stop and continue"
    began = time.monotonic()
    said = ""
    with contextlib.ExitStack() as stack:
        if group is not None:
            stack.callback(_remove, group)  # the last of all, also after Ctrl-C
        stack.enter_context(busy_loops(condition.busy_loops))
        process = child.start(
            [sys.executable, "-I", "-S", "-c", _PREPARE, *wanted, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONSAFEPATH": "1", **condition.env},
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(_end, process)
        if condition.quarter and group is None:
            stack.enter_context(stop_and_continue(process.pid, 1 / 4))
        print(f"{condition.name}: {condition.why}" + (f" (by {by})" if by else ""), flush=True)
        reported = began
        while process.poll() is None:
            if stop.wait(0.2):  # short: between two looks at the run
                said = "ended from outside"
                break
            now = time.monotonic()
            if now - began > condition.limit_s:
                said = f"not done within {condition.limit_s:.0f} s"
                break
            if now - reported > PROGRESS_S:
                reported = now
                print(f"{condition.name}: {progress_of(log)} after {now - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    counts, failed = read_log(log)
    if not said and (process.returncode not in (0, 1) or not counts):
        said = f"pytest ended with {process.returncode}: see {log}"
    tests = sum(counts.get(word, 0) for word in ("passed", "failed", "error", "skipped"))
    return Outcome(condition.name, condition.why, round(seconds, 1), tests, failed, counts.get("skipped", 0), said, by)


def _remove(group: Path) -> None:
    """Killed processes leave a group a little later than they are gone."""
    until = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError as error:
            if time.monotonic() > until:
                print(f"{group} stays: {error}", file=sys.stderr)
                return
            time.sleep(0.1)  # sleep: of a loop that looks whether it is empty


# ---- all of them -----------------------------------------------------------------------------------------------------


def order(conditions: Sequence[Condition], *, beside: bool) -> list[list[list[Condition]]]:
    """Stages one after the other, each of chains that run at the same time."""
    if not beside:
        return [[[condition]] for condition in conditions]
    names = {condition.name for condition in conditions}
    stages: dict[str, list[list[Condition]]] = {}
    for condition in conditions:
        if condition.beside in names:
            stages[condition.beside][1:] = [[*sum(stages[condition.beside][1:], []), condition]]
        else:
            stages[condition.name] = [[condition]]
    return list(stages.values())


def run_all(
    conditions: Sequence[Condition], run_one: Callable[[Condition, threading.Event], Outcome], *, beside: bool
) -> list[Outcome]:
    """Runs them in their order, some at the same time where `beside` says so.

    Whatever ends this ends all of them, with what they have started.
    """
    stop = threading.Event()

    def run_chain(chain: Sequence[Condition]) -> list[Outcome]:
        return [run_one(condition, stop) for condition in chain if not stop.is_set()]

    outcomes = []
    for stage in order(conditions, beside=beside):
        # A child process ends with the thread that started it: see child.start.
        with ThreadPoolExecutor(len(stage)) as pool:
            try:
                for chain in [pool.submit(run_chain, chain) for chain in stage]:
                    outcomes += chain.result()
            except BaseException:
                stop.set()
                raise
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| condition | tests | failed | skipped | minutes |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        cells = (
            outcome.condition, outcome.tests, len(outcome.failed), outcome.skipped, f"{outcome.seconds / 60:.1f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for outcome in outcomes:
        lines += [f"{outcome.condition}: FAILED {name}" for name in outcome.failed]
        lines += [f"{outcome.condition}: {outcome.said}"] if outcome.said else []
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [condition.name for condition in CONDITIONS]
    parser = argparse.ArgumentParser(prog="tests/hostile.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAMES", help=f"conditions, comma-separated: {', '.join(names)}")
    parser.add_argument(
        "--smoke", action="store_true", help="a few tests of each kind under each condition, not its part"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "hostile-out", help="folder of logs and results")
    parser.add_argument("--pytest", default="", metavar="FLAGS", help="more flags of pytest, e.g. '-x -k drain'")
    parser.add_argument("tests", nargs="*", help="files, folders or names of tests, in place of a condition's part")
    given = parser.parse_args(arguments)
    given.only = given.only.split(",") if given.only else names
    if unknown := [name for name in given.only if name not in names]:
        parser.error(f"no condition {unknown[0]}; there are {', '.join(names)}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 0 where every condition's tests passed, else 1."""
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    began, done, lock = time.monotonic(), [], threading.Lock()

    def run_one(condition: Condition, stop: threading.Event) -> Outcome:
        tests = selection(condition, given.smoke, given.tests)
        outcome = run(condition, tests, given.out, given.pytest.split(), cores, stop)
        with lock:
            done.append(outcome)
            print(table([outcome]).partition("\n|---")[2].partition("\n")[2], flush=True)
            body = {
                "machine": machine.facts(),
                "seconds": round(time.monotonic() - began, 1),
                "conditions": [asdict(one) for one in done],
            }
            (given.out / "results.json").write_text(json.dumps(body, indent=1) + "\n")
        return outcome

    wanted = [condition for condition in CONDITIONS if condition.name in given.only]
    beside = psutil.virtual_memory().available >= MEMORY_FOR_TWO
    if len(wanted) > 1 and not beside:
        print("one condition at a time: there is not enough free memory for two", flush=True)
    outcomes = run_all(wanted, run_one, beside=beside)
    print(f"\n{table(outcomes)}\n{(time.monotonic() - began) / 60:.1f} minutes; results in {given.out}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the blocks that end what runs
    sys.exit(main())
