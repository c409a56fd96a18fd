"""How many ranks a worker has, and the list of their GPUs: settings, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from diptych.common.addresses import is_loopback, is_wildcard
from diptych.common.degrees import MOST_RANKS, Degrees
from diptych.common.errors import ConfigError
from diptych.common.model_files import read_json_object

MASTER_PORT = 29_500
"""As torchrun has it."""


def check_degrees(tensor_parallel: int, pipeline: int, prefix: str = "") -> None:
    """Raises: ConfigError for degrees that no worker can have. Args: prefix: of the settings' names."""
    for name, value in (("tensor_parallel_size", tensor_parallel), ("pipeline_parallel_size", pipeline)):
        if not 1 <= value <= MOST_RANKS:
            raise ConfigError(prefix + name, value, f"must be 1 to {MOST_RANKS}")
    if tensor_parallel * pipeline > MOST_RANKS:
        product = f"{pipeline} stages of {tensor_parallel} ranks are more than the {MOST_RANKS} that a worker can have"
        raise ConfigError(prefix + "tensor_parallel_size", tensor_parallel, product)


def check_division(model: Path, degrees: Degrees) -> None:
    """At once, before anything is imported or started. What only the form of quantized weights forbids is found later.

    Args: model: a model's folder.
    Raises: ConfigError for degrees by which this model cannot be divided, and for a config.json that cannot be served.
    """
    if degrees.num_ranks == 1:
        return
    # Here and not above: other commands do without.
    from diptych.engine.exec.models.registry import describe
    from diptych.engine.exec.parallel.division import sizes_of

    raw = read_json_object(model / "config.json")
    raw.pop("quantization_config", None)  # whose formats import torch
    sizes_of(describe(raw)).check(degrees)


def check_nodes(nnodes: int, degrees: Degrees) -> None:
    """Raises: ConfigError when the ranks cannot be divided among so many hosts."""
    if not 1 <= nnodes <= MOST_RANKS:
        raise ConfigError("nnodes", nnodes, f"must be 1 to {MOST_RANKS}")
    if degrees.num_ranks % nnodes:
        rule = f"must divide the {degrees.num_ranks} ranks ({degrees}): each host has equally many"
        raise ConfigError("nnodes", nnodes, rule)


def check_master_port(master_port: int) -> None:
    """Raises: ConfigError."""
    if not 1 <= master_port <= 65_534:
        raise ConfigError("master_port", master_port, "must be 1 to 65534; the ranks use the port after it, too")


def check_master(master_addr: str, *, secured: bool) -> None:
    """Where the hosts of a worker meet. Args: secured: by certificates, or as the operator wants it. Raises: ConfigError."""
    if not master_addr:
        rule = "must be set (or MASTER_ADDR): the address of the worker, where its other hosts join"
        raise ConfigError("master_addr", "", rule)
    if is_wildcard(master_addr):
        raise ConfigError(
            "master_addr", master_addr, "must be one address of the worker's host: the others connect to it"
        )
    if not (secured or is_loopback(master_addr)):
        rule = "other machines can reach it: set cluster_ca, cluster_cert and cluster_key, or --insecure if you must"
        raise ConfigError("master_addr", master_addr, rule)


def device_numbers(name: str, text: str) -> tuple[int, ...]:
    """Of a setting such as "0,1". Raises: ConfigError naming the setting."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if text.strip())
    except ValueError:
        raise ConfigError(name, text, "must be GPU numbers separated by commas") from None
    if any(number < 0 for number in numbers):
        raise ConfigError(name, text, "must be GPU numbers, from 0 on")
    return numbers


def check_devices(devices: str, num_ranks: int, device: str) -> None:
    """Raises: ConfigError for a list that is not one GPU for each rank."""
    numbers = device_numbers("devices", devices)
    if not numbers:
        return
    if device != "cuda":
        raise ConfigError("devices", devices, "needs --device cuda")
    if len(numbers) != num_ranks:
        raise ConfigError("devices", devices, f"must name one GPU for each of the {num_ranks} ranks")
