"""A model's weights, block by block, each in the form of the back end that runs the block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.engine.capacity import WeightSizes
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.lora import LoraModel
from diptych.engine.exec.methods.base import LoadedLinear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.parallel.communicator import Communicator, GatheredLinear
from diptych.engine.exec.parallel.vocabulary import VocabularyPart


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
        description: what is computed here: of a rank its part, see parallel.place.local_description.
        embedding: [vocab_size, hidden_size]; of a rank its rows, of a later pipeline stage none.
        norm: before the head.
        lora: the slots for adapters in the blocks' linear layers; None: there are none.
        communicator: to the other ranks; None: there are none.
        vocabulary: which rows of the embedding this rank has; None: all.
    """

    description: ModelDescription
    embedding: Tensor
    blocks: list[BlockWeights]
    norm: RmsNorm
    lm_head: LoadedLinear
    lora: LoraModel | None = None
    communicator: Communicator | None = None
    vocabulary: VocabularyPart | None = None

    def sizes(self) -> WeightSizes:
        head = self.lm_head.inner if isinstance(self.lm_head, GatheredLinear) else self.lm_head
        shared = isinstance(head, DenseLinear) and head.weight.data_ptr() == self.embedding.data_ptr()
        layers = sum(linear.num_bytes for block in self.blocks for linear in block.linears)
        adapters = 0 if self.lora is None else self.lora.num_bytes
        return WeightSizes(
            layers, head.num_bytes, 0 if shared else self.embedding.nbytes, adapters, self.description.method
        )
