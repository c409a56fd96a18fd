"""A model's weights, block by block, each in the form of the back end that runs the block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from diptych.engine.capacity import WeightSizes
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.methods.base import LoadedLinear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Of one layers.block.DecoderBlock, by its names."""

    attention_norm: RmsNorm
    qkv: LoadedLinear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: LoadedLinear
    attention_output_norm: RmsNorm | None
    mlp_norm: RmsNorm
    gate_up: LoadedLinear
    down: LoadedLinear
    mlp_output_norm: RmsNorm | None

    @property
    def linears(self) -> tuple[LoadedLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """
    Args:
        embedding: [vocab_size, hidden_size].
        norm: before the head.
        adapters: see RunnerCapabilities; those that the weights of the linear layers hold.
    """

    description: ModelDescription
    embedding: Tensor
    blocks: list[BlockWeights]
    norm: RmsNorm
    lm_head: LoadedLinear
    adapters: Mapping[str, str] = field(default_factory=dict)

    def sizes(self) -> WeightSizes:
        head = self.lm_head
        shared = isinstance(head, DenseLinear) and head.weight.data_ptr() == self.embedding.data_ptr()
        layers = sum(linear.num_bytes for block in self.blocks for linear in block.linears)
        return WeightSizes(layers, head.num_bytes, 0 if shared else self.embedding.nbytes)
