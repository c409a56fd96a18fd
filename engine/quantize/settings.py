"""What a user chooses of a quantization, and the quantization_config that says it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.linear import Linear

METHODS = ("int8", "fp8", "int4")
GROUP_SIZES = (128, 64, 32)
MANIFEST_FILE = "diptych-quantize.json"


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """Raises: ConfigError naming the field.

    Args:
        method: one of METHODS.
        group_size: int4 only; None: the largest that divides the inputs of every layer, 128 or 64.
        symmetric: int4 only; None: True.
        act_order: int4 with calibration only; None: True. See gptq.Int4Rule.
        calibration: a text file: int4 is made by GPTQ, int8 with smoothing.
    """

    method: str
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    calibration: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError("method", self.method, f"must be one of {', '.join(METHODS)}")
        for name in ("group_size", "symmetric", "act_order"):
            if self.method != "int4" and getattr(self, name) is not None:
                raise ConfigError(name, getattr(self, name), f"has no effect on {self.method}: only int4 has groups")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError("group_size", self.group_size, f"must be one of {', '.join(map(str, GROUP_SIZES))}")
        if self.act_order is not None and self.calibration is None:
            raise ConfigError("act_order", self.act_order, "needs a calibration: it orders inputs by their activations")
        if self.calibration is not None and self.method == "fp8":
            rule = "has no effect on fp8: its scales follow from the weights alone"
            raise ConfigError("calibration", str(self.calibration), rule)

    def group_size_for(self, linears: Iterable[Linear]) -> int:
        """Raises: ConfigError naming a layer that it does not divide, with the largest size that divides all."""
        linears = list(linears)
        fitting = [size for size in GROUP_SIZES if all(linear.inputs % size == 0 for linear in linears)]
        asked = self.group_size
        if asked is None and fitting:
            return fitting[0]
        if asked in fitting:
            return asked
        odd = next(one for one in linears if one.inputs % (asked or GROUP_SIZES[-1]))
        rule = f"does not divide the {odd.inputs} inputs of {odd.parts[0].name}"
        hint = f"; {fitting[0]} divides those of every layer" if fitting else "; no size divides those of every layer"
        raise ConfigError("group_size", asked or GROUP_SIZES[-1], rule + hint)

    def config(self, group_size: int | None) -> dict[str, Any]:
        """The quantization_config. Args: group_size: of int4."""
        inputs: dict[str, Any] | None = None
        if self.method == "int4":
            layout = "pack-quantized"
            weights = _numbers(4, "int", "group", symmetric=self.symmetric is not False) | {"group_size": group_size}
            if self.calibration is not None and self.act_order is not False:
                weights["actorder"] = "weight"
        else:
            layout, kind = ("float-quantized", "float") if self.method == "fp8" else ("int-quantized", "int")
            weights = _numbers(8, kind, "channel")
            inputs = _numbers(8, kind, "token") | {"dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def _numbers(bits: int, kind: str, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False}
