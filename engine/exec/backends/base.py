"""What a back end is, and the plan that says which one runs which block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import (
    COMPUTE_DTYPES,
    KV_SCALE_DTYPE,
    QUANTIZED_KV,
    KvFormat,
    KvKind,
    dtype_bytes,
)
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.mlp import Mlp
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope
from diptych.engine.exec.lora import NO_LORAS, LayerSlots, LoraSizes
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace, local_description
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import ScheduledSeq

AnyBlock = Embedding | DecoderBlock | LmHead


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of one back end: layers [first, last), and the ends of the model that it runs as well.

    Args:
        num_layers: of this rank; layers are counted within it.
        last_stage: this rank has the model's last layer.
    """

    first: int
    last: int
    embedding: bool
    head: bool
    num_layers: int
    last_stage: bool = True

    @property
    def has_last_layer(self) -> bool:
        """Behind whose attention only the rows matter whose logits are wanted."""
        return self.last_stage and self.last == self.num_layers > self.first


@dataclass(frozen=True, slots=True)
class Hooks:
    """Looked at between two layers.

    Args:
        should_abort: True: the step raises StepAborted.
        on_layers: told how many layers are done.
    """

    should_abort: Callable[[], bool] | None = None
    on_layers: Callable[[int], None] | None = None


class Layout(Protocol):
    """One step as a back end lays it out.

    Args:
        order: sequence index of each group of rows, in row order.
        token_ids, positions: of each row, as list, array or tensor.
        sample_rows: rows whose logits are wanted; sample_seqs: the sequence index of each. More rows may be appended until
            the step runs.
    """

    order: list[int]
    token_ids: Any
    positions: Any
    sample_rows: list[int]
    sample_seqs: list[int]


class Runtime(Protocol):
    """A back end's part of one loaded model and its KV pool."""

    def lay_out(self, seqs: Sequence[ScheduledSeq]) -> Any:
        """Returns: a Layout. Rows of sequences with one new token come first where they do in `seqs`.

        Raises: InternalError when a sequence breaks the scheduler's promises.
        """
        ...

    def begin(self, layout: Any) -> None:
        """Once in a step, before any back end computes."""
        ...

    def run(self, x: Tensor | None, layout: Any, segment: Segment, hooks: Hooks) -> Tensor | None:
        """Compute the segment and store its KV.

        Args:
            x: [num_rows, hidden_size], may be overwritten; None: the segment begins with the embedding.
        Returns: what comes after the segment: x, of layout.sample_rows alone behind the model's last layer, or logits behind the
            head. None behind the model's last layer when no logits are wanted.
        Raises: StepAborted.
        """
        ...


class Backend(Protocol):
    """Executes declared blocks; may fuse blocks that follow each other.

    batch_invariant: a row's bits do not depend on the other rows of a step, its cache or its chunks.
    """

    name: str
    batch_invariant: bool

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """Why it cannot run this block over a pool of this format; None: it can."""
        ...

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """The layer with its weights in this back end's form. Args: weights: what the method loaded."""
        ...

    def lora_refusal(self, block: DecoderBlock, sizes: LoraSizes) -> str | None:
        """Why it cannot give the linear layers of this block slots for adapters; None: it can."""
        ...

    def lora_slots(self, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, like: Tensor) -> LayerSlots[Any]:
        """Empty ones, for a linear layer of these sizes. Args: like: of the dtype and on the device of the computation."""
        ...

    def keep_lora(self, linear: LoadedLinear, slots: LayerSlots[Any]) -> LoadedLinear:
        """A layer of `keep` with what its rows' adapters add. Args: slots: of lora_slots; adapters come and go there."""
        ...

    def place_refusal(self, place: RankPlace) -> str | None:
        """Why it cannot compute a rank's part of a model; None: it can."""
        ...

    def keep_reduced(self, linear: LoadedLinear, communicator: Communicator) -> LoadedLinear:
        """A layer of `keep` or `keep_lora` that is divided by inputs, where the rank has some of them: from it come the sums over
        the tensor-parallel group, before an output norm or the residual. Args: linear: this rank's addends."""
        ...

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> Runtime:
        """Once weights and pool are there."""
        ...


@dataclass(frozen=True, slots=True)
class Takes:
    """The fields of a kind of layer that a back end implements, by name. required: they must not be None. values: those of a
    field that chooses a computation by its name."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


DENSE: Mapping[type, Takes] = {
    Embedding: Takes(("name", "vocab_size", "size", "scale")),
    DecoderBlock: Takes(
        ("attention_norm", "attention", "mlp_norm", "mlp"), ("attention_output_norm", "mlp_output_norm")
    ),
    LmHead: Takes(("norm", "linear", "tied"), ("softcap",)),
    Attention: Takes(
        ("qkv", "o", "num_heads", "num_kv_heads", "head_dim", "rope", "scale"),
        ("q_norm", "k_norm", "softcap", "window"),
    ),
    Mlp: Takes(("gate_up", "down", "activation"), values={"activation": ("silu", "gelu", "gelu_tanh")}),
    Linear: Takes(("parts", "inputs", "bias", "shard", "method", "settings")),
    Norm: Takes(("name", "size", "eps", "offset")),
    Rope: Takes(
        ("theta", "kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
        values={"kind": ("default", "linear", "llama3")},
    ),
}
"""What every back end implements. What only some of them do stands in their own tables: {**DENSE, Attention: ...}."""


def field_refusal(layer: object, takes: Mapping[type, Takes]) -> str | None:
    """Why a back end that implements `takes` cannot run a layer: it is of another kind, lacks a required field, or has a
    field or a value that is not implemented. Layers in its fields are looked at, too. None: it can.

    So what a newcomer adds to a layer is never ignored by a back end that does not know it.
    """
    known, name = takes.get(type(layer)), type(layer).__name__  # not isinstance: a LayerNorm may well be a kind of Norm
    if known is None:
        return f"it has no layer {name}"
    for field in dataclasses.fields(layer):  # type: ignore[arg-type]
        value = getattr(layer, field.name)
        if field.name in known.required and value is None:
            return f"it needs {field.name} of {name}"
        if field.name not in known.required + known.optional and value != field.default:
            return f"it does not know {field.name} of {name}"
        if value not in known.values.get(field.name, (value,)):
            return f"it does not know {field.name} {value} of {name}"
        if dataclasses.is_dataclass(value) and (reason := field_refusal(value, takes)) is not None:
            return reason
    return None


def method_refusal(block: AnyBlock, methods: Container[str]) -> str | None:
    """Why a back end with these methods cannot run the linear layers of a block; None: it can."""
    linears = () if isinstance(block, Embedding) else block.linears
    unknown = sorted({linear.method for linear in linears if linear.method not in methods})
    return f"it has no linear method {unknown[0]}" if unknown else None


def kv_refusal(kv: KvFormat, codes: Container[str] = ()) -> str | None:
    """Why a back end cannot use a pool of this format: engine.exec.kv_pool holds elements that are computed with, or codes with
    a scale for each token and head.

    Args: codes: dtypes of codes that the back end reads and writes.
    Returns: None: it can.
    """
    for group in kv.groups:
        if group.kind not in (KvKind.FULL, KvKind.WINDOW):
            return f"the KV pool has no {group.kind} group"
        if not group.quantized:
            if group.dtype not in COMPUTE_DTYPES:
                return f"the KV pool holds no {group.dtype} without scales"
            continue
        if group.dtype not in QUANTIZED_KV.values() or group.scale_dtype != KV_SCALE_DTYPE:
            return f"the KV pool holds no {group.dtype} with scales in {group.scale_dtype}"
        if group.dtype not in codes:
            return f"it has no attention over KV in {group.dtype}"
        if group.scales_offset(kv.shard) % dtype_bytes(KV_SCALE_DTYPE):
            return f"a slot's codes must end at a multiple of {dtype_bytes(KV_SCALE_DTYPE)} bytes, for the scales behind them"
    return None


@dataclass(frozen=True, slots=True)
class Refusal:
    """block: "embedding", "head", "layer 3", or "every block"."""

    backend: str
    block: str
    reason: str


EVERY_BLOCK = "every block"


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Args:
        description: what is computed here: of a rank its part, see local_description.
        block_owners: the back end of each layer.
        refusals: of those back ends that would have been taken first.
        whole: the model; None: `description` is.
    """

    description: ModelDescription
    embedding_owner: Backend
    block_owners: tuple[Backend, ...]
    head_owner: Backend
    refusals: tuple[Refusal, ...]
    place: RankPlace = WHOLE_PLACE
    whole: ModelDescription | None = None

    @property
    def model(self) -> ModelDescription:
        """The whole one, of which the checkpoint has the weights."""
        return self.whole or self.description

    def segments(self) -> list[tuple[Backend, Segment]]:
        """This rank's layers in order; the embedding is the first stage's, the head the last one's."""
        first_stage, last_stage = self.place.first_stage, self.place.last_stage
        total = len(self.block_owners)
        cuts = [i for i in range(1, total) if self.block_owners[i] is not self.block_owners[i - 1]]
        bounds = list(zip([0, *cuts], [*cuts, total], strict=True))
        out = []
        if first_stage and self.embedding_owner is not self.block_owners[0]:
            out.append((self.embedding_owner, Segment(0, 0, True, False, total)))
        for first, last in bounds:
            owner = self.block_owners[first]
            embeds = first_stage and first == 0 and owner is self.embedding_owner
            heads = last_stage and last == total and owner is self.head_owner
            out.append((owner, Segment(first, last, embeds, heads, total, last_stage)))
        if last_stage and self.head_owner is not self.block_owners[-1]:
            out.append((self.head_owner, Segment(total, total, False, True, total)))
        return out

    @property
    def names(self) -> tuple[str, ...]:
        """Of the back ends in use, the one with the most layers first."""
        owners = [owner.name for owner in (*self.block_owners, self.embedding_owner, self.head_owner)]
        return tuple(sorted(dict.fromkeys(owners), key=lambda name: -owners.count(name)))

    def summary(self) -> str:
        """`native`, or `native (embedding, layers 0-2 and 4-5, head), torch (layer 3)`."""
        if len(self.names) == 1:
            return self.names[0]
        return ", ".join(f"{name} ({self._blocks_of(name)})" for name in self.names)

    def _blocks_of(self, name: str) -> str:
        runs: list[list[int]] = []
        for i, owner in enumerate(self.block_owners):
            if owner.name == name:
                if runs and runs[-1][1] == i - 1:
                    runs[-1][1] = i
                else:
                    runs.append([i, i])
        parts = ["embedding"] if self.embedding_owner.name == name else []
        if runs:
            several = len(runs) > 1 or runs[0][0] != runs[0][1]
            ranges = (str(a) if a == b else f"{a}-{b}" for a, b in runs)
            parts.append(f"{'layers' if several else 'layer'} {' and '.join(ranges)}")
        if self.head_owner.name == name:
            parts.append("head")
        return ", ".join(parts)

    def reasons(self) -> list[tuple[str, str]]:
        """For each back end and reason its name and a line: `native refuses layer 0 to layer 29: its activation is gelu`."""
        blocks: dict[tuple[str, str], list[str]] = {}
        for one in self.refusals:
            blocks.setdefault((one.backend, one.reason), []).append(one.block)
        return [
            (backend, f"{backend} refuses {_listed(names)}: {reason}") for (backend, reason), names in blocks.items()
        ]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)


def make_plan(
    description: ModelDescription,
    kv: KvFormat,
    backends: Sequence[Backend],
    unusable: Sequence[Refusal] = (),
    loras: LoraSizes = NO_LORAS,
    place: RankPlace = WHOLE_PLACE,
) -> Plan:
    """Give every block to the first back end that takes it; the ends of the model rather to the one beside them.

    Args:
        description: of the whole model.
        kv: of the pool, which is this rank's.
        backends: in the order in which they are asked.
        unusable: back ends that cannot be used here at all.
        loras: slots for adapters in every layer.
    Raises: ConfigError naming the block that none takes, with every reason, and see local_description.
    """
    refusals, whole = list(unusable), description
    description = local_description(whole, place)

    def owner(block: AnyBlock, name: str, asked: Sequence[Backend]) -> Backend:
        reasons = []
        for backend in asked:
            reason = backend.refusal(block, kv)
            if reason is None and loras.slots and isinstance(block, DecoderBlock):
                reason = backend.lora_refusal(block, loras)
            if reason is None:
                return backend
            refusals.append(Refusal(backend.name, name, reason))
            reasons.append(f"{backend.name}: {reason}")
        raise ConfigError("architectures", description.architecture, f"no back end runs {name}: {'; '.join(reasons)}")

    owners = tuple(owner(block, f"layer {i}", backends) for i, block in enumerate(description.blocks))

    def beside(neighbour: Backend) -> list[Backend]:
        return [neighbour, *(backend for backend in backends if backend is not neighbour)]

    embedding = owner(description.embedding, "embedding", beside(owners[0]))
    head = owner(description.head, "head", beside(owners[-1]))
    return Plan(description, embedding, owners, head, tuple(refusals), place, None if description is whole else whole)
