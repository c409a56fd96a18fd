"""With several test processes, a file and all tests of a shared cluster stay in one of them."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process: nothing is shared out")
def test_tests_are_shared_out_by_file_and_cluster(request: pytest.FixtureRequest) -> None:
    """The groups were given after xdist had looked for them: each process started each cluster, 12 GB in all."""
    assert request.node.nodeid.endswith("@tests/unit/house/test_groups.py")
