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
