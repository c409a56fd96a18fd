"""Quantized checkpoints, written from a plain one as each tool lays them out, by the rule and not with the loader's code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_eight(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """[rows, n] codes 0 to 15 -> [rows, ceil(n / 8)] int32, code order[i] of eight in bits 4 i to 4 i + 3."""
    rows, count = codes.shape
    wide = torch.zeros(rows, -(-count // 8) * 8, dtype=torch.int64)
    wide[:, :count] = codes
    out = torch.zeros(rows, wide.shape[1] // 8, dtype=torch.int64)
    for place, code in enumerate(order):
        out |= wide[:, code::8] << 4 * place
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def int4_groups(weight: Tensor, size: int, *, symmetric: bool, groups: Tensor | None = None) -> tuple[Tensor, ...]:
    """Round to the nearest code. groups: of each input; None: `size` after another.

    Returns: codes [outputs, inputs], zeros and scales [outputs, groups], what they mean [outputs, inputs].
    """
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // size if groups is None else groups
    codes, meant = torch.zeros_like(weight), torch.zeros_like(weight)
    all_scales, all_zeros = [], []
    for group in range(inputs // size):
        columns = groups == group
        part = weight[:, columns]
        if symmetric:
            scale, zero = part.abs().amax(1, keepdim=True) / 7.5, torch.full((len(part), 1), 8.0)
        else:
            low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round().clamp(1, 15)
        scale = scale.half().float()
        codes[:, columns] = (part / scale + zero).round().clamp(0, 15)
        meant[:, columns] = (codes[:, columns] - zero) * scale
        all_scales.append(scale)
        all_zeros.append(zero)
    return codes.int(), torch.cat(all_zeros, 1).int(), torch.cat(all_scales, 1), meant


def awq(weight: Tensor, size: int) -> tuple[Tensors, Tensor]:
    """Returns: tensors of a layer, by the ends of their names, and what they mean."""
    codes, zeros, scales, meant = int4_groups(weight, size, symmetric=False)
    return {
        "qweight": pack_eight(codes.T, AWQ_ORDER),
        "qzeros": pack_eight(zeros.T, AWQ_ORDER),
        "scales": scales.T.half().contiguous(),
    }, meant


def gptq(
    weight: Tensor, size: int, *, symmetric: bool, groups: Tensor | None = None, version: int = 1
) -> tuple[Tensors, Tensor]:
    """As `awq`. groups: the group of each input (act-order). version: 2 stores zeros as they are."""
    codes, zeros, scales, meant = int4_groups(weight, size, symmetric=symmetric, groups=groups)
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    return {
        "qweight": pack_eight(codes).T.contiguous(),
        "qzeros": pack_eight(zeros.T - int(version == 1)),
        "scales": scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }, meant


def compressed_int4(
    weight: Tensor, size: int, *, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensors, Tensor]:
    """As `gptq`."""
    codes, zeros, scales, meant = int4_groups(weight, size, symmetric=symmetric, groups=groups)
    out = {
        "weight_packed": pack_eight(codes),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        out["weight_zero_point"] = pack_eight(zeros.T).T.contiguous()
    if groups is not None:
        out["weight_g_idx"] = groups.int()
    return out, meant


def int8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As `awq`: one scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As `int8_rows`."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> tuple[Tensors, Tensor]:
    """As `awq`: one scale for each block of 128 x 128."""
    outputs, inputs = weight.shape
    scales = torch.zeros(-(-outputs // 128), -(-inputs // 128))
    meant, codes = torch.zeros_like(weight), torch.zeros_like(weight).to(torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, name: scales}, meant


AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
    "checkpoint_format": "gptq", "pack_dtype": "int32", "true_sequential": True, "static_groups": False,
    "damp_percent": 0.01, "method": "gptq", "meta": {"quantizer": ["gptqmodel:4.0.0"]},
}  # fmt: skip
FP8: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip


def compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A quantization_config as compressed-tensors dumps it, with one group; what a scheme leaves out is null there."""
    blank = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
        "observer_kwargs": {}, "symmetric": True,
    }  # fmt: skip
    dynamic = {**blank, "dynamic": True, "observer": None}
    group = {
        "input_activations": None if inputs is None else {**dynamic, **inputs},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**blank, **weights},
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": None, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token"}
TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token"}
COMPRESSED_INT8 = compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN_INT8)
COMPRESSED_FP8 = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN_FP8)
COMPRESSED_INT4 = compressed(
    "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None
)


def quantize_folder(
    folder: Path,
    config: Mapping[str, Any],
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]],
    left_out: Sequence[str] = ("lm_head",),
) -> Tensors:
    """Quantize a model's linear layers in place. quantize: a weight -> tensors of its layer, and what they mean.

    Returns: the same values as plain tensors.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = dict(tensors)
    for name in sorted(tensors):
        layer = name.removesuffix(".weight")
        if name == layer or "norm" in name or "embed" in name or any(one in name for one in left_out):
            continue
        made, plain[name] = quantize(tensors.pop(name))
        tensors |= {f"{layer}.{end}": tensor for end, tensor in made.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(raw))
    return plain


def gguf_rows(weight: Tensor, kind: str = "Q8_0") -> tuple[Tensors, Tensor]:
    """As `int8_rows`, in the blocks of GGUF's `kind`, by its own package."""
    which = gguf.GGMLQuantizationType[kind]
    rows = gguf.quants.quantize(weight.numpy(), which)
    return {"weight": torch.from_numpy(rows)}, torch.from_numpy(gguf.quants.dequantize(rows, which))


def gguf_config(folder: Path, kind: str = "Q8_0") -> dict[str, Any]:
    """What `quantize_folder` writes beside `gguf_rows`: every linear layer of a model that is plain by now."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name.removesuffix(".weight") for name in file.keys() if "_proj." in name]  # noqa: SIM118, no mapping
    return {"quant_method": "gguf", "lm_head": False, "kinds": dict.fromkeys(names, kind)}


def plain_folder(folder: Path, config_of: Path, tensors: Tensors) -> Path:
    """A model with plain tensors and the config of another, without its quantization."""
    raw = json.loads((config_of / "config.json").read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_llama(folder: Path, *, hidden: int = 64, mlp: int = 128, layers: int = 2, vocab: int = 320) -> Path:
    """A random model without its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(11)
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    tensors = {
        name: torch.randn(vocab, hidden, generator=random) * 0.2
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        for name, shape in sizes.items():
            weight = torch.randn(shape, generator=random) * 0.2
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_windowed(folder: Path, *, window: int, full_layers: int, **sizes: int) -> Path:
    """A random Qwen2 without its tokenizer, of `write_llama`'s sizes: its first layers see every token, the others a window."""
    tensors = load_file(write_llama(folder, **sizes) / "model.safetensors")
    random = torch.Generator().manual_seed(12)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = torch.randn(len(tensors[name]), generator=random) * 0.2
        tensors[f"{name.removesuffix('weight')}bias"] = bias
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
        "sliding_window": window, "max_window_layers": full_layers,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
