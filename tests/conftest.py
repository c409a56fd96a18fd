"""Common fixtures: leak checks for every test, and one real cluster for the whole run."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from diptych.common import compiled
from diptych.common.collector import hold_collector, set_collector
from diptych.common.compiled import LANES_VARIABLE, NativeError, find_compiler
from diptych_tests import machine, quick_httpx

ROOT = Path(__file__).resolve().parent.parent
# Pools that a library starts once per process and keeps; they belong to no test.
LIBRARY_THREADS = (
    "grpc",
    "asyncio_",
    "AnyIO worker thread",
    "ThreadPoolExecutor",
    "tokio",
    "Dummy-",
    "ucxx-notifier",
    "tqdm_monitor",
)
_SETTLE_S = 120.0
"""Until what a test started has ended: a moment, but for what it left behind."""

# Of this process, where many tests share few cores; a cluster under test is started without them. Before anything imports
# Triton: without a GPU its kernels are interpreted (make test-gpu sets 0).
_OUR_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "1"}
# A cluster under test gets the user's variables: neither these nor what a library sets when it is imported.
_OF_USERS = set(os.environ)
os.environ.update({name: value for name, value in _OUR_ENV.items() if name not in _OF_USERS})
# Of what test modules import and pytest collects nothing is garbage; pytest_collection_finish.
hold_collector()
quick_httpx.install()
# An example that exceeds hypothesis' 200 ms, or is slow to generate, only means that the machine is busy.
settings.register_profile("diptych", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("diptych")
# Otherwise pytest-asyncio makes the policy create a loop for the main thread that is never closed.
_main_loop = asyncio.new_event_loop()
asyncio.set_event_loop(_main_loop)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A test process of xdist inherits the variables set here, and could not distinguish them from the user's."""
    node.workerinput["variables_of_users"] = sorted(_OF_USERS)


def pytest_configure(config: pytest.Config) -> None:
    own = Path(machine.__file__).resolve().parents[3]
    if not Path(compiled.__file__).resolve().is_relative_to(own):
        raise pytest.UsageError(
            f"these are the tests of {own}, and diptych comes from {compiled.__file__}: unset PYTHONPATH"
        )
    _OF_USERS.intersection_update(getattr(config, "workerinput", {}).get("variables_of_users", _OF_USERS))
    if config.get_verbosity() > 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """With -v a failure is shown when it happens: a run of an hour may be ended before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.longreprtext}\n", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a description of the machine to every failure."""
    report = yield
    if report.failed:
        report.sections.append(("machine", "\n".join(machine.facts())))
    return report


def pytest_unconfigure() -> None:
    _main_loop.close()


GROUPS = {
    "cluster": ("cluster", "cluster_to_end", "colocated", "colocated_to_end"),
    "gated": ("gated_cluster",),
    "detached": ("detached_cluster", "detached_cluster_to_end"),
}
"""Fixtures that start processes which tests of several files share. A fixture with _to_end is for the tests that end them."""
SHARED = [name for names in GROUPS.values() for name in names if not name.endswith("_to_end")]


@cache
def _group(file: str) -> str:
    """Group of tests that run in one process and share its fixtures: all files with a test or a fixture that uses one of
    GROUPS, and each other file separately."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for group, names in GROUPS.items():
        function = r"^(?:(?:async )?def test_|@pytest\.fixture.*\n(?:async )?def )\w*\([^)]*"
        if re.search(rf"{function}\b(?:{'|'.join(names)})\b", text, re.MULTILINE):
            return group
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """With several processes and --dist loadscope (make test). xdist's own groups are written into ids, which pytest 9.2
    does not let it change: each test went to any process, and each process started every cluster, 12 GB in all."""
    if config.getoption("dist") != "loadscope":
        return None  # xdist's own
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    return ByGroup(config, log)


_last_user: dict[str, pytest.Item] = {}
"""Of each shared fixture, the last of the tests that were collected."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of shared clusters come first, one cluster's after the other's: where several processes share the tests, they take
    longest. Of those of `cluster`, files that use `colocated`, too, come first. Tests that end one come last."""
    colocated = {item.path for item in items if "colocated" in _fixtures(item)}
    ranks = {group: rank for rank, group in enumerate(GROUPS)}

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        group = _group(item.nodeid.partition("::")[0])
        used = [name for name in SHARED if name in _fixtures(item)]
        if not set(used) <= set(GROUPS.get(group, ())):
            raise pytest.UsageError(f"{item.nodeid} uses {used}, but its file is in the group {group!r}")
        ends = any(name.endswith("_to_end") for name in _fixtures(item))
        return ranks.get(group, len(ranks)), ends, group == "cluster" and item.path not in colocated

    items.sort(key=order)  # stable
    _last_user.update((name, item) for item in items for name in SHARED if name in _fixtures(item))


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def pytest_collection_finish() -> None:
    """What all test modules import stays: a full collection would walk it for a second, and harness and tests make hundreds. From
    here on the collector is set as in a process that serves."""
    set_collector()


_running: dict[str, tuple[pytest.FixtureDef[object], pytest.FixtureRequest]] = {}


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    if fixturedef.argname in SHARED:
        _running[fixturedef.argname] = fixturedef, request


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """What is shared ends with the last test that uses it, not with the run: each process of theirs holds a gigabyte."""
    yield
    for name in [name for name in _running if _last_user.get(name) is item]:
        fixturedef, request = _running.pop(name)
        fixturedef.finish(request)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a thread or an asyncio task behind."""
    before = set(threading.enumerate())
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("no_task_leaks")
    yield
    until = time.monotonic() + _SETTLE_S
    while (left := _threads_since(before)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, f"threads left behind: {[thread.name for thread in left]}"


def _threads_since(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    # _poll_wrapper is the thread of grpc.aio itself
    return [t for t in new if not t.name.startswith(LIBRARY_THREADS) and "_poll_wrapper" not in t.name]


def _tasks_besides(me: asyncio.Task[object] | None) -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task is not me and not task.done()]


@pytest.fixture
async def no_task_leaks() -> AsyncIterator[None]:
    yield
    me = asyncio.current_task()
    until = time.monotonic() + _SETTLE_S
    while (left := _tasks_besides(me)) and time.monotonic() < until:  # noqa: ASYNC110 - no event says "all tasks ended"
        await asyncio.sleep(0.01)
    assert not left, f"asyncio tasks left behind: {left}"


@pytest.fixture
def compiler() -> str:
    """Skips tests of compiled C without a compiler. The fallback is tested without this fixture."""
    try:
        return find_compiler()
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture
def set_lanes(compiler: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """set_lanes(floats of a vector): of all C that is loaded from then on in this test."""
    return lambda lanes: monkeypatch.setenv(LANES_VARIABLE, str(lanes))


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ranks that a test's own process starts are forks (diptych_tests.fork_server)."""
    from diptych.engine.ranks import starting
    from diptych_tests import fork_server

    fork_server.fork_children_of(starting, monkeypatch)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what git would commit, symlinks kept: may be changed at will."""
    target = tmp_path / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="session")
def metric_laws() -> ModuleType:
    from diptych_tests import metric_laws

    return metric_laws


@pytest.fixture(scope="session")
def cluster_module() -> ModuleType:
    from diptych_tests import clusters

    clusters.OF_USERS = frozenset(_OF_USERS)
    return clusters


@pytest.fixture(scope="session")
def cluster(cluster_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One real cluster for the whole run, exactly as shipped: `diptych up` with free ports. Tests must not kill parts
    of it."""
    with cluster_module.running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster_to_end(cluster: object) -> object:
    """The same one, for tests that may kill any part of it: they are its last."""
    return cluster


@pytest.fixture(scope="session")
def gates(cluster_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The step gates of the gated cluster."""
    return cluster_module.StepGates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="session")
def gated_cluster(
    cluster_module: ModuleType, gates: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    """A second cluster: its steps can be held, and its parts may be killed by a test that waits until they are back. It has
    the trained adapters. A step takes few tokens, so that a prompt of several steps is computed soon."""
    from diptych_tests import golden_adapters

    name, held = gates.flags
    tokens = f"--max-num-batched-tokens {cluster_module.GATED_STEP_TOKENS}"
    flags = (name, f"{held} {tokens}", *golden_adapters.flags())
    with cluster_module.running_cluster(tmp_path_factory.mktemp("gated"), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def shared_memory_before() -> set[Path]:
    """What there was before the detached cluster."""
    return set(Path("/dev/shm").iterdir())


@pytest.fixture(scope="session")
def detached_cluster(
    cluster_module: ModuleType, shared_memory_before: set[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    """A third one: `up --detach` over IPv6, where the machine has it. Its workers keep KV in files, and may be killed by a test
    that waits until they are back."""
    root = tmp_path_factory.mktemp("detached")
    host = "::1" if machine.has_ipv6() else "127.0.0.1"
    flags = ("--host", host, "--worker-args", f"--disk-kv-dir {root / 'kv'}")
    with cluster_module.detached_cluster(root, *flags) as running:
        yield running


@pytest.fixture
def detached_cluster_to_end(detached_cluster: object) -> object:
    """See cluster_to_end."""
    return detached_cluster


@pytest.fixture(scope="session")
def colocated(cluster_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One `diptych serve` process of the same model: what disaggregated answers must equal. It has the trained adapters, and a
    slot for one."""
    from diptych_tests import golden_adapters

    flags = ("--num-blocks", "256", "--max-model-len", "2048", "--max-loras", "1", *golden_adapters.flags())
    with cluster_module.running_serve(tmp_path_factory.mktemp("colocated"), *flags) as running:
        yield running


@pytest.fixture
def colocated_to_end(colocated: object) -> object:
    """See cluster_to_end."""
    return colocated
