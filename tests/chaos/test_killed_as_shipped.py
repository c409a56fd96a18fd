"""kill -9 on a worker and on `diptych up` itself, of a cluster for which nothing is set that a user does not set."""

from __future__ import annotations

import pytest

from diptych.cli.up.processes import ProcessIdentity

pytestmark = pytest.mark.multiproc


async def test_a_worker_is_replaced_and_a_killed_supervisor_takes_everything_with_it(
    cluster_to_end, cluster_module
) -> None:
    """kill -9 on `diptych up`: the kernel ends its children, `diptych down` clears the rest."""
    cluster = cluster_to_end
    await cluster.serves_again("decode-0", cluster.kill("decode-0").pid)
    state = cluster.state
    cluster.process.kill()
    cluster.process.wait(timeout=300.0)
    cluster.ended = True
    identities = [ProcessIdentity(child.pid, child.start_time) for child in state.children]
    cluster_module.wait_until(
        lambda: not any(identity.alive() for identity in identities), deadline_s=300.0, what="the children are gone"
    )
    assert cluster.folder.owner() is None
    assert cluster.folder.remove_dead_cluster()
    assert [path.name for path in cluster.folder.root.iterdir()] == ["logs"]
