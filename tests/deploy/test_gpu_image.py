"""Content of the GPU image, if it was built (`make images IMAGES=serve-gpu`); needs no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytestmark = [pytest.mark.containers, pytest.mark.slow]
IMAGE = "localhost/diptych-gpu:dev"
LOOK = """
import json, os, subprocess, sysconfig
from pathlib import Path
import torch, diptych.kernels.triton_decode
from nixl_cu13 import _api
from diptych.worker.host_facts import ucx_parts
site = Path(sysconfig.get_path("platlib"))
(mlx5,) = (site / "nixl_cu13.libs" / "ucx").glob("libuct_ib_mlx5.so.*")
needs = subprocess.run(["ldd", str(mlx5)], capture_output=True, text=True, check=True).stdout
lost = [line.split()[0] for line in needs.splitlines() if "not found" in line]
print(json.dumps({"cuda": torch.version.cuda, "ucx": ucx_parts(site), "uid": os.getuid(), "lost": lost}))
"""


def test_torch_triton_and_a_ucx_with_infiniband_are_there() -> None:
    if shutil.which("podman") is None:
        pytest.skip("podman is not on PATH")
    if subprocess.run(["podman", "image", "exists", IMAGE], capture_output=True).returncode != 0:
        pytest.skip(f"no image {IMAGE}")
    command = ["podman", "run", "--rm", "-i", "--network", "none", "--entrypoint", "python", IMAGE, "-"]
    done = subprocess.run(command, input=LOOK, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["cuda"] is not None
    assert reported["ucx"]["nixl-cu13"] is True
    assert reported["lost"] == []
    assert reported["uid"] != 0
