"""quant_method -> format. A new format is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.autoawq import AutoAwqFormat
from diptych.engine.exec.formats.base import FIELD, FORMAT, CheckpointFormat, Quantization, pass_over, settings_of
from diptych.engine.exec.formats.compressed_tensors import CompressedTensorsFormat
from diptych.engine.exec.formats.fp8 import Fp8Format
from diptych.engine.exec.formats.gguf import GgufFormat
from diptych.engine.exec.formats.gptq import GptqFormat
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import TensorPart, TensorSource

FORMATS: dict[str, CheckpointFormat] = {
    one.name: one for one in (AutoAwqFormat(), CompressedTensorsFormat(), Fp8Format(), GgufFormat(), GptqFormat())
}
Weights = TypeVar("Weights")


def quantization_of(config: Any) -> Quantization:
    """Args: config: quantization_config of config.json, a TrackedConfig: a key that neither this nor the format reads is
        refused.
    Raises: ConfigError naming the field: a quant_method that is not known, with the known ones, and what its format cannot
        do.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(FIELD, config, "must be an object")
    named, known = config.get("quant_method"), {name: one for one in FORMATS.values() for name in one.quant_methods}
    found = known.get(named) if isinstance(named, str) else None
    if found is None:
        raise ConfigError(f"{FIELD}.quant_method", named, f"supported: {', '.join(sorted(known))}")
    pass_over(config, *found.without_effect)
    return found.read(config)


def tensors_of(layer: Linear, shard: Shard) -> list[TensorPart]:
    """Of a quantized layer, with biases; see LinearMethod.create."""
    found = FORMATS[settings_of(layer)[FORMAT]]
    out = []
    for part in layer.parts:
        out += found.tensors(layer, part, shard)
        if layer.bias:
            out.append(TensorPart(f"{part.name}.bias", (part.outputs,), (layer.share(part, shard)[0],)))
    return out


def read_parts(layer: Linear, source: TensorSource, shard: Shard, kind: type[Weights]) -> list[Weights]:
    """The values of each part of a quantized layer. Args: kind: of values that the layer's method has."""
    found = FORMATS[settings_of(layer)[FORMAT]]
    parts = [found.load(layer, part, shard, source) for part in layer.parts]
    assert all(isinstance(part, kind) for part in parts)
    return parts
