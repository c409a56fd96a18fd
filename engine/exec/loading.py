"""From a checkpoint and a plan to weights in the forms of the back ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.common.kv_format import Shard
from diptych.engine.exec.backends.base import Backend, Plan
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import Linear, ShardBy
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.lora import NO_LORAS, LoraModel, LoraSizes
from diptych.engine.exec.methods.base import WHOLE, LoadedLinear, StepRows, TensorSource, cut_out
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.parallel.communicator import Communicator, GatheredLinear
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.exec.parallel.vocabulary import VocabularyPart
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

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> Tensor:
        return cut_out(self._tensor, where)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensor.shape)

    def file_of(self, name: str) -> str:
        return name


def _norm(layer: Norm, source: TensorSource) -> RmsNorm:
    return RmsNorm(source.take(f"{layer.name}.weight", (layer.size,)), layer.eps, layer.offset)


def _linear(layer: Linear, source: TensorSource, backend: Backend, shard: Shard) -> LoadedLinear:
    method = METHODS[layer.method]
    return backend.keep(method, method.load(layer, source, shard))


class _Reader:
    """What one rank loads of a model."""

    def __init__(self, source: WholeModel, plan: Plan, loras: LoraSizes, communicator: Communicator | None) -> None:
        self.source, self._shard = source, plan.place.shard
        self._communicator = communicator if plan.place.tensor_parallel > 1 else None
        self.lora = _lora(plan.model, plan.place, loras) if loras.slots else None

    def norm(self, layer: Norm) -> RmsNorm:
        return _norm(layer, self.source)

    def _linear(self, layer: Linear, backend: Backend, like: Tensor) -> LoadedLinear:
        loaded = _linear(layer, self.source, backend, self._shard)
        if self.lora is not None:
            loaded = backend.keep_lora(loaded, self.lora.add(layer, like, backend.lora_slots))
        if self._communicator is not None and layer.shard is ShardBy.INPUTS:
            return backend.keep_reduced(loaded, self._communicator)
        return loaded

    def block(self, block: DecoderBlock, backend: Backend) -> BlockWeights:
        attention, mlp = block.attention, block.mlp
        attention_norm = self.norm(block.attention_norm)
        like = attention_norm.weight

        def linear(layer: Linear) -> LoadedLinear:
            return self._linear(layer, backend, like)

        def norm(layer: Norm | None) -> RmsNorm | None:
            return None if layer is None else self.norm(layer)

        return BlockWeights(
            attention_norm=attention_norm,
            qkv=linear(attention.qkv),
            q_norm=norm(attention.q_norm),
            k_norm=norm(attention.k_norm),
            o=linear(attention.o),
            attention_output_norm=norm(block.attention_output_norm),
            mlp_norm=self.norm(block.mlp_norm),
            gate_up=linear(mlp.gate_up),
            down=linear(mlp.down),
            mlp_output_norm=norm(block.mlp_output_norm),
        )

    def embedding(self, model: ModelDescription) -> Tensor:
        """This rank's rows."""
        rows = _rows(model, self._shard)
        where = slice(rows.start, rows.stop), slice(None)
        return self.source.take(f"{model.embedding.name}.weight", (model.vocab_size, model.hidden_size), where=where)

    def vocabulary(self, model: ModelDescription) -> VocabularyPart | None:
        if self._communicator is None:
            return None
        return VocabularyPart(_rows(model, self._shard).start, self._communicator)

    def head(self, plan: Plan, embedding: Tensor) -> LoadedLinear:
        """Args: embedding: what `embedding` returned, of a tied head."""
        head, backend = plan.model.head, plan.head_owner
        if head.tied:
            linear = _linear(plan.description.head.linear, _Once(embedding), backend, WHOLE)
        else:
            linear = _linear(head.linear, self.source, backend, self._shard)
        return linear if self._communicator is None else GatheredLinear(linear, self._communicator)


class _NotHere:
    """The head, on another stage. Implements LoadedLinear."""

    num_bytes = 0

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        raise InternalError("the head is on the last stage")


def _rows(model: ModelDescription, shard: Shard) -> range:
    return shard.units(model.vocab_size, "vocab_size")


def names_elsewhere(model: ModelDescription, place: RankPlace) -> list[str]:
    """Of what has weights on other pipeline stages only, as the checkpoint names it, less the last word (`weight`)."""
    layers, head = place.layers(model.num_layers), model.head
    found = []
    for block in model.blocks[: layers.start] + model.blocks[layers.stop :]:
        attention = block.attention
        norms = [block.attention_norm, attention.q_norm, attention.k_norm, block.attention_output_norm]
        norms += [block.mlp_norm, block.mlp_output_norm]
        found += [norm.name for norm in norms if norm is not None]
        found += [part.name for linear in block.linears for part in linear.parts]
    if not place.last_stage:
        found += [head.norm.name, *(part.name for part in head.linear.parts)]
    if not place.first_stage and not (place.last_stage and head.tied):
        found.append(model.embedding.name)
    return found


def _lora(model: ModelDescription, place: RankPlace, loras: LoraSizes) -> LoraModel:
    layers = place.layers(model.num_layers)
    before, behind = (
        [linear for block in blocks for linear in block.linears]
        for blocks in (model.blocks[: layers.start], model.blocks[layers.stop :])
    )
    return LoraModel(loras, place.shard, before=before, behind=behind)


def load_weights(
    source: WholeModel, plan: Plan, loras: LoraSizes = NO_LORAS, communicator: Communicator | None = None
) -> PlacedModel:
    """Take this rank's part of every tensor of the description from the source, once, and nothing may be left.

    Args:
        source: of a model with pipeline stages without `names_elsewhere`.
        loras: slots for adapters in the linear layers of every block.
        communicator: to the other ranks, where the plan's place is one of several.
    Raises: ConfigError naming the tensor that is missing, unexpected, of another shape or no number.
    """
    model, place = plan.model, plan.place
    if place.num_ranks > 1 and communicator is None:
        raise InternalError(f"rank {place.rank} of {place.num_ranks} has no way to the others")
    with torch.inference_mode():
        source.drop(model.ignored_suffixes)
        if model.head.tied:
            source.drop(
                f"{part.name}.weight" for part in model.head.linear.parts
            )  # some writers store the copy as well
        reader = _Reader(source, plan, loras, communicator)
        embeds = place.first_stage or (place.last_stage and model.head.tied)
        found = reader.embedding(model) if embeds else None
        layers = place.layers(model.num_layers)
        blocks = [
            reader.block(block, backend)
            for block, backend in zip(model.blocks[layers.start : layers.stop], plan.block_owners, strict=True)
        ]
        first_norm = blocks[0].attention_norm
        embedding = first_norm.weight.new_empty((0, model.hidden_size)) if found is None else found
        weights = ModelWeights(
            description=plan.description,
            embedding=embedding,
            blocks=blocks,
            norm=reader.norm(model.head.norm)
            if place.last_stage
            else first_norm,  # read by nobody before the last stage
            lm_head=reader.head(plan, embedding) if place.last_stage else _NotHere(),
            lora=reader.lora,
            communicator=communicator,
            vocabulary=reader.vocabulary(model),
        )
        source.finish()
    return PlacedModel(plan, weights)
