"""The wheel of `pip install .`: its requirements, and the SDK in an environment with nothing else."""

from __future__ import annotations

import email
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import google.protobuf
import grpc
import pytest
import typing_extensions

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
from diptych.client import Client, DiptychError
with Client("127.0.0.1:9", api_key="x") as client:
    try:
        client.generate(prompt="a", timeout_s=0.2)
    except DiptychError as error:
        print(type(error).__name__)
print("/site-packages/diptych/client/" in sys.modules["diptych.client"].__file__)
"""


def run_program(home: Path, packages: Path) -> None:
    """In the new environment `home`, whose packages hold the wheel, with what grpcio and protobuf bring."""
    (packages / "google").mkdir()
    (packages / "google" / "protobuf").symlink_to(Path(google.protobuf.__file__).parent)
    (packages / "google" / "_upb").symlink_to(Path(google.protobuf.__file__).parent.parent / "_upb")
    (packages / "grpc").symlink_to(Path(grpc.__file__).parent)
    (packages / "typing_extensions.py").symlink_to(typing_extensions.__file__)  # grpcio's
    done = subprocess.run(
        [str(home / "bin" / "python"), "-I", "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    kind, from_wheel = done.stdout.split()
    assert (kind in ("UnreachableError", "RequestDeadlineError"), from_wheel) == (True, "True")


def test_the_sdk_wheel_has_no_server_in_it(tmp_path: Path) -> None:
    """Issue 15, 4.14."""
    command = [sys.executable, str(ROOT / "deploy" / "sdk_wheel.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("diptych_client-*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    packages = next(home.glob("lib/python3*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        archive.extractall(packages)
    assert wheel.stat().st_size < 200_000
    rooms = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert rooms == {"client", "common", "rpc"}
    common = {Path(name).stem for name in names if name.startswith("diptych/common/")}
    assert common <= {"__init__", "addresses", "errors", "extras", "tls", "tracing"}
    assert {"diptych/py.typed", "diptych/client/__init__.py", "diptych/rpc/v1/router_pb2.pyi"} <= set(names)
    run_program(home, packages)


@pytest.mark.slow
def test_the_sdk_from_its_wheel(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    packages = next(home.glob("lib/python3*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(
            archive.read(next(name for name in names if name.endswith(".dist-info/METADATA")))
        )
        archive.extractall(packages)
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert sorted(line.split(">")[0].strip() for line in needed) == ["grpcio", "protobuf"]
    assert {"diptych/py.typed", "diptych/client/__init__.py", "diptych/rpc/v1/router_pb2.pyi"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "diptych/tests/", "examples/"))]
    compiled = [
        path for room in ("kernels", "router") for path in (tree / room).rglob("*") if path.suffix in (".c", ".h")
    ]
    licences = [path.parent / name for path in compiled for name in ("LICENSE", "LICENSE_A2", "LICENSE_CC0")]
    expected = {path.relative_to(tree) for path in (*compiled, *licences) if path.exists()}
    assert len(expected) > 15
    assert {f"diptych/{path.as_posix()}" for path in expected} <= set(names)
    run_program(home, packages)
