from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.engine.exec.attention import attention_version
from diptych.kernels.dispatch import choose_backend

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # every import of it fails from here on
import diptych.engine.exec.model_runner
import diptych.kernels.kv_pack
import diptych.worker.model
from diptych.kernels.dispatch import choose_backend
assert choose_backend("cpu") == "native"
try:
    choose_backend("cuda")
except ValueError as error:
    assert "needs the package triton" in str(error), error
else:
    raise AssertionError("a GPU without Triton was accepted")
"""


def test_the_backend_follows_the_device():
    pytest.importorskip("triton", reason="Triton is not installed")
    assert choose_backend("cpu") == "native"
    assert choose_backend("cpu", "torch") == choose_backend("meta") == "torch"
    assert choose_backend("cuda") == "triton"
    assert choose_backend("cuda", "torch") == "torch"
    with pytest.raises(ValueError, match="no kernels called"):
        choose_backend("cpu", "cutlass")
    with pytest.raises(ValueError, match="for the CPU"):
        choose_backend("cuda", "native")
    assert attention_version("cpu") != attention_version("cuda")


def test_nothing_on_the_cpu_path_needs_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=300)
