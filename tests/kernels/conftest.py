from __future__ import annotations

import pytest
import torch

from diptych_tests import quick_interpreter

quick_interpreter.install()


@pytest.fixture
def cuda() -> str:
    """The device of tests marked `gpu`. Kernels are compiled there, not interpreted."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    knobs = pytest.importorskip("triton").knobs
    if knobs.runtime.interpret:
        pytest.skip("Triton interprets its kernels here: set TRITON_INTERPRET=0")
    return "cuda"
