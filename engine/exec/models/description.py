"""A model as a whole: its blocks in order, with the checkpoint's names for their tensors."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """embedding, then blocks, then head.

    Args:
        architecture: as config.json calls it.
        max_position: tokens that the model was trained for.
        ignored_suffixes: of tensors that old checkpoints carry and that follow from the config.
    Raises: ConfigError where blocks do not fit together: the KV pool has one shape for all layers.
    """

    architecture: str
    embedding: Embedding
    blocks: tuple[DecoderBlock, ...]
    head: LmHead
    max_position: int
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            values = {getattr(block.attention, name) for block in self.blocks}
            if len(values) != 1:
                raise ConfigError(name, sorted(values), "must be the same in every layer")

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.embedding.size

    @property
    def num_kv_heads(self) -> int:
        """Of every layer."""
        return self.blocks[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Of every layer."""
        return self.blocks[0].attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the tokens that a query sees, itself included; None: all."""
        return tuple(block.attention.window for block in self.blocks)

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of all blocks, biases left out."""
        return sum(
            linear.num_weights
            for block in self.blocks
            for linear in (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down)
        )

    @property
    def head_weights(self) -> int:
        return self.head.linear.num_weights
