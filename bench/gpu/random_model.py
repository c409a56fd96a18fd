"""Model folders with random weights in Hugging Face's format, for benchmarks without access to models."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SHARD_LAYERS = 4
_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    dtype: str


BIG = Shape(32, 4096, 14_336, 32, 8, 128_256, 131_072, "bfloat16")
"""Llama-3.1-8B's."""
PART_OF_70B = Shape(16, 8192, 28_672, 64, 8, 128_256, 131_072, "bfloat16")
"""Llama-3.1-70B's, a fifth of its layers."""
SMALL = Shape(8, 1024, 2816, 16, 4, 32_000, 8192, "float32")
TINY = Shape(2, 128, 256, 4, 2, 512, 2048, "float32")


def write_model(folder: Path, shape: Shape, device: str, method: str = "") -> Path:
    """`device`: generates the weights, always from the same seed. `method`: fp8 or int4 of linear layers, as compressed-tensors
    stores it; empty: the shape's dtype. A complete folder is kept."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, shape.dtype)
    kv = shape.hidden // shape.heads * shape.kv_heads
    torch.manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        # Scaled so that activations stay near one.
        return torch.empty(size, dtype=dtype, device=device).normal_(std=size[1] ** -0.5).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=dtype)

    def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        weight = normal(outputs, inputs)
        if not method:
            return {f"{name}.weight": weight}
        stored = quantized(weight.to(device), method)
        return {f"{name}.{end}": tensor.cpu().contiguous() for end, tensor in stored.items()}

    index: dict[str, str] = {}
    with ThreadPoolExecutor(6) as pool:
        jobs = []

        def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
            index.update(dict.fromkeys(tensors, name))
            jobs.append(pool.submit(save_file, tensors, str(folder / name), {"format": "pt"}))

        for first in range(0, shape.layers, _SHARD_LAYERS):
            tensors: dict[str, torch.Tensor] = {}
            for layer in range(first, min(first + _SHARD_LAYERS, shape.layers)):
                prefix = f"model.layers.{layer}."
                tensors |= {
                    prefix + "input_layernorm.weight": ones(),
                    prefix + "post_attention_layernorm.weight": ones(),
                    **linear(prefix + "self_attn.q_proj", shape.hidden, shape.hidden),
                    **linear(prefix + "self_attn.k_proj", kv, shape.hidden),
                    **linear(prefix + "self_attn.v_proj", kv, shape.hidden),
                    **linear(prefix + "self_attn.o_proj", shape.hidden, shape.hidden),
                    **linear(prefix + "mlp.gate_proj", shape.ffn, shape.hidden),
                    **linear(prefix + "mlp.up_proj", shape.ffn, shape.hidden),
                    **linear(prefix + "mlp.down_proj", shape.hidden, shape.ffn),
                }
            put(f"model-{first:05d}.safetensors", tensors)
        ends = {
            "model.embed_tokens.weight": normal(shape.vocab, shape.hidden),
            "lm_head.weight": normal(shape.vocab, shape.hidden),
            "model.norm.weight": ones(),
        }
        put("model-ends.safetensors", ends)
        for job in jobs:
            job.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_tokenizer(folder, shape.vocab)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocab,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": shape.dtype,
    }
    if method:
        from diptych.engine.quantize.settings import QuantizeSettings

        config["quantization_config"] = QuantizeSettings(method).config(_GROUP_SIZE)
    (folder / "config.json").write_text(json.dumps(config))  # last: it marks a complete folder
    return folder


def quantized(weight: Tensor, method: str) -> dict[str, Tensor]:
    """weight: [outputs, inputs]. Returns: what is stored, by the end of its name: each weight to its nearest code."""
    from diptych.engine.quantize.methods import packed_groups
    from diptych.engine.quantize.rounding import fp8_rows, int4_nearest

    if method == "fp8":
        rows = fp8_rows(weight.float())
        return {"weight": rows.codes, "weight_scale": rows.scales}
    groups = int4_nearest(weight.float(), _GROUP_SIZE, symmetric=True, dtype=weight.dtype)
    return packed_groups(groups, symmetric=True)


def write_window_model(folder: Path, device: str, *, tiny: bool) -> Path:
    """A Gemma 3 in fp32 with windows of 256 tokens in five layers of six (16 if `tiny`): prompts and answers of over_http's
    identity block leave them behind. `device`: generates the weights. A complete folder is kept."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = TINY if tiny else SMALL
    layers = 6 if tiny else 12
    config = Gemma3TextConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=layers,
        layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
        sliding_window=16 if tiny else 256,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        query_pre_attn_scalar=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Gemma3ForCausalLM(config).float()
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    write_tokenizer(unfinished, shape.vocab)
    model.cpu().save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Every id is a word, so no text waits for the rest of a character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number:x}": number for number in range(vocab)}
    words["<unk>"] = words.pop("w0")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - no secret
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
