from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bans() -> ModuleType:
    return load_script(".ci/check_bans.py")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text)",
        "select.select([a], [], [])",
        "import multiprocessing",
        "from multiprocessing import Process",
        "os.fork()",
        "subprocess.Popen(['ls'], preexec_fn=f)",
        "await asyncio.create_subprocess_exec('ls')",
        "subprocess.Popen(['ls'], start_new_session=True)",
    ],
)
def test_banned(bans, source):
    assert bans.findings(source, "x.py")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "yaml.safe_load(text)",
        "subprocess.run(['ls'])",
        "model.eval()",
    ],
)
def test_allowed(bans, source):
    assert bans.findings(source, "x.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(0.2)",
        "await asyncio.sleep(2 * TTL_S)",
        "time.sleep(0.2)  # sleep:",
        "time.sleep(1)  # sleep: well",
        "while True: time.sleep(1)",
    ],
)
def test_no_test_waits_for_a_time(bans, source):
    assert bans.findings(f"async def f():\n    {source}\n", "tests/unit/x.py")
    assert not bans.findings(f"async def f():\n    {source}\n", "engine/x.py")


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.sleep(0)",
        "await asyncio.sleep(d)  # sleep: cancels at any moment",
        "clock.sleep(5)",
        "while not done(): time.sleep(0.1)",
    ],
)
def test_a_pause_that_decides_nothing_says_so(bans, source):
    assert bans.findings(f"async def f():\n    {source}\n", "tests/unit/x.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.wait_for(task, 5)",
        "await asyncio.wait_for(task, timeout=5)",
        "async with asyncio.timeout(2.0): pass",
        "assert gate.wait(10)",
        "thread.join(10.0)",
        "process.communicate(timeout=15)",
        "stub.Check(request, timeout=3.0)",
        "httpx.get(url, timeout=5.0)",
        "httpx.get(url)",
        "httpx.AsyncClient(base_url=url)",
        "sock.settimeout(1)  # short: why",
    ],
)
def test_15_no_test_has_a_deadline_that_a_slow_machine_misses(bans, source):
    assert bans.findings(f"async def f():\n    {source}\n", "tests/unit/x.py")
    assert not bans.findings(f"async def f():\n    {source}\n", "engine/x.py")


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.wait_for(task, 60)",
        "async with asyncio.timeout(WAIT_S): pass",
        "assert gate.wait()",
        "', '.join(names)",
        "pool.wait('late', 100, 1.0)",
        "client.generate(prompt='a', timeout_s=0.3)",
        "httpx.AsyncClient(base_url=url, timeout=60.0)",
        "httpx.AsyncClient(transport=transport)",
        "gate.wait(0.01)  # short: between two looks",
    ],
)
def test_15_long_and_explained_deadlines_are_allowed(bans, source):
    assert bans.findings(f"async def f():\n    {source}\n", "tests/unit/x.py") == []


def test_15_no_child_of_a_test_outlives_a_killed_test_process(bans):
    source = "subprocess.Popen(['server'], stdin=pipe){}"
    assert bans.findings(source.format(""), "tests/unit/x.py")
    assert bans.findings(source.format("  # ends: soon"), "tests/unit/x.py")
    assert not bans.findings(source.format("  # ends: with its stdin"), "tests/unit/x.py")
    assert bans.findings(source.format("  # ends: with its stdin"), "engine/x.py")
