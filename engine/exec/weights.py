"""Read a checkpoint (safetensors, one file or sharded) into the decoder's layers. Strict: every tensor must be there, none
may be left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.capacity import WeightSizes
from diptych.engine.exec.linear import Linear, WideCpuLinear, make_linear
from diptych.engine.exec.model_config import ModelConfig
from diptych.engine.exec.native.weights import PackedLinear
from diptych.engine.exec.norm import RmsNorm

AnyLinear = Linear | WideCpuLinear | PackedLinear
MakeLinear = Callable[[Tensor, Tensor | None], AnyLinear]
"""(weight, bias) -> layer."""


@dataclass(slots=True)
class LayerWeights:
    """qkv: q, k and v one after the other; gate_up: gate, then up. q_norm, k_norm: over head_dim, where the family has them."""

    input_norm: RmsNorm
    qkv: AnyLinear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: AnyLinear
    post_norm: RmsNorm
    gate_up: AnyLinear
    down: AnyLinear


@dataclass(slots=True)
class DecoderWeights:
    """embedding: [vocab_size, hidden_size]."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: RmsNorm
    lm_head: AnyLinear

    def sizes(self) -> WeightSizes:
        head = self.lm_head
        shared = isinstance(head, Linear) and head.weight.data_ptr() == self.embedding.data_ptr()
        layers = sum(one.num_bytes for layer in self.layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return WeightSizes(layers, head.num_bytes, 0 if shared else self.embedding.nbytes)


class Checkpoint:
    """Tensors by name over all shards; each may be taken once.

    Raises: ConfigError for a folder without safetensors or with a broken index.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (folder / "model.safetensors").exists():
            names = ["model.safetensors"]
        else:
            raise ConfigError(
                "model", str(folder), "no model.safetensors and no model.safetensors.index.json in the folder"
            )
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        for name in names:
            if not (folder / name).is_file():
                raise ConfigError("model", str(folder), f"shard {name} of the index is missing")
            file: Any = safe_open(folder / name, framework="pt")
            self._files.append(file)
            self._where.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where.clear()
        self._files.clear()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises: ConfigError when the tensor is missing or has another shape."""
        file = self._where.pop(name, None)
        if file is None:
            raise ConfigError("model", str(self._folder), f"tensor {name} is missing")
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError("model", str(self._folder), f"tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def drop(self, suffix: str) -> None:
        """Forget tensors that carry nothing new."""
        for name in [name for name in self._where if name.endswith(suffix)]:
            del self._where[name]

    def check_empty(self) -> None:
        if self._where:
            some = ", ".join(sorted(self._where)[:5])
            raise ConfigError("model", str(self._folder), f"{len(self._where)} unexpected tensors: {some}")


def _norm(source: Checkpoint, config: ModelConfig, name: str, size: int) -> RmsNorm:
    return RmsNorm(source.take(f"{name}.weight", (size,)), config.rms_norm_eps)


def _merged(
    source: Checkpoint, prefix: str, parts: list[tuple[str, int]], inputs: int, *, bias: bool, make: MakeLinear
) -> AnyLinear:
    weight = torch.cat([source.take(f"{prefix}.{name}.weight", (outputs, inputs)) for name, outputs in parts])
    biases = [source.take(f"{prefix}.{name}.bias", (outputs,)) for name, outputs in parts] if bias else None
    return make(weight, torch.cat(biases) if biases else None)


def _layer(source: Checkpoint, config: ModelConfig, index: int, make: MakeLinear) -> LayerWeights:
    base, hidden, ffn = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{base}.self_attn", f"{base}.mlp"
    qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
    gate_up = [("gate_proj", ffn), ("up_proj", ffn)]
    return LayerWeights(
        input_norm=_norm(source, config, f"{base}.input_layernorm", hidden),
        qkv=_merged(source, attention, qkv, hidden, bias=config.qkv_bias, make=make),
        q_norm=_norm(source, config, f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=_norm(source, config, f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
        o=_merged(source, attention, [("o_proj", hidden)], config.q_size, bias=config.o_bias, make=make),
        post_norm=_norm(source, config, f"{base}.post_attention_layernorm", hidden),
        gate_up=_merged(source, mlp, gate_up, hidden, bias=config.mlp_bias, make=make),
        down=_merged(source, mlp, [("down_proj", hidden)], ffn, bias=config.mlp_bias, make=make),
    )


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, make: MakeLinear = make_linear
) -> DecoderWeights:
    """make: how a linear layer keeps its weight.

    Raises: ConfigError naming the tensor that is missing, unexpected or of another shape.
    """
    with torch.inference_mode(), Checkpoint(folder, dtype=dtype, device=device) as source:
        source.drop("rotary_emb.inv_freq")  # old checkpoints carry it; it follows from the config
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = source.take("model.embed_tokens.weight", vocabulary)
        if config.tie_embeddings:
            source.drop("lm_head.weight")  # some writers store the tied copy as well
        head = embedding if config.tie_embeddings else source.take("lm_head.weight", vocabulary)
        weights = DecoderWeights(
            embedding=embedding,
            layers=[_layer(source, config, i, make) for i in range(config.num_layers)],
            norm=_norm(source, config, "model.norm", config.hidden_size),
            lm_head=make(head, None),
        )
        source.check_empty()
    return weights
