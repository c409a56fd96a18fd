"""Which degrees a model can have: what ranks divide must come out even. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.common.degrees import MOST_RANKS, Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import PLAIN, Linear, ShardBy
from diptych.engine.exec.models.description import ModelDescription

TENSOR_PARALLEL, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
"""The settings, as workers call them."""


@dataclass(frozen=True, slots=True)
class DividedSizes:
    """What ranks divide among themselves.

    Args:
        num_layers: divided by pipeline stages, which need one each.
        num_heads: of each layer; with num_kv_heads, mlp_sizes and vocab_size divided by tensor-parallel ranks.
        mlp_sizes: each one that a layer has.
        scaled: quantized layers, whose scales ranks may not cut.
        mlp_sizes, vocab_size: empty and 0: unknown.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_sizes: Sequence[int] = ()
    vocab_size: int = 0
    scaled: Sequence[Linear] = ()

    def why_not(self, degree: int) -> str:
        """What the model has that so many tensor-parallel ranks cannot divide; empty: they can."""
        if self.num_heads % degree:
            return f"the model has {self.num_heads:,} attention heads (num_attention_heads)"
        if self.num_kv_heads % degree and degree % self.num_kv_heads:
            return (
                f"the model has {self.num_kv_heads:,} KV heads (num_key_value_heads), which can be neither divided nor "
                "replicated evenly"
            )
        for size in self.mlp_sizes:
            if size % degree:
                return f"the model's MLP has {size:,} columns (intermediate_size)"
        if self.vocab_size % degree:
            return f"the model has {self.vocab_size:,} tokens (vocab_size)"
        return self._cut_scales(degree)

    def _cut_scales(self, degree: int) -> str:
        if degree > 1 and self.scaled:
            # Here and not above: methods import torch.
            from diptych.engine.exec.methods.registry import METHODS

            try:
                for linear in self.scaled:
                    for rank in range(degree):
                        METHODS[linear.method].create(linear, Shard(rank, degree))
            except ConfigError as error:
                return error.rule
        return ""

    def check(self, degrees: Degrees, setting: Callable[[str], str] = str) -> None:
        """Raises: ConfigError naming the setting, its flag, what cannot be divided and the degrees that are possible.

        Args: setting: the name of TENSOR_PARALLEL and PIPELINE where it is another.
        """
        if degrees.pipeline > self.num_layers:
            name = setting(PIPELINE)
            most = min(self.num_layers, MOST_RANKS // degrees.tensor_parallel)
            numbers = f"1 to {most}" if most > 1 else "1"
            raise ConfigError(
                name, degrees.pipeline, f"the model has {self.num_layers} layers; {_flag(name)} can be {numbers}"
            )
        if why := self.why_not(degrees.tensor_parallel):
            name = setting(TENSOR_PARALLEL)
            able = [n for n in range(1, MOST_RANKS // degrees.pipeline + 1) if not self.why_not(n)]
            raise ConfigError(name, degrees.tensor_parallel, f"{why}; {_flag(name)} can be {', '.join(map(str, able))}")


def sizes_of(model: ModelDescription) -> DividedSizes:
    """Of a model that is served."""
    linears = [linear for block in model.blocks for linear in block.linears]
    linears += [] if model.head.tied else [model.head.linear]
    shapes: dict[object, Linear] = {}
    for linear in linears:  # those of other layers are alike, and have other names
        if linear.method != PLAIN:
            nameless = tuple(replace(part, name="") for part in linear.parts)
            shapes.setdefault(replace(linear, parts=nameless), linear)
    return DividedSizes(
        num_layers=model.num_layers,
        num_heads=model.blocks[0].attention.num_heads,
        num_kv_heads=model.num_kv_heads,
        mlp_sizes=tuple(dict.fromkeys(block.mlp.size for block in model.blocks)),
        vocab_size=model.vocab_size,
        scaled=tuple(shapes.values()),
    )


def method_of_ranks(model: ModelDescription, tensor_parallel: int) -> str:
    """The method by which KV is known: `model.method`, with the degree where that changes values and not only their last bits:
    `int8@tp2`. A layer that ranks divide by inputs quantizes the inputs of each rank by their own largest value there."""
    # Here and not above: methods import torch.
    from diptych.engine.exec.methods.registry import METHODS

    linears = [linear for block in model.blocks for linear in block.linears if linear.shard is ShardBy.INPUTS]
    if tensor_parallel > 1 and any(METHODS[linear.method].scales_whole_rows(linear) for linear in linears):
        return f"{model.method}@tp{tensor_parallel}"
    return model.method


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")
