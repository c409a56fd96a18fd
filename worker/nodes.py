"""Ranks of a worker on several hosts: what both sides' settings become. docs/parallelism.md says how they are started.

    master_port        where the hosts join the worker, and where their ranks connect to it; authenticated
    master_port + 1    where all ranks meet (torch's TCPStore, in rank 0); checks nobody

Both are on the one address of master_addr.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from diptych.common.addresses import host_port, is_loopback
from diptych.common.checkpoint.hashing import CheckpointHash
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.common.secret import load_secret
from diptych.common.tls import load_cluster_tls
from diptych.engine.ranks.nodes.joining import NODE, Group, Hello, Welcome, joining_key
from diptych.engine.ranks.nodes.links import TlsFiles, listen
from diptych.engine.ranks.nodes.node import Joining, Node
from diptych.engine.ranks.nodes.nodes import Nodes
from diptych.engine.ranks.starting import RankSpec
from diptych.kvtransfer.fabric.net_interfaces import interface_of
from diptych.worker.config import WorkerConfig
from diptych.worker.degrees import check_devices
from diptych.worker.rank_config import RankConfig
from diptych.worker.ranks import gpus_of_ranks, rank_specs
from diptych.worker.visible_gpus import find_gpus


class NodeStart(msgspec.Struct):
    """What the worker tells the other hosts.

    Args (fields):
        arguments: of every rank's runner, see rank_specs. The others have paths of their own, if they were told.
        threads: of each rank. utilization: see rank_specs.
    """

    arguments: dict[str, Any]
    threads: int
    utilization: float
    degrees: Degrees = Degrees()


def own_version() -> str:
    return metadata.version("diptych")


def rendezvous_at(host: str, port: int) -> str:
    """Of the ranks. Args: port: master_port."""
    return f"tcp://{host_port(host, port + 1)}"


def stages_are_whole(degrees: Degrees, nnodes: int) -> bool:
    """Whether the ranks of each stage are on one host: then they exchange rows through memory."""
    return degrees.num_ranks // nnodes % degrees.tensor_parallel == 0


def network_of(host: str, device: str, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The interface of the ranks' exchanges: that of the address `host`, where the operator names no other.

    Returns: variables for their processes; the address for gloo, empty where GLOO_SOCKET_IFNAME says it.
    Raises: ConfigError.
    """
    more = {}
    if device == "cuda" and "NCCL_SOCKET_IFNAME" not in environ:
        more["NCCL_SOCKET_IFNAME"] = "=lo" if is_loopback(host) else f"={interface_of(host)}"
    return more, "" if "GLOO_SOCKET_IFNAME" in environ else host


def gathered_nodes(config: WorkerConfig, start: NodeStart) -> tuple[Nodes, dict[str, Any], dict[str, str]]:
    """Wait for the other hosts, and let them start their ranks.

    Returns: the hosts; what this host's ranks get, too: further arguments, and variables.
    Raises: ConfigError; ExecutorLost.
    """
    degrees = config.degrees
    start.degrees = degrees
    start.arguments = {**start.arguments, "stage_on_one_host": stages_are_whole(degrees, config.nnodes)}
    group = Group(
        own_version(), config.nnodes, degrees.tensor_parallel, degrees.pipeline, uuid.uuid4().hex, config.rank_silence_s
    )
    listen(config.master_addr, config.master_port + 1).close()  # rank 0 will listen there
    nodes = Nodes(
        group, host=config.master_addr, port=config.master_port, key=_key(config.secret_file), tls=_tls(config)
    )
    try:
        nodes.gather(config.join_timeout_s)
        nodes.start(msgspec.to_builtins(start))
        more, host = network_of(nodes.address[0], config.device, os.environ)
    except BaseException:
        nodes.close(orderly=False)
        raise
    where = {"rendezvous": rendezvous_at(*nodes.address), "host": host}
    return nodes, {**where, "stage_on_one_host": start.arguments["stage_on_one_host"]}, more


def _key(secret_file: str) -> bytes:
    if not secret_file:
        raise ConfigError("secret_file", "", "is needed: the hosts of a worker prove to each other that they have it")
    return joining_key(load_secret(Path(secret_file)))


def _tls(config: WorkerConfig | RankConfig) -> TlsFiles | None:
    """Raises: ConfigError for files that cannot be used."""
    files = (config.cluster_ca, config.cluster_cert, config.cluster_key)
    if load_cluster_tls(*files, config.cluster_tls_name) is None:
        return None
    ca, cert, key = (str(Path(file).absolute()) for file in files)
    return TlsFiles(ca, cert, key, config.cluster_tls_name)


class NodeOfThisHost:
    """`diptych rank`: what the worker's arguments become here."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        hello = Hello(
            NODE,
            own_version(),
            config.node_rank,
            config.nnodes,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
        )
        joining = Joining(
            config.master_addr,
            config.master_port,
            hello,
            _key(config.secret_file),
            config.secret_file,
            _tls(config),
            config.join_timeout_s,
        )
        self.node = Node(joining, self.specs, self.fingerprint)

    def specs(self, told: Mapping[str, object], welcome: Welcome, own: str, worker: str) -> Sequence[RankSpec]:
        """See MakeSpecs."""
        config, start = self._config, msgspec.convert(told, NodeStart)
        device = start.arguments["device"]
        folder = self._folder(start)
        check_devices(config.devices, welcome.num_ranks, device)
        gpus = gpus_of_ranks(find_gpus(os.environ), config.devices, welcome.num_ranks) if device == "cuda" else ()
        more, host = network_of(config.host or own, device, os.environ)
        arguments = {
            **start.arguments,
            "model": str(folder.absolute()),
            "rendezvous": rendezvous_at(worker, config.master_port),
            "host": host,
        }
        here = range(welcome.first_rank, welcome.first_rank + welcome.num_ranks)
        threads = config.threads or start.threads
        return rank_specs(start.degrees, arguments, threads, gpus, start.utilization, here=here, more=more)

    def fingerprint(self, told: Mapping[str, object]) -> str:
        """Of the model folder here. Raises: ConfigError."""
        with CheckpointHash(
            self._folder(msgspec.convert(told, NodeStart)), verify=self._config.verify_weights
        ) as hashing:
            return hashing.manifest().fingerprint

    def _folder(self, start: NodeStart) -> Path:
        folder = Path(self._config.model or start.arguments["model"])
        if not folder.is_dir():
            raise ConfigError("model", str(folder), "must be a local Hugging Face folder, as on the worker's host")
        return folder


def run_node(config: RankConfig) -> int:
    """Until the worker ends. Returns: the exit code: 0 when the worker ended as it was asked, 1 when it was lost, 128 and the
    signal. Raises: ConfigError."""
    from diptych.common.limits import raise_open_files
    from diptych.common.observe.logging import setup_logging

    setup_logging(node=config.node_rank)
    raise_open_files()
    node = NodeOfThisHost(config).node
    signals: list[int] = []

    def on_signal(signum: int, frame: object) -> None:
        signals.append(signum)
        node.ask_to_end()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    code = node.run()
    return 128 + signals[0] if signals else code
