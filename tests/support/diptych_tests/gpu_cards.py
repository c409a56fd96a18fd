"""The GPUs that tests of whole clusters need; GPU_TESTS_DEVICE=cpu runs the same tests without any."""

from __future__ import annotations

import os

import pytest

from diptych.common.errors import ConfigError
from diptych.worker.visible_gpus import find_gpus

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def num_gpus() -> int:
    try:
        return len(find_gpus(os.environ))
    except ConfigError:
        return 0


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """For `pytestmark`."""
    reason = "needs a GPU" if count == 1 else f"needs {count} GPUs"
    return [
        pytest.mark.gpu,
        pytest.mark.multiproc,
        pytest.mark.skipif(DEVICE == "cuda" and num_gpus() < count, reason=reason),
    ]
