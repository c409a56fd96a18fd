"""A model as a whole: its blocks in order, with the checkpoint's names for their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead
from diptych.engine.exec.layers.linear import PLAIN, Linear
from diptych.engine.exec.layers.norm import Norm


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
        for block in self.blocks:
            norms = [norm for norm in (block.attention.q_norm, block.attention.k_norm) if norm is not None]
            if len(norms) == 1:
                raise ConfigError(norms[0].name, norms[0].size, "q_norm and k_norm: both, or neither")
            for norm in norms:
                # C and Triton normalize each head with the first head_dim weights, whatever the norm's size.
                if norm.size != self.head_dim:
                    raise ConfigError(norm.name, norm.size, f"must be a norm of each head: head_dim={self.head_dim}")

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

    def with_linears(self, change: Callable[[Linear], Linear], *, head: bool) -> ModelDescription:
        """The same with other linear layers. Args: head: also that of the head, where it is not the embedding's."""
        last = replace(self.head, linear=change(self.head.linear)) if head and not self.head.tied else self.head
        return replace(self, blocks=tuple(block.with_linears(change) for block in self.blocks), head=last)

    @property
    def method(self) -> str:
        """Of its linear layers: plain, or the names of the other ones. Part of the identity of its KV."""
        linears = [*self.head.linears, *(linear for block in self.blocks for linear in block.linears)]
        return "+".join(sorted({linear.method for linear in linears} - {PLAIN})) or PLAIN

    def plain_tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's tensors where every linear layer is plain: name -> shape."""
        out: dict[str, tuple[int, ...]] = {f"{self.embedding.name}.weight": (self.vocab_size, self.hidden_size)}
        norms: list[Norm | None] = [self.head.norm]
        linears = [] if self.head.tied else [self.head.linear]
        for block in self.blocks:
            attention = block.attention
            norms += [block.attention_norm, attention.q_norm, attention.k_norm, block.attention_output_norm]
            norms += [block.mlp_norm, block.mlp_output_norm]
            linears += block.linears
        out |= {f"{norm.name}.weight": (norm.size,) for norm in norms if norm is not None}
        for linear in linears:
            out |= {f"{part.name}.weight": (part.outputs, linear.inputs) for part in linear.parts}
            out |= {f"{part.name}.bias": (part.outputs,) for part in linear.parts if linear.bias}
        return out

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of all blocks, biases left out."""
        return sum(linear.num_weights for block in self.blocks for linear in block.linears)

    @property
    def head_weights(self) -> int:
        return self.head.linear.num_weights
