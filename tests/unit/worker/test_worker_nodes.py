"""Settings of a worker with ranks on several hosts, and what they become on each of them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.cli.up.processes import free_port
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.engine.ranks.nodes.joining import Welcome
from diptych.worker.config import WorkerConfig
from diptych.worker.nodes import NodeOfThisHost, NodeStart, gathered_nodes, network_of, rendezvous_at, stages_are_whole
from diptych.worker.rank_config import RankConfig
from diptych_tests.pd import SECRET_FILE

TWO = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.2"}
NODE = {"master_addr": "127.0.0.2", "node_rank": 1, "secret_file": str(SECRET_FILE)}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"nnodes": 0}, "nnodes"),
        ({"nnodes": 3}, "nnodes"),
        ({"nnodes": 65}, "nnodes"),
        ({"master_addr": ""}, "master_addr"),
        ({"master_addr": "0.0.0.0"}, "master_addr"),
        ({"master_addr": "10.0.0.7"}, "master_addr"),
        ({"master_port": 65_535}, "master_port"),
        ({"join_timeout_s": 0.0}, "join_timeout_s"),
        ({"device": "cuda", "devices": "0,1"}, "devices"),
    ],
)
def test_23_hosts_that_make_no_sense_are_named(changed: dict[str, Any], field: str) -> None:
    WorkerConfig(**TWO)
    WorkerConfig(**TWO, device="cuda", devices="0")
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{**TWO, **changed})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"master_addr": ""}, "master_addr"),
        ({"master_addr": "10.0.0.7"}, "master_addr"),
        ({"node_rank": 0}, "node_rank"),
        ({"node_rank": 2, "nnodes": 2}, "node_rank"),
        ({"nnodes": 65}, "nnodes"),
        ({"master_port": 0}, "master_port"),
        ({"secret_file": ""}, "secret_file"),
        ({"devices": "x"}, "devices"),
        ({"threads": -1}, "threads"),
        ({"verify_weights": "never"}, "verify_weights"),
    ],
)
def test_23_a_host_whose_settings_make_no_sense_is_told_which(changed: dict[str, Any], field: str) -> None:
    RankConfig(**NODE)
    with pytest.raises(ConfigError) as caught:
        RankConfig(**{**NODE, **changed})
    assert caught.value.field == field


def test_23_hosts_on_another_machine_need_certificates_or_consent() -> None:
    for cls, needed in ((WorkerConfig, TWO), (RankConfig, NODE)):
        for more in ({"insecure": True}, {"cluster_ca": "ca", "cluster_cert": "cert", "cluster_key": "key"}):
            assert cls(**{**needed, "master_addr": "10.0.0.7", **more}).master_addr == "10.0.0.7"


def test_23_the_ranks_of_a_host_are_started_by_the_workers_arguments_and_its_own_paths(tmp_path: Path) -> None:
    start = NodeStart({"device": "cpu", "model": "/elsewhere", "num_blocks": 7}, 3, 0.0, Degrees(2, 2))
    told = msgspec.json.decode(msgspec.json.encode(start))
    here = NodeOfThisHost(RankConfig(**NODE, model=str(tmp_path)))
    third, fourth = here.specs(told, Welcome(2, 2, "start", 3.0), "127.0.0.3", "127.0.0.2")
    assert third.arguments == {
        "device": "cpu", "model": str(tmp_path), "num_blocks": 7, "rank": 2, "tensor_parallel": 2, "pipeline": 2,
        "num_threads": 3, "rendezvous": "tcp://127.0.0.2:29501", "host": "127.0.0.3",
    }  # fmt: skip
    assert fourth.arguments["rank"] == 3
    assert third.env is not None
    assert third.env["OMP_NUM_THREADS"] == "3"
    other = NodeOfThisHost(RankConfig(**NODE, model=str(tmp_path), threads=1, host="127.0.0.9"))
    [rank] = other.specs(told, Welcome(2, 1, "start", 3.0), "127.0.0.3", "127.0.0.2")
    assert (rank.arguments["num_threads"], rank.arguments["host"]) == (1, "127.0.0.9")
    with pytest.raises(ConfigError, match="model='/elsewhere': must be a local Hugging Face folder"):
        NodeOfThisHost(RankConfig(**NODE)).specs(told, Welcome(2, 2, "start", 3.0), "127.0.0.3", "127.0.0.2")


def test_23_the_ranks_talk_on_the_interface_of_the_address_unless_another_is_named() -> None:
    assert network_of("127.0.0.2", "cpu", {}) == ({}, "127.0.0.2")
    assert network_of("127.0.0.2", "cuda", {}) == ({"NCCL_SOCKET_IFNAME": "=lo"}, "127.0.0.2")
    named = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth2"}
    assert network_of("127.0.0.2", "cuda", named) == ({}, "")
    with pytest.raises(ConfigError, match=r"no interface of this host has the address 192\.0\.2\.1"):
        network_of("192.0.2.1", "cuda", {})
    assert rendezvous_at("fd00::7", 29500) == "tcp://[fd00::7]:29501"


def test_23_the_port_of_the_ranks_is_free_before_any_host_is_waited_for() -> None:
    with socket.create_server(("127.0.0.2", 0)) as used:
        port = used.getsockname()[1]
        config = WorkerConfig(**TWO, master_port=port - 1, secret_file=str(SECRET_FILE))
        with pytest.raises(ConfigError, match=f"master_port={port}: cannot be listened on"):
            gathered_nodes(config, NodeStart({}, 1, 0.0))


def test_23_too_few_hosts_until_the_deadline() -> None:
    port = free_port("127.0.0.2")
    config = WorkerConfig(**TWO, master_port=port, secret_file=str(SECRET_FILE), join_timeout_s=0.01)
    with pytest.raises(ConfigError, match=rf"nnodes=2: nodes \[1\] did not join at 127.0.0.2:{port} within 0.01 s"):
        gathered_nodes(config, NodeStart({}, 1, 0.0))
    with pytest.raises(ConfigError, match="secret_file"):
        gathered_nodes(WorkerConfig(**TWO, master_port=port), NodeStart({}, 1, 0.0))


def test_23_ranks_of_a_stage_on_one_host_are_found_by_the_degrees() -> None:
    whole = [((1, 2), 2), ((4, 2), 2), ((2, 4), 2), ((2, 1), 1)]
    cut = [((2, 1), 2), ((4, 1), 2), ((4, 2), 4), ((3, 2), 3)]
    assert all(stages_are_whole(Degrees(*degrees), nnodes) for degrees, nnodes in whole)
    assert not any(stages_are_whole(Degrees(*degrees), nnodes) for degrees, nnodes in cut)
