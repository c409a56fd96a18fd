"""The SDK needs grpcio and protobuf, and nothing else that is installed here."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

_BLOCKED = """
import sys

ALLOWED = {"diptych", "grpc", "google", "typing_extensions"}

class Wall:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if name.startswith("google.rpc"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Wall())
import diptych.client as sdk

client = sdk.Client("127.0.0.1:9", api_key="x")
try:
    client.generate(prompt="a", timeout_s=0.2)
except sdk.DiptychError as error:
    print(type(error).__name__)
client.close()
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("diptych.")}
print(sorted(rooms))
"""


def test_the_sdk_stands_alone() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _BLOCKED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kind, rooms = done.stdout.splitlines()
    assert kind in ("UnreachableError", "RequestDeadlineError")
    assert rooms == "['client', 'common', 'rpc']"


def test_the_wheel_pulls_in_nothing_else() -> None:
    needs = [line for line in requires("diptych") or () if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needs) == ["grpcio", "protobuf"]
