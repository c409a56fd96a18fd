"""Which part of a model a rank computes. Pure.

Rank `stage * tensor_parallel + i` has the layers of its pipeline stage, and of each of them the heads and the columns of
tensor-parallel rank i, as its KV does (common/kv_parts.py). The first stage embeds, the last one has the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.common import kv_parts
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat, Shard
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.parallel.division import sizes_of


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of `tensor_parallel * pipeline`. Raises: ConfigError."""

    rank: int = 0
    tensor_parallel: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("tensor_parallel_size", self.tensor_parallel),
            ("pipeline_parallel_size", self.pipeline),
        ):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError("rank", self.rank, f"must be in [0, {self.num_ranks})")

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel, self.pipeline)

    @property
    def num_ranks(self) -> int:
        return self.degrees.num_ranks

    @property
    def shard(self) -> Shard:
        return Shard(self.rank % self.tensor_parallel, self.tensor_parallel)

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.pipeline - 1

    @property
    def samples(self) -> bool:
        """Whether the step's result is this rank's."""
        return self.rank == self.degrees.sampler

    def layers(self, num_layers: int) -> range:
        """Of this rank's stage. Args: num_layers: of the model. Raises: ConfigError with fewer layers than stages."""
        if self.pipeline > num_layers:
            raise ConfigError("pipeline_parallel_size", self.pipeline, f"the model has {num_layers} layers only")
        return kv_parts.layers_of_stage(num_layers, self.stage, self.pipeline)

    def part(self, kv: KvFormat) -> KvFormat:
        """Of the model's KV what this rank's pool holds. Raises: ConfigError."""
        return kv_parts.split(kv, tensor_parallel=self.tensor_parallel, pipeline=self.pipeline)[self.rank]


WHOLE_PLACE = RankPlace()
"""Of a worker without ranks."""


def local_description(description: ModelDescription, place: RankPlace) -> ModelDescription:
    """What this rank's back ends compute: the layers of its stage with its own numbers of heads, inputs and outputs.

    Embedding and head are in it on every stage; the plan says who runs them. The size of the vocabulary stays that of the model:
    it is the range of token ids. Weights are read by the whole description, with Linear.share.

    Raises: ConfigError naming the degree, the number that it does not divide, and the possible ones.
    """
    if place.num_ranks == 1:
        return description
    sizes_of(description).check(place.degrees)
    layers = place.layers(description.num_layers)
    local = replace(description, blocks=tuple(_block(description.blocks[layer], place.shard) for layer in layers))
    return replace(local, head=replace(local.head, linear=_linear(local.head.linear, place.shard)))


def _block(block: DecoderBlock, shard: Shard) -> DecoderBlock:
    local = block.with_linears(lambda layer: _linear(layer, shard))
    return replace(local, attention=_attention(local.attention, block.attention, shard))


def _attention(local: Attention, whole: Attention, shard: Shard) -> Attention:
    heads, kv_heads = shard.units(whole.num_heads, "num_attention_heads"), shard.heads(whole.num_kv_heads)
    return replace(local, num_heads=len(heads), num_kv_heads=len(kv_heads))


def _linear(layer: Linear, shard: Shard) -> Linear:
    parts, inputs = [], layer.inputs
    for part in layer.parts:
        rows, columns = layer.share(part, shard)
        outputs = len(range(*rows.indices(part.outputs)))
        inputs = len(range(*columns.indices(layer.inputs)))
        parts.append(replace(part, outputs=outputs, heads=part.heads * outputs // part.outputs))
    return replace(layer, parts=tuple(parts), inputs=inputs)
