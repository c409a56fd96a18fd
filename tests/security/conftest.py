from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from diptych_tests import pd as pd_module


@pytest.fixture(scope="session")
def pd() -> ModuleType:
    """The harness of both pools in one process."""
    asyncio.run(pd_module.start_grpc())
    return pd_module
