"""What a checkpoint's format is, and what the formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import Linear, Part, ShardBy
from diptych.engine.exec.methods.base import TensorPart, TensorSource

FIELD = "quantization_config"
Setting = int | float | str | bool
FORMAT = "format"
"""Of the settings: the format's name. Every quantized layer has it."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a quantization_config says.

    Args:
        declare: a layer that the description declares as plain -> as the checkpoint holds it, with its method and settings.
            Raises: ConfigError naming the field that cannot be done for this layer.
        head: `declare` counts for the head, too, where that is not the embedding.
    """

    declare: Callable[[Linear], Linear]
    head: bool


class CheckpointFormat(Protocol):
    """One way in which checkpoints hold quantized layers."""

    name: str
    quant_methods: tuple[str, ...]
    """What quantization_config calls it."""
    without_effect: tuple[str, ...]
    """Keys of quantization_config that say how the weights were made and change nothing of what is computed. Any other key
    that `read` does not look at is refused by name."""

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """Args: config: quantization_config, decoded. Raises: ConfigError naming the field that cannot be run exactly."""
        ...

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """Those of one part that every checkpoint of the format has, without biases. Raises: ConfigError where a rank's
        share cannot be cut."""
        ...

    def load(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Any:
        """Returns: a part's share in the values of the layer's method (see methods.quantized).

        Raises: ConfigError naming tensor and file.
        """
        ...


def declared(layer: Linear, method: str, format_name: str, **settings: Setting) -> Linear:
    """A layer with a method and settings."""
    return replace(layer, method=method, settings=((FORMAT, format_name), *sorted(settings.items())))


def settings_of(layer: Linear) -> dict[str, Any]:
    return dict(layer.settings)


def only(config: Mapping[str, Any], key: str, *allowed: object, prefix: str = FIELD) -> Any:
    """A value of the config. Raises: ConfigError unless it is one of `allowed`."""
    value = config.get(key)
    if not any(value == one and type(value) is type(one) for one in allowed):
        shown = " or ".join("absent" if one is None else repr(one) for one in allowed)
        raise ConfigError(f"{prefix}.{key}", value, f"must be {shown}")
    return value


def pass_over(config: Mapping[str, Any], *keys: str) -> None:
    """Keys that change nothing of what is computed, with all that lies in them: they count as read."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, Mapping):
            pass_over(value, *value)


def group_size(config: Mapping[str, Any], prefix: str = FIELD) -> int:
    """Inputs that share a scale; -1: all. Raises: ConfigError."""
    value = config.get("group_size")
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or (value > 0 and value % 8 == 0)):
        raise ConfigError(f"{prefix}.group_size", value, "must be a positive multiple of 8, or -1 for one group")
    return value


def group_of(layer: Linear, size: int, prefix: str = FIELD) -> int:
    """Inputs of a group of this layer. Raises: ConfigError unless groups are whole."""
    size = layer.inputs if size == -1 else size
    if layer.inputs % size or size % 8:
        rule = f"{layer.parts[0].name} has {layer.inputs} inputs: groups must divide them, in multiples of 8"
        raise ConfigError(f"{prefix}.group_size", size, rule)
    return size


def left_out_by(config: Mapping[str, Any], *keys: str) -> Callable[[Linear], bool]:
    """Which layers keep their plain weights: those of modules that a list of names has.

    Raises: ConfigError where it is not a list of names; by the result where it has some parts of a merged layer only.
    """
    names: list[str] = []
    for key in keys:
        value = config.get(key) or ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{FIELD}.{key}", value, "must be a list of names")
        names += value
    return lambda layer: all_or_none(layer, lambda part: any(_is_within(part, one) for one in names), keys[0], names)


def all_or_none(layer: Linear, match: Callable[[str], bool], key: str, value: object) -> bool:
    """Whether the rule holds for the parts of a layer. Raises: ConfigError when it does for some of them only."""
    names = [part.name for part in layer.parts]
    found = [name for name in names if match(name)]
    if found and found != names:
        reason = f"{', '.join(names)} are one layer here, and this names {', '.join(found)} only"
        raise ConfigError(f"{FIELD}.{key}", value, reason)
    return bool(found)


def _is_within(name: str, module: str) -> bool:
    """Whether the layer `name` is the module, or a part of it; `module` may be the end of a module's name."""
    return f".{module}." in f".{name}."


def cut(span: slice, unit: int, what: str, shard: Shard) -> slice:
    """A rank's share of something of which `unit` lie in one element. Raises: ConfigError with `what` and the numbers, where a
    rank would get a part of an element."""
    if span == slice(None):
        return span
    if span.start % unit or span.stop % unit:
        rule = f"{what} is cut at multiples of {unit}, and a rank's share would be {span.start} to {span.stop}"
        raise ConfigError("tensor_parallel_size", shard.degree, rule)
    return slice(span.start // unit, span.stop // unit)


def refuse_order(layer: Linear, part: Part, shard: Shard, order: Tensor | None) -> None:
    """Raises: ConfigError where inputs of one group would lie on several ranks. Args: order: see `input_order`."""
    if order is not None and layer.share(part, shard)[1] != slice(None):
        rule = f"{part.name} orders its inputs (act-order): a group's inputs would lie on several ranks"
        raise ConfigError("tensor_parallel_size", shard.degree, rule)


def take(source: TensorSource, part: TensorPart, *dtypes: torch.dtype) -> Tensor:
    """A rank's share, as stored. Raises: ConfigError for another dtype, with the tensor's name."""
    tensor = part.take(source, as_stored=True)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(_named(dtype) for dtype in dtypes)
        raise refusal(source, part.name, f"holds {_named(tensor.dtype)}, not {wanted}")
    return tensor


def take_scales(source: TensorSource, part: TensorPart) -> Tensor:
    """A rank's share of scales, in the model's dtype. Raises: ConfigError, as `checked_scales`."""
    return checked_scales(source, part.name, part.take(source))


def take_output_scales(source: TensorSource, name: str, outputs: int, rows: slice) -> Tensor:
    """A rank's share of the scales of outputs. Formats store them as [outputs, 1], [outputs] or one number for all.

    Returns: [rows] float32. Raises: ConfigError, as `checked_scales`.
    """
    forms = ((outputs, 1), (outputs,), (1,), ())
    found = source.shape(name)
    shape = found if found in forms else forms[0]
    stored = source.take(name, shape, as_stored=True)
    if not stored.is_floating_point():
        raise refusal(source, name, f"holds {_named(stored.dtype)}, not floating-point numbers")
    scales = stored.float().flatten()
    return checked_scales(source, name, scales.expand(outputs)[rows].contiguous())


def checked_scales(source: TensorSource, name: str, scales: Tensor) -> Tensor:
    """Raises: ConfigError naming tensor and file when one is 0, negative, infinite or NaN, also where the dtype of the model
    makes it so."""
    wrong = ~(scales.isfinite() & (scales > 0))
    if bool(wrong.any()):
        bad = scales[wrong][0].item()
        raise refusal(source, name, f"has a scale of {bad}, in {_named(scales.dtype)}: must be above 0 and finite")
    return scales


def take_bias(layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Tensor | None:
    """In the model's dtype. Of a layer that is divided by inputs only rank 0 has the bias: results are added up.

    A bias that the model does not have is passed over where it is 0: some writers store one for every layer.
    """
    name, rows = f"{part.name}.bias", layer.share(part, shard)[0]
    if not layer.bias:
        if source.shape(name) == (part.outputs,) and bool(source.take(name, (part.outputs,)).any()):
            raise refusal(source, name, "is not 0, and the model has no bias there")
        return None
    bias = source.take(name, (part.outputs,), where=(rows,))
    return bias if layer.shard is not ShardBy.INPUTS or shard.rank == 0 else None


def refusal(source: TensorSource, name: str, reason: str) -> ConfigError:
    return ConfigError("model", source.file_of(name), f"tensor {name} {reason}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nibbles(packed: Tensor, dim: int, places: Sequence[int] = range(8)) -> Tensor:
    """packed: int32 of eight codes each along `dim`, of 2 dimensions; code `places[i]` lies in bits 4 i to 4 i + 3.

    Returns: uint8, eight times as long along `dim`.
    """
    shifts = torch.tensor([4 * places.index(place) for place in range(8)], dtype=torch.int32, device=packed.device)
    if dim == 1:
        return (packed[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)
    return (packed[:, None, :] >> shifts[:, None] & 15).to(torch.uint8).flatten(0, 1)


def input_order(source: TensorSource, name: str, groups: Tensor, size: int) -> Tensor | None:
    """The order of inputs in which those of each group lie together.

    Args: groups: [inputs], the group of each input. size: inputs of a group.
    Returns: [inputs] int32; None: they lie so already.
    Raises: ConfigError naming the tensor when a group is not one of this layer's, or has more or fewer inputs.
    """
    count = len(groups) // size
    if not bool(((groups >= 0) & (groups < count)).all()):
        bad = groups[(groups < 0) | (groups >= count)][0].item()
        raise refusal(source, name, f"names the group {bad}: there are {count}")
    if not bool((torch.bincount(groups.long(), minlength=count) == size).all()):
        raise refusal(source, name, f"does not give every group {size} inputs")
    order = torch.sort(groups, stable=True).indices.to(torch.int32)
    return None if bool((order == torch.arange(len(order), device=order.device)).all()) else order
