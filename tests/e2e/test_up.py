"""`diptych up`, as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from diptych.common.compiled import LANES_VARIABLE

pytestmark = pytest.mark.multiproc


def test_it_says_where_it_serves_and_what_it_served(cluster):
    output = cluster.log()
    assert "first tokens served" in output
    assert "KV bytes over ucx" in output
    for words in (
        cluster.http_url,
        cluster.grpc_address,
        "curl ",
        "from openai import OpenAI",
        "from diptych.client import",
    ):
        assert words in output


def test_1_the_shared_clusters_have_no_variable_that_a_user_does_not_set(cluster, colocated):
    """With one test process, and with several: those inherit what tests/conftest.py has set."""
    pytest_process = psutil.Process(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    users = {  # /proc has what the process was started with, whatever it set later
        name: value
        for name, value in pytest_process.environ().items()
        if name == LANES_VARIABLE or not name.startswith(("DIPTYCH_", "PYTEST_"))
    }
    # Set by libraries before the tests' own code runs: the first by Python without a locale, the others by libreadline.
    of_libraries = {"LC_CTYPE", "COLUMNS", "LINES"}
    for process in (cluster.process, colocated.process):
        env = psutil.Process(process.pid).environ()
        assert env.pop("DIPTYCH_RUN_DIR")
        assert {name for name, _ in env.items() ^ users.items()} <= of_libraries
    for child in cluster.state.children:
        added = psutil.Process(child.pid).environ().keys() - users.keys()
        assert not [name for name in added if name.startswith(("TRITON_", "PYTEST_"))]


def test_1_what_a_library_sets_in_a_test_process_is_not_the_users(cluster_module, monkeypatch, tmp_path):
    """torch's compiler sets one when it is imported: whether a cluster got it depended on the tests before."""
    monkeypatch.setenv("SET_BY_A_LIBRARY", str(tmp_path))
    assert "PATH" in cluster_module.environment(tmp_path)
    assert "SET_BY_A_LIBRARY" not in cluster_module.environment(tmp_path)


def test_second_up_from_the_same_folder_is_refused(cluster, cluster_module):
    command, _, _ = cluster_module.up_command()
    env = cluster_module.environment(cluster.folder.root)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "a cluster runs from this folder already" in result.stderr
    assert cluster.folder.secret.exists()


def test_everything_listens_on_loopback_only_and_secrets_stay_private(cluster):
    secret = cluster.folder.secret.read_text().strip()
    assert cluster.folder.secret.stat().st_mode & 0o077 == 0
    for child in cluster.state.children:
        process = psutil.Process(child.pid)
        hosts = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert hosts <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, f"{child.name} listens on {hosts}"
        assert hosts or child.role == "redis"
        assert secret not in " ".join(process.cmdline())
        assert secret not in Path(child.log).read_text(errors="replace")


def test_5_4_logs_are_json_lines_and_nothing_else(cluster):
    """For every process of the project, from its first line on; Redis has its own format."""
    for child in cluster.state.children:
        if child.role == "redis":
            continue
        lines = [json.loads(line) for line in Path(child.log).read_text(errors="replace").splitlines()]
        assert lines[0]["event"] == "settings"
        assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
