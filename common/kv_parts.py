"""The KV of a worker of several ranks: one format for each rank, of its layers and heads. Pure.

A worker computes with `tensor_parallel * pipeline` ranks. Rank `stage * tensor_parallel + i` has the layers of its pipeline
stage, and of each of them the heads of tensor-parallel rank i. A hand-off moves each rank's KV by itself, as its *part*.

A stage has the KV groups of its layers, which need not be all of the model's. So a group has two indexes: among the model's
groups, which block tables and pools follow, and among those of its rank, which handles, slabs and the rank's pool follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat, Shard


def split(kv: KvFormat, *, tensor_parallel: int = 1, pipeline: int = 1) -> tuple[KvFormat, ...]:
    """The ranks' formats, in the order of the ranks. Stages have equal numbers of layers, to within one.

    Args:
        kv: of one rank that has everything.
    Raises: ConfigError: layers or heads cannot be divided in this way.
    """
    num_layers = kv.num_layers
    if not 1 <= pipeline <= num_layers:
        raise ConfigError("pipeline_parallel_size", pipeline, f"must be between 1 and the {num_layers} layers")
    return tuple(
        _part(kv, layers_of_stage(num_layers, stage, pipeline), Shard(rank, tensor_parallel))
        for stage in range(pipeline)
        for rank in range(tensor_parallel)
    )


def layers_of_stage(num_layers: int, stage: int, pipeline: int) -> range:
    """Of one of `pipeline` stages, which have equal numbers of layers, to within one."""
    return range(stage * num_layers // pipeline, (stage + 1) * num_layers // pipeline)


def _part(kv: KvFormat, layers: range, shard: Shard) -> KvFormat:
    groups = [
        replace(group, layers=own)
        for group in kv.groups
        if (own := tuple(layer for layer in group.layers if layer in layers))
    ]
    return replace(kv, groups=tuple(groups), shard=shard)


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A KV group as one rank holds it: packed, moved and unpacked by itself.

    Args:
        group: its index among the model's groups.
        part: the rank. own: its index among the groups of this rank.
        num_layers, bytes_per_token: of it in this rank.
    """

    group: int
    part: int
    own: int
    num_layers: int
    bytes_per_token: int


def group_parts(kv: KvFormat, parts: Sequence[KvFormat]) -> tuple[GroupPart, ...]:
    """Every group of every rank, by rank, and within it in the order of its groups.

    Args: parts: of `kv`; `kv` alone where there is one rank.
    """
    index = {group.name: number for number, group in enumerate(kv.groups)}
    return tuple(
        GroupPart(index[group.name], number, own, group.num_layers, group.bytes_per_token(part.shard))
        for number, part in enumerate(parts)
        for own, group in enumerate(part.groups)
    )


def check_parts(kv: KvFormat, parts: Sequence[KvFormat]) -> None:
    """Raises: ConfigError unless the parts together are `kv`, each layer and head of it in the ranks of one stage."""
    if kv.shard != Shard() or kv.layers.start:
        raise ConfigError("kv", str(kv), "must have every layer and head where there are parts")
    first = number = 0
    while number < len(parts):
        layers, degree = parts[number].layers, parts[number].shard.degree
        stage = tuple(parts[number : number + degree])
        if layers.start != first or stage != tuple(_part(kv, layers, Shard(rank, degree)) for rank in range(degree)):
            raise ConfigError(
                "kv_parts", shape(parts), f"rank {number} and its stage do not hold layers {first} on of {kv}"
            )
        first, number = layers.stop, number + degree
    if first != kv.num_layers:
        raise ConfigError("kv_parts", shape(parts), f"layers {first} to {kv.num_layers - 1} are in no rank")


def shape(parts: Sequence[KvFormat]) -> str:
    """For people and for comparisons: which rank has what."""
    return "; ".join(
        f"rank {number}: layers {part.layers.start}-{part.layers.stop - 1}, {part.shard.rank + 1} of {part.shard.degree}"
        for number, part in enumerate(parts)
    )


def degrees(parts: Sequence[KvFormat]) -> str:
    """For people: into how many ranks the model is divided."""
    tensor_parallel, pipeline = _degrees(parts)
    degree = "+".join(map(str, dict.fromkeys(tensor_parallel)))
    return f"tensor parallel {degree}" + (f", pipeline {pipeline}" if pipeline > 1 else "")


def numerics(parts: Sequence[KvFormat]) -> str:
    """In which order sums are added up, as far as the ranks decide it: `tp2`. Pipeline stages add nothing up."""
    return "tp" + "+".join(map(str, dict.fromkeys(_degrees(parts)[0] or (1,))))


def _degrees(parts: Sequence[KvFormat]) -> tuple[list[int], int]:
    """The tensor-parallel degree of each pipeline stage, and their number."""
    stages: list[int] = []
    number = 0
    while number < len(parts):
        stages.append(parts[number].shard.degree)
        number += stages[-1]
    return stages, len(stages)
