"""From a checkpoint and a plan to weights in the forms of the back ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.common.kv_format import Shard
from diptych.engine.exec.backends.base import Backend, Plan
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.lora import NO_LORAS, LoraModel, LoraSizes
from diptych.engine.exec.methods.base import WHOLE, LoadedLinear, TensorSource
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.weights import BlockWeights, ModelWeights


class WholeModel(TensorSource, Protocol):
    """All tensors of one model."""

    def drop(self, suffixes: Iterable[str]) -> None:
        """Forget tensors that carry nothing new."""
        ...

    def finish(self) -> None:
        """Raises: ConfigError naming file and tensor when one is left over, or one that was taken holds no number."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """weights: in the forms of the back ends that the plan names."""

    plan: Plan
    weights: ModelWeights


class _Once:
    """Gives a tensor that was taken already once more: a tied embedding is the head's weight."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def take(self, name: str, shape: tuple[int, ...], *, as_stored: bool = False) -> Tensor:
        return self._tensor

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensor.shape)

    def file_of(self, name: str) -> str:
        return name


def _norm(layer: Norm, source: TensorSource) -> RmsNorm:
    return RmsNorm(source.take(f"{layer.name}.weight", (layer.size,)), layer.eps, layer.offset)


def _linear(layer: Linear, source: TensorSource, backend: Backend, shard: Shard) -> LoadedLinear:
    method = METHODS[layer.method]
    return backend.keep(method, method.load(layer, source, shard))


def _block(
    block: DecoderBlock, source: TensorSource, backend: Backend, shard: Shard, lora: LoraModel | None, like: Tensor
) -> BlockWeights:
    def linear(layer: Linear) -> LoadedLinear:
        loaded = _linear(layer, source, backend, shard)
        return loaded if lora is None else backend.keep_lora(loaded, lora.add(layer, like))

    def norm(layer: Norm | None) -> RmsNorm | None:
        return None if layer is None else _norm(layer, source)

    attention, mlp = block.attention, block.mlp
    return BlockWeights(
        attention_norm=_norm(block.attention_norm, source),
        qkv=linear(attention.qkv),
        q_norm=norm(attention.q_norm),
        k_norm=norm(attention.k_norm),
        o=linear(attention.o),
        attention_output_norm=norm(block.attention_output_norm),
        mlp_norm=_norm(block.mlp_norm, source),
        gate_up=linear(mlp.gate_up),
        down=linear(mlp.down),
        mlp_output_norm=norm(block.mlp_output_norm),
    )


def load_weights(source: WholeModel, plan: Plan, shard: Shard = WHOLE, loras: LoraSizes = NO_LORAS) -> PlacedModel:
    """Take every tensor of the description from the source, once, and nothing may be left.

    Args: loras: slots for adapters in the linear layers of every block.

    Raises: ConfigError naming the tensor that is missing, unexpected, of another shape or no number.
    """
    description = plan.description
    with torch.inference_mode():
        source.drop(description.ignored_suffixes)
        vocabulary = (description.vocab_size, description.hidden_size)
        embedding = source.take(f"{description.embedding.name}.weight", vocabulary)
        head = description.head
        if head.tied:
            source.drop(f"{part.name}.weight" for part in head.linear.parts)  # some writers store the copy as well
        lora = LoraModel(loras, shard, pinned=embedding.device.type == "cuda") if loras.slots else None
        weights = ModelWeights(
            description=description,
            embedding=embedding,
            blocks=[
                _block(block, source, backend, shard, lora, embedding)
                for block, backend in zip(description.blocks, plan.block_owners, strict=True)
            ],
            norm=_norm(head.norm, source),
            lm_head=_linear(head.linear, _Once(embedding) if head.tied else source, plan.head_owner, shard),
            lora=lora,
        )
        source.finish()
    return PlacedModel(plan, weights)
