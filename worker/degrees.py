"""How many ranks a worker has, and the list of their GPUs: settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import ConfigError

MOST_RANKS = 64
"""Of one worker."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Rank `stage * tensor_parallel + i` has the layers of its pipeline stage, and of them the part of tensor-parallel rank i."""

    tensor_parallel: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline

    @property
    def sampler(self) -> int:
        """The rank whose result is the step's: the first one of the last stage."""
        return (self.pipeline - 1) * self.tensor_parallel

    def __str__(self) -> str:
        return f"tensor parallel {self.tensor_parallel}, pipeline {self.pipeline}"


def check_degrees(tensor_parallel: int, pipeline: int, prefix: str = "") -> None:
    """Raises: ConfigError for degrees that no worker can have. Args: prefix: of the settings' names."""
    for name, value in (("tensor_parallel_size", tensor_parallel), ("pipeline_parallel_size", pipeline)):
        if not 1 <= value <= MOST_RANKS:
            raise ConfigError(prefix + name, value, f"must be 1 to {MOST_RANKS}")
    if tensor_parallel * pipeline > MOST_RANKS:
        product = f"{pipeline} stages of {tensor_parallel} ranks are more than the {MOST_RANKS} that a worker can have"
        raise ConfigError(prefix + "tensor_parallel_size", tensor_parallel, product)


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
