"""What `make check` forbids in every file (.ci/check_bans.py): to run what is read, to fork, to switch a check of TLS off."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
BANNED = [
    "subprocess.Popen(['x'])",
    "import pickle",
    "from cPickle import loads",
    "importlib.import_module('pickle')",
    "__import__('marshal')",
    "eval('1')",
    "builtins.eval('1')",
    "exec('1')",
    "os.system('ls')",
    "torch.load('x')",
    "torch.hub.load('a', 'b')",
    "pandas.read_pickle('x')",
    "np.load('x', allow_pickle=True)",
    "AutoTokenizer.from_pretrained('x', trust_remote_code=True)",
    "yaml.load(text)",
    "subprocess.run('ls', shell=True)",
    "tempfile.mktemp()",
    "httpx.get(url, verify=False)",
    "context.verify_mode = ssl.CERT_NONE",
    "context.check_hostname = False",
    "ssl._create_unverified_context()",
    "redis.Redis(ssl_cert_reqs='none')",
    "redis.Redis(ssl_check_hostname=False)",
    "jinja2.Environment()",
    "hashlib.md5(b'')",
]
PLACES = {
    "module": "{}",
    "function": "def f():\n    {}",
    "method": "class C:\n    async def f(self):\n        {}",
    "handler": "try:\n    pass\nexcept E:\n    {}",
    "match": "match x:\n    case 1:\n        {}",
}


@pytest.fixture(scope="module")
def bans() -> ModuleType:
    return load_script(".ci/check_bans.py")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", BANNED)
def test_it_is_found_wherever_it_stands(bans: ModuleType, source: str, place: str) -> None:
    assert bans.findings(PLACES[place].format(source), "router/x.py"), source


@pytest.mark.parametrize(
    "source",
    [
        "httpx.get(url, verify=context)",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.check_hostname = True",
        "jinja2.sandbox.ImmutableSandboxedEnvironment()",
        "importlib.import_module('json')",
        "redis.Redis(ssl_cert_reqs='required')",
    ],
)
def test_what_is_as_it_should_be_is_allowed(bans: ModuleType, source: str) -> None:
    assert bans.findings(source, "router/x.py") == []
