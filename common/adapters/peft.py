"""Adapters in the folders that peft writes: adapter_config.json and adapter_model.safetensors.

    y = W x + scale * B (A x)        A: [rank, inputs], B: [outputs, rank]; scale = alpha / rank, or alpha / sqrt(rank) (rsLoRA)

An adapter's id is its content: a hash over the rank and the scale of each module, and over every tensor. A name, a path and
whatever else the configuration says is not part of it. What is not served is refused by the name of the field, and never left
out. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from diptych.common.adapters.module_patterns import MAX_PATTERNS, ModuleNames, PatternError
from diptych.common.errors import AdapterError
from diptych.common.model_files import ADAPTER_FILE
from diptych.common.request import ADAPTER_ID_LENGTH

MAX_RANK = 64
TENSORS_FILE = "adapter_model.safetensors"
_DOMAIN = b"diptych lora adapter v1"
_PREFIX = "base_model.model."
_MAX_HEADER_BYTES = 16 << 20
_MAX_CONFIG_BYTES = 4 << 20
_MAX_NAME_CHARS = 512
"""Of a tensor."""
_MAX_DIMENSIONS = 8
_MAX_LAYER_NAMES = 64
_EXPONENTS: Mapping[str, tuple[np.dtype[Any], int]] = {
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
}
"""Of each dtype that is read: its bits as integers, and those of the exponent: all set, the number is infinite or none."""

_WITHOUT_EFFECT = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "exclude_modules", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "init_lora_weights", "ensure_weight_tying",
})  # fmt: skip
"""Of training, or of options that are checked elsewhere. ensure_weight_tying is of modules_to_save."""
_READ = frozenset({
    "r", "target_modules", "lora_alpha", "use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
})  # fmt: skip
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""init_lora_weights that leave the base model's weights alone."""
_SWITCHES = ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora")


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What an adapter adds to one linear layer.

    Args:
        name: the layer's, as the model's checkpoint has it: "model.layers.0.self_attn.q_proj".
        rank: A is [rank, inputs], B is [outputs, rank].
    """

    name: str
    rank: int
    scale: float
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """
    Args:
        id: of the content, see common/request.py.
        rank: the largest of its modules.
        num_bytes: of its tensors.
        base_model: as its configuration calls it; may be empty.
        modules: by name, ascending.
    """

    id: str
    rank: int
    num_bytes: int
    base_model: str
    modules: tuple[AdapterModule, ...]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """dtype: as safetensors calls it: F32, F16 or BF16. data: little endian, row after row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Adapter:
    """tensors: module -> (A, B). They are what `facts.id` names: files are read once."""

    facts: AdapterFacts
    tensors: Mapping[str, tuple[RawTensor, RawTensor]]


def read_adapter(folder: Path, max_rank: int = MAX_RANK) -> AdapterFacts:
    """What lies in a folder. Reads and checks all of it. Raises: AdapterError naming the field."""
    return load_adapter(folder, max_rank).facts


def load_adapter(folder: Path, max_rank: int = MAX_RANK) -> Adapter:
    """The same with the tensors. Raises: AdapterError naming the field."""
    config = _read_config(folder)
    _check_config(config)
    pairs = _pairs(_read_tensors(folder))
    modules = _modules(pairs, config, max_rank)
    num_bytes = sum(tensor.data.nbytes for pair in pairs.values() for tensor in pair)
    base = config.get("base_model_name_or_path")
    facts = AdapterFacts(
        id=_content_id(modules, pairs),
        rank=max(module.rank for module in modules),
        num_bytes=num_bytes,
        base_model=base[:_MAX_NAME_CHARS] if isinstance(base, str) and base.isprintable() else "",
        modules=modules,
    )
    return Adapter(facts, pairs)


def _content_id(modules: Sequence[AdapterModule], pairs: Mapping[str, tuple[RawTensor, RawTensor]]) -> str:
    state = blake3(_DOMAIN)
    for module in modules:
        described = [module.name, module.rank, module.scale.hex()]
        described += [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in pairs[module.name]]
        line = json.dumps(described).encode()
        state.update(len(line).to_bytes(4, "little") + line)
        for tensor in pairs[module.name]:
            state.update(tensor.data)
    return state.digest(ADAPTER_ID_LENGTH // 2).hex()


# ---- the configuration ----


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_FILE
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes", param=ADAPTER_FILE)
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"{folder}: no {ADAPTER_FILE} can be read: {error.strerror}", param=ADAPTER_FILE) from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON: {error}", param=ADAPTER_FILE) from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: must hold a JSON object", param=ADAPTER_FILE)
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    """Raises: AdapterError for what would change the results, and is not computed here."""
    if config.get("peft_type") != "LORA":
        raise _refusal("peft_type", config.get("peft_type"), "only LORA is served")
    if config.get("task_type") not in (None, "", "CAUSAL_LM"):
        raise _refusal("task_type", config["task_type"], "only CAUSAL_LM is served")
    for name in _SWITCHES:
        if config.get(name):
            raise _refusal(name, config[name], "is not served")
    if config.get("bias", "none") != "none":
        raise _refusal("bias", config["bias"], "must be none: trained biases are not served")
    if config.get("modules_to_save"):
        raise _refusal("modules_to_save", config["modules_to_save"], "whole modules are not served")
    start = config.get("init_lora_weights", True)
    if not any(start is known or (isinstance(known, str) and start == known) for known in _HARMLESS_STARTS):
        raise _refusal(
            "init_lora_weights", start, "it changes the base model's weights: convert the adapter to plain LoRA"
        )
    for name, value in config.items():
        if value and name not in _WITHOUT_EFFECT | _READ | {"bias"}:
            raise _refusal(name, value, "is not served")
    for name in ("use_rslora",):
        if not isinstance(config.get(name, False), bool):
            raise _refusal(name, config[name], "must be true or false")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise _refusal(name, config[name], "must map patterns to numbers")


def _refusal(field: str, value: object, rule: str) -> AdapterError:
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python writes
        text = f"a {type(value).__name__}"
    return AdapterError(f"{field}={text if len(text) <= 200 else text[:200] + '...'}: {rule}", param=field)


def _number(field: str, value: object) -> float:
    """Raises: AdapterError, also for an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(field, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(field, value, "must be a finite number")
    return value


def _rank(field: str, value: object) -> int:
    number = _number(field, value)
    if number != int(number) or number < 1:
        raise _refusal(field, value, "must be an integer of at least 1")
    return int(number)


def _by_pattern(config: Mapping[str, Any], field: str, names: ModuleNames) -> dict[int, object]:
    """By number of a module: the value of the first pattern that matches it, as peft takes it."""
    values: Mapping[str, object] = config.get(field) or {}
    if len(values) > MAX_PATTERNS:
        raise AdapterError(f"{field} has {len(values)} patterns, more than {MAX_PATTERNS}", param=field)
    found: dict[int, object] = {}
    for pattern, value in values.items():
        try:
            for number in names.ending(pattern):
                found.setdefault(number, value)
        except PatternError as error:
            raise _refusal(field, pattern, str(error)) from None
    return found


def _check_targets(config: Mapping[str, Any], modules: Sequence[str], names: ModuleNames) -> None:
    """Raises: AdapterError for a module that target_modules leaves out, as peft decides which modules an adapter has."""
    targets = config.get("target_modules")
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        try:
            targeted = names.whole(targets)
        except PatternError as error:
            raise _refusal("target_modules", targets, str(error)) from None
    elif isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        listed, layers = frozenset(targets), _layers(config)
        targeted = {
            number
            for number, module in enumerate(modules)
            if any(module[start:] in listed for start in (0, *(dot.end() for dot in re.finditer(r"\.", module))))
            and (layers is None or _layer_of(module, config.get("layers_pattern")) in layers)
        }
    else:
        raise _refusal("target_modules", targets, "must be a list of names, a regular expression or all-linear")
    for number, module in enumerate(modules):
        if number not in targeted:
            raise AdapterError(f"tensors of {module}, which target_modules leaves out", param="target_modules")


def _layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    """None: all. Raises: AdapterError, also for the patterns by which layers are found."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    listed = layers if isinstance(layers, list) else [layers]
    if not all(type(one) is int for one in listed):
        raise _refusal("layers_to_transform", layers, "must be a layer's number or a list of them")
    patterns = config.get("layers_pattern") or []
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        if not isinstance(pattern, str) or not re.fullmatch(r"(?:\w|\\?\.){1,64}", pattern, re.ASCII):
            raise _refusal(
                "layers_pattern", pattern, "must be a name, or a list of names, as layers: no other pattern is served"
            )
    if isinstance(patterns, list) and len(patterns) > _MAX_LAYER_NAMES:
        raise _refusal("layers_pattern", patterns, f"must be at most {_MAX_LAYER_NAMES} names")
    return frozenset(listed)


def _layer_of(module: str, patterns: object) -> int | None:
    """The patterns are names, so that each of these searches is short."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", module)
        return int(found["number"]) if found else None
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.", module):
            return int(found["number"])
    return None


def _modules(
    pairs: Mapping[str, tuple[RawTensor, RawTensor]], config: Mapping[str, Any], max_rank: int
) -> tuple[AdapterModule, ...]:
    modules = sorted(pairs)
    names = ModuleNames(modules)
    _check_targets(config, modules, names)
    ranks, alphas = (_by_pattern(config, field, names) for field in ("rank_pattern", "alpha_pattern"))
    return tuple(
        _module(
            name,
            *pairs[name],
            rank=_rank("rank_pattern", ranks[i]) if i in ranks else _rank("r", config.get("r")),
            alpha=_number("alpha_pattern", alphas[i])
            if i in alphas
            else _number("lora_alpha", config.get("lora_alpha")),
            rooted=bool(config.get("use_rslora")),
            max_rank=max_rank,
        )
        for i, name in enumerate(modules)
    )


def _module(
    name: str, a: RawTensor, b: RawTensor, *, rank: int, alpha: float, rooted: bool, max_rank: int
) -> AdapterModule:
    if rank > max_rank:
        raise AdapterError(f"rank {rank} of {name} is above the maximum of {max_rank}", param="r")
    for tensor, axis in ((a, 0), (b, 1)):
        if len(tensor.shape) != 2 or 0 in tensor.shape or tensor.shape[axis] != rank:
            raise AdapterError(
                f"{tensor.name} is {list(tensor.shape)}: dimension {axis} must be the rank, {rank}", param=tensor.name
            )
        _check_finite(tensor)
    scale = alpha / (math.sqrt(rank) if rooted else rank)
    return AdapterModule(name, rank, scale, inputs=a.shape[1], outputs=b.shape[0])


# ---- the tensors ----


def _read_tensors(folder: Path) -> list[RawTensor]:
    path = folder / TENSORS_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        other = next((one.name for one in sorted(folder.glob("adapter_model.*"))), None)
        hint = f"; {other} is not read: save the adapter as safetensors" if other else ""
        raise AdapterError(
            f"{folder}: no {TENSORS_FILE} can be read: {error.strerror}{hint}", param=TENSORS_FILE
        ) from None
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{path}: no safetensors file: {error}", param=TENSORS_FILE) from None


def _parse(data: bytes) -> list[RawTensor]:
    """https://github.com/huggingface/safetensors: the header's length, the header as JSON, the tensors. Raises: ValueError."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise ValueError("the header is cut off")
    header = json.loads(data[8 : 8 + size])
    body = memoryview(data)[8 + size :]
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if len(name) > _MAX_NAME_CHARS or not name.isprintable():
            raise ValueError(
                f"a tensor's name must have at most {_MAX_NAME_CHARS} printable characters: {name[:80]!a}..."
            )
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in _EXPONENTS:
            raise ValueError(f"{name} is of dtype {dtype}: only {', '.join(_EXPONENTS)} are read")
        if len(shape) > _MAX_DIMENSIONS or not all(
            type(n) is int and 0 <= n <= len(body) for n in (*shape, begin, end)
        ):
            raise ValueError(f"{name} has no shape, or one that is larger than the file")
        num_bytes = math.prod(shape) * int(dtype[-2:]) // 8  # the name ends with the bits
        if not begin <= end <= len(body) or end - begin != num_bytes:
            raise ValueError(f"{name} has {end - begin} bytes, not those of {list(shape)} in {dtype}")
        tensors.append(RawTensor(name, dtype, shape, body[begin:end]))
    return tensors


def _pairs(tensors: Sequence[RawTensor]) -> dict[str, tuple[RawTensor, RawTensor]]:
    """module -> (A, B). Raises: AdapterError for any other tensor."""
    found: dict[str, dict[str, RawTensor]] = {}
    for tensor in tensors:
        match = re.fullmatch(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight", tensor.name)
        if match is None:
            raise _unknown(tensor.name)
        module = match["module"]
        last = module.rpartition(".")[2]
        if last in ("lm_head", "embed_tokens"):
            raise AdapterError(
                f"target_modules: {last} is not served, only linear layers of the blocks", param="target_modules"
            )
        found.setdefault(module, {})[match["side"]] = tensor
    if not found:
        raise AdapterError(f"{TENSORS_FILE} holds no tensor", param=TENSORS_FILE)
    for module, sides in found.items():
        for side in "AB":
            if side not in sides:
                name = f"{_PREFIX}{module}.lora_{side}.weight"
                raise AdapterError(f"{name} is missing", param=name)
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}


def _unknown(name: str) -> AdapterError:
    """Why a tensor that is no A or B of a linear layer is refused."""
    if ".lora_embedding_" in name or ".embed_tokens." in name or ".lm_head." in name:
        return AdapterError(f"{name}: embeddings and the head are not served", param="target_modules")
    if "magnitude_vector" in name:
        return AdapterError(f"{name}: DoRA is not served", param="use_dora")
    return AdapterError(f"{name} is no tensor of LoRA", param=name)


def _check_finite(tensor: RawTensor) -> None:
    bits, exponent = _EXPONENTS[tensor.dtype]
    if ((np.frombuffer(tensor.data, dtype=bits) & exponent) == exponent).any():
        raise AdapterError(f"{tensor.name} holds NaN or infinities", param=tensor.name)
