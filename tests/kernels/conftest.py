from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("diptych_test_native_layers", Path(__file__).parent / "native_layers.py")
assert _spec is not None
assert _spec.loader is not None
sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture
def cuda() -> str:
    """The device of tests marked `gpu`. Kernels are compiled there, not interpreted."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    knobs = pytest.importorskip("triton").knobs
    if knobs.runtime.interpret:
        pytest.skip("Triton interprets its kernels here: set TRITON_INTERPRET=0")
    return "cuda"
