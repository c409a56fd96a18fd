"""A plain checkpoint block by block, in float32, and what its linear layers get over calibration tokens.

The reference back end computes each block, so that every family of models is covered, and only one block's weights are in
memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diptych.common.sampling import SamplingParams
from diptych.engine.exec.backends.base import Hooks, Segment
from diptych.engine.exec.backends.torch import TorchBackend
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.kv_pool import KvPool, kv_format_of
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.methods.base import WHOLE, LoadedLinear, StepRows
from diptych.engine.exec.methods.plain import PlainMethod, PlainWeights
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.weights import BlockWeights, ModelWeights
from diptych.engine.messages import ScheduledSeq

LAYERS = ("qkv", "o", "gate_up", "down")
"""Linear layers of a block, by the names of BlockWeights."""
_NORMS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm", "q_norm", "k_norm")
_BLOCK_SIZE = 16


def linears_of(block: DecoderBlock) -> dict[str, Linear]:
    """By the names of LAYERS."""
    attention, mlp = block.attention, block.mlp
    return dict(zip(LAYERS, (attention.qkv, attention.o, mlp.gate_up, mlp.down), strict=True))


def norms_of(block: DecoderBlock) -> dict[str, Norm]:
    """By the names of BlockWeights, those that the block has."""
    found = {name: getattr(block, name, None) or getattr(block.attention, name, None) for name in _NORMS}
    return {name: norm for name, norm in found.items() if norm is not None}


@dataclass(slots=True)
class PlainBlock:
    """One block's tensors in float32.

    Args: linears: by the names of LAYERS. norms: weights, by the names of BlockWeights.
    """

    linears: dict[str, PlainWeights]
    norms: dict[str, Tensor]


@dataclass(slots=True)
class Inputs:
    """Of one linear layer, over all rows of the calibration.

    Args: hessian: [inputs, inputs] float32, the sum of x^T x; largest: [inputs], the largest magnitude of each input.
    """

    hessian: Tensor
    largest: Tensor


class _Observed:
    """A linear layer that notes what it gets. Implements methods.base.LoadedLinear."""

    def __init__(self, weights: PlainWeights) -> None:
        self._linear = DenseLinear(weights.weight, weights.bias)
        inputs, like = weights.weight.shape[1], weights.weight
        self.seen = Inputs(torch.zeros(inputs, inputs, device=like.device), torch.zeros(inputs, device=like.device))

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        self.seen.hessian.addmm_(x.T, x)
        torch.maximum(self.seen.largest, x.abs().amax(0), out=self.seen.largest)
        return self._linear(x, step)


class PlainCheckpoint:
    """Reads every tensor of the model once, in order.

    Raises: ConfigError naming file and tensor, as the checkpoint of a model that is served.
    """

    def __init__(self, source: Checkpoint, description: ModelDescription) -> None:
        self._source, self.description = source, description
        source.drop(description.ignored_suffixes)
        head, embedding = description.head, description.embedding
        self.embedding = source.take(f"{embedding.name}.weight", (embedding.vocab_size, embedding.size))
        if head.tied:
            source.drop(f"{part.name}.weight" for part in head.linear.parts)

    def blocks(self) -> Iterator[PlainBlock]:
        """Each block in turn; then what follows is read, too, and nothing may be left."""
        for block in self.description.blocks:
            linears = {name: PlainMethod().load(one, self._source, WHOLE) for name, one in linears_of(block).items()}
            norms = {
                name: self._source.take(f"{norm.name}.weight", (norm.size,)) for name, norm in norms_of(block).items()
            }
            yield PlainBlock(linears, norms)
        head = self.description.head
        self._source.take(f"{head.norm.name}.weight", (head.norm.size,))
        if not head.tied:
            PlainMethod().load(head.linear, self._source, WHOLE)
        self._source.finish()


class CalibrationRun:
    """Calibration tokens on their way through the blocks.

    Args:
        embedding: [vocab_size, hidden_size] float32, on the device that computes.
        prompts: token ids of each; computed one after another, over the same few KV blocks.
    """

    def __init__(self, description: ModelDescription, embedding: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        self._description = description
        longest = max(map(len, prompts))
        kv = kv_format_of(description, block_size=_BLOCK_SIZE)
        count = -(-longest // _BLOCK_SIZE)
        pool = KvPool((count,), kv, device=embedding.device, num_host_blocks=0)
        nothing: Any = None  # the head is never run, and blocks are put in as their turn comes
        self._weights = ModelWeights(description, embedding, [nothing] * description.num_layers, nothing, nothing)
        self._runtime = TorchBackend().runtime(self._weights, pool, longest)
        self._layouts = []
        for i, prompt in enumerate(prompts):
            tokens = ScheduledSeq(
                f"calibration-{i}", list(prompt), 0, (list(range(count)),), False, SamplingParams(max_tokens=1), 0
            )
            layout = self._runtime.lay_out([tokens])
            layout.sample_rows[:] = range(len(prompt))  # so that the last layer computes every row
            self._layouts.append(layout)
        self._states: list[Tensor | None] = [None] * len(prompts)
        self._behind = self._states

    @torch.inference_mode()
    def observe(self, index: int, block: PlainBlock) -> dict[str, Inputs]:
        """What each linear layer of a block gets."""
        layers = {name: _Observed(block.linears[name]) for name in LAYERS}
        self._behind = self._run(index, block, layers)
        return {name: layer.seen for name, layer in layers.items()}

    def accept(self) -> None:
        """Go on behind the block that was observed."""
        self._states = self._behind

    @torch.inference_mode()
    def advance(self, index: int, block: PlainBlock) -> None:
        """Go on behind a block, computed with these weights instead."""
        layers = {name: DenseLinear(one.weight, one.bias) for name, one in block.linears.items()}
        self._states = self._run(index, block, layers)

    def _run(self, index: int, block: PlainBlock, layers: Mapping[str, LoadedLinear]) -> list[Tensor | None]:
        declared = norms_of(self._description.blocks[index])
        loaded: dict[str, Any] = {**dict.fromkeys(_NORMS), **layers}
        loaded |= {name: RmsNorm(block.norms[name], norm.eps, norm.offset) for name, norm in declared.items()}
        self._weights.blocks[index] = BlockWeights(**loaded)
        total = self._description.num_layers
        segment = Segment(index, index + 1, index == 0, False, total)
        out = []
        for layout, state in zip(self._layouts, self._states, strict=True):
            if index == 0:
                self._runtime.begin(layout)
            out.append(self._runtime.run(None if state is None else state.clone(), layout, segment, Hooks()))
        nothing: Any = None
        self._weights.blocks[index] = nothing
        return out
