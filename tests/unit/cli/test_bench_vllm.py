"""Commands and requests of `diptych bench vllm`; no server is started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from diptych.bench.peers import vllm_process as bench_vllm_peer
from diptych.bench.peers.serve_process import command_of
from diptych.bench.peers.vllm import Load, known_loads, parse_loads
from diptych.bench.peers.vllm_process import VllmChoice, VllmServer
from diptych.cli import main
from diptych.common import child
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych_tests.waiting import wait_until


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    return tmp_path


def test_loads():
    assert parse_loads("rate:0.3,users:8") == [Load("rate:0.3", rate=0.3), Load("users:8", users=8)]
    for wrong in ("", "rate", "rate:0", "users:-1", "users:1.5", "people:3", "rate:x"):
        with pytest.raises(ConfigError, match="loads"):
            parse_loads(wrong)


def test_a_load_becomes_open_or_closed_loop():
    base = BenchConfig()
    opened = parse_loads("rate:0.5")[0].config(base, 0)
    assert (opened.closed_loop, opened.request_rate, opened.num_requests) == (False, 0.5, 8)
    one, few, many = (load.config(base, 0) for load in parse_loads("users:1,users:4,users:32"))
    assert (one.max_concurrency, one.num_requests) == (1, 1)
    assert (few.closed_loop, few.max_concurrency, few.num_requests) == (True, 4, 4)
    assert (many.max_concurrency, many.num_requests) == (32, 32)
    assert parse_loads("users:4")[0].config(base, 5).num_requests == 5


def test_loads_of_an_earlier_call_are_kept(tmp_path):
    path = tmp_path / "vllm-cpu-pd.json"
    assert known_loads(path) == {}
    path.write_text('{"loads": {"users:4": {"rounds": 5}}}')
    assert known_loads(path) == {"users:4": {"rounds": 5}}
    for text in ("no JSON", "{}", "[]", '{"loads": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="out"):
            known_loads(path)


def test_choices_are_checked(environment):
    with pytest.raises(ConfigError, match="mode"):
        VllmChoice(environment, environment, "both")
    with pytest.raises(ConfigError, match="setup_vllm_cpu"):
        VllmChoice(environment / "nowhere", environment)


def test_both_sides_compute_in_the_dtype_chosen(environment, tmp_path, monkeypatch):
    assert "--dtype float32" in " ".join(VllmChoice(environment, environment).flags)
    assert "--dtype bfloat16" in " ".join(VllmChoice(environment, environment, "serve", "bfloat16").flags)
    ours = command_of(tmp_path, 1, 2, 3, ["--dtype", "bfloat16"])
    seen = []
    monkeypatch.setattr(main, "_serve", lambda config: seen.append(config) or 0)
    assert CliRunner().invoke(main.build_app(), ours[ours.index("serve") :]).exit_code == 0, "serve takes no argument"
    (config,) = seen
    assert (config.model, config.http_port, config.grpc_port) == (str(tmp_path), 1, 2)
    assert (config.threads, config.dtype) == (3, "bfloat16")


def test_prefill_and_decode_get_cores_of_their_own_and_ports_that_differ(environment, monkeypatch):
    started: list[tuple[list[str], dict[str, str]]] = []
    placed: list[tuple[int, list[int]]] = []

    def start(choice, server, name, command, env):
        started.append((command, env))
        server.processes.append(SimpleNamespace(pid=len(started)))

    monkeypatch.setattr(bench_vllm_peer, "_spawn", start)
    monkeypatch.setattr(bench_vllm_peer, "put_on_cores", lambda session, cores: placed.append((session, list(cores))))
    monkeypatch.setattr(bench_vllm_peer, "_wait", lambda *_: None)
    monkeypatch.setattr(bench_vllm_peer.os, "sched_getaffinity", lambda _: {0, 1})
    server = VllmServer("vLLM pd", "", [], environment)
    bench_vllm_peer._start_pd(VllmChoice(environment, environment), server)
    (prefill, first), (decode, second), (router, _) = started
    assert (first["VLLM_CPU_OMP_THREADS_BIND"], second["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "1")
    assert first["VLLM_NIXL_SIDE_CHANNEL_PORT"] != second["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert placed == [(1, [0]), (2, [1])]
    connector = json.loads(prefill[prefill.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "NixlConnector"
    urls = [f"http://127.0.0.1:{command[command.index('--port') + 1]}" for command in (prefill, decode)]
    assert [router[router.index("--prefill") + 1], router[router.index("--decode") + 1]] == urls


def test_threads_of_a_session_are_put_on_its_cores():
    process = child.start(["sleep", "600"], new_session=True)
    try:
        bench_vllm_peer.put_on_cores(process.pid, [max(os.sched_getaffinity(0))])
        assert os.sched_getaffinity(process.pid) == {max(os.sched_getaffinity(0))}
    finally:
        process.kill()
        process.wait(60)


def test_a_held_server_stops_and_goes_on(environment, monkeypatch):
    process = child.start(["sleep", "600"], new_session=True)
    server = VllmServer("vLLM", "http://h:1", [process], environment)
    monkeypatch.setattr(bench_vllm_peer, "_wait", lambda *_: None)
    stat = Path(f"/proc/{process.pid}/stat")

    def settle(state: str) -> None:
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, what=f"it is in state {state}")

    server.pause()
    settle("T")
    server.resume()
    settle("S")
    server.pause()
    server.stop()  # a stopped process would not handle SIGTERM
    assert process.returncode == -signal.SIGTERM
