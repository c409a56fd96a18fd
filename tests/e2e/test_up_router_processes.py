"""`diptych up --router-processes 2`: a whole cluster behind two router processes, one of which dies, then their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from diptych.cli.up.processes import ProcessIdentity
from diptych.rpc.v1 import router_pb2, router_pb2_grpc

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
TIMEOUT_S = 300.0


def ask(cluster) -> dict:
    """Over a connection of its own."""
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def explained(cluster, request_id: str) -> router_pb2.ExplainResponse:
    """Over a connection of its own."""
    with grpc.insecure_channel(cluster.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        question = router_pb2.ExplainRequest(request_id=request_id)
        return router_pb2_grpc.RouterStub(channel).Explain(question, timeout=TIMEOUT_S)


def answering(cluster) -> int:
    try:
        return httpx.get(f"{cluster.http_url}/status.json", timeout=TIMEOUT_S).json()["processes"]["answering"]
    except httpx.TransportError:  # the process that had the connection died
        return 0


def router_processes(cluster) -> list[ProcessIdentity]:
    return [ProcessIdentity.of(child.pid) for child in psutil.Process(cluster.child("router").pid).children()]


def test_answers_go_on_without_a_process_and_come_back_without_the_parent(cluster_module, tmp_path: Path) -> None:
    wait_until = cluster_module.wait_until
    with cluster_module.running_cluster(tmp_path, "--router-processes", "2") as cluster:
        wait_until(lambda: answering(cluster) == 2, what="both processes serve")
        answers = [ask(cluster) for _ in range(8)]
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1
        for answer in answers:  # whichever of the processes has the connection
            said = explained(cluster, answer["id"])
            assert (said.outcome, said.prompt_tokens) == ("finished", 5)
        command = [sys.executable, "-P", "-m", "diptych.cli", "explain", "--address", cluster.grpc_address]
        done = subprocess.run([*command, answers[0]["id"]], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.stdout.startswith("finished, 5 prompt tokens"), done.stderr
        dead, other = router_processes(cluster)
        dead.send(signal.SIGKILL)
        wait_until(lambda: not dead.alive(), what="it has ended")
        assert {ask(cluster)["choices"][0]["text"] for _ in range(4)} == texts
        wait_until(lambda: answering(cluster) == 2, what="the process was started again")
        assert other.alive()
        before = router_processes(cluster)
        cluster.kill("router")
        wait_until(lambda: not any(process.alive() for process in before), what="they end with their parent")
        wait_until(lambda: answering(cluster) == 2, what="the supervisor has started all of them again")
        assert ask(cluster)["choices"][0]["text"] in texts
