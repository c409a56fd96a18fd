"""Check that the committed stubs match the .proto files: generate into a temporary folder and compare."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "rpc" / "v1"


def main() -> int:
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"-I{ROOT / 'proto'}", f"--python_out={folder}", f"--pyi_out={folder}", f"--grpc_python_out={folder}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *protos], check=True)
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "diptych/rpc/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in STUBS.glob("*_pb2*")}
    drifted = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if drifted:
        print(f"rpc/v1 differs from proto/ in {', '.join(drifted)}: run `make proto` and commit", file=sys.stderr)
        return 1
    print(f"proto: {len(fresh)} stubs are what proto/ gives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
