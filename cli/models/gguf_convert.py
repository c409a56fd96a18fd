"""Converts the GGUF file of a Llama-architecture model into a Hugging Face folder, with the `gguf` package alone.

Only what the default model needs: `general.architecture` llama without rope factors, and a byte-level BPE tokenizer.
Everything else is rejected. The tensors equal those of transformers' GGUF loader, bit for bit. The tokenizer differs
where that loader is wrong: a file with `pre = smollm` splits digits before the byte level.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.common.errors import ConfigError

CONVERTER_VERSION = 1
"""Raise it whenever the written files change; folders of an older version are then converted again."""

_CONTROL_TOKEN = 3
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def size_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


class GgufModel:
    """One opened GGUF file. Raises: ConfigError unless it is a Llama model with a GPT-2 style tokenizer."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigError("gguf", str(path), f"not a readable GGUF file: {error}") from error
        self._path = path
        for key, value in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
            if self.field(key) != value:
                raise ConfigError(key, self.field(key), f"this converter knows {value!r} only")

    def field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise ConfigError(key, None, f"missing in {self._path.name}")
        return value

    # ---- weights ----

    def tensors(self) -> Iterator[_Tensor]:
        """fp32 tensors under their Hugging Face names, in file order; each is computed when `load` is called."""
        heads = {
            "attn_q": self.required("llama.attention.head_count"),
            "attn_k": self.required("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            parts = tensor.name.split(".")
            if parts[0] == "blk" and len(parts) == 4 and parts[2] in _BLOCK_NAMES and parts[3] == "weight":
                name = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
                num_heads = heads.get(parts[2])
            elif len(parts) == 2 and parts[0] in _TOP_NAMES and parts[1] == "weight":
                name, num_heads = f"{_TOP_NAMES[parts[0]]}.weight", None
            else:
                raise ConfigError("gguf", tensor.name, "a tensor that the Llama architecture does not have")
            yield _Tensor(name, shape, _loader(tensor, shape, num_heads))

    def config(self) -> dict[str, Any]:
        """config.json as transformers 5 reads it."""
        heads = int(self.required("llama.attention.head_count"))
        hidden = int(self.required("llama.embedding_length"))
        if self.field("llama.rope.scaling.type") is not None:
            raise ConfigError("llama.rope.scaling.type", self.field("llama.rope.scaling.type"), "must be absent")
        theta = float(self.required("llama.rope.freq_base"))
        names = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": int(self.required("llama.vocab_size")),
            "hidden_size": hidden,
            "intermediate_size": int(self.required("llama.feed_forward_length")),
            "num_hidden_layers": int(self.required("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.field("llama.attention.head_count_kv", heads)),
            "head_dim": int(self.field("llama.rope.dimension_count", hidden // heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(self.required("llama.context_length")),
            # The file keeps epsilon as fp32; its shortest decimal is the number the model was trained with.
            "rms_norm_eps": float(str(np.float32(self.required("llama.attention.layer_norm_rms_epsilon")))),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in names,
            **self._token_ids(),
        }

    def _token_ids(self) -> dict[str, int]:
        keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {name: self.field(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        return {name: int(value) for name, value in found.items() if value is not None}

    # ---- tokenizer ----

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the model was trained with; bytes missing in the vocabulary are dropped, as there."""
        pre = self.field("tokenizer.ggml.pre")
        if pre != "smollm":
            raise ConfigError("tokenizer.ggml.pre", pre, "this converter supports 'smollm' only")
        tokens: list[str] = self.required("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self.required("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.required("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json. The class makes transformers use tokenizer.json unchanged instead of building its own."""
        tokens: list[str] = self.required("tokenizer.ggml.tokens")
        named = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self.field(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                named[f"{name}_token"] = tokens[int(token_id)]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self.required("llama.context_length")),
            **named,
        }


def _loader(tensor: Any, shape: tuple[int, ...], num_heads: int | None) -> Callable[[], np.ndarray]:
    def load() -> np.ndarray:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        if num_heads is None:
            return np.ascontiguousarray(weight)
        # GGUF keeps the rotary halves of q and k interleaved; Hugging Face keeps them one after the other.
        rows, columns = shape
        pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(shape))

    return load


def _write_safetensors(path: Path, tensors: list[_Tensor], progress: Callable[[int, int], None]) -> None:
    """Header size, JSON header, raw data; written tensor by tensor, so that the whole model is never in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        done = 0
        for tensor in tensors:
            file.write(tensor.load().astype("<f4", copy=False).data)
            done += tensor.size_bytes
            progress(done, offset)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf_path: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write the Hugging Face files of `gguf_path` into the existing `folder`; weights as fp32. `progress`: called with
    (bytes written, total bytes) of the weights. Raises: ConfigError when this converter does not support the file."""
    model = GgufModel(gguf_path)
    config = model.config()
    _write_json(folder / "config.json", config)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    model.tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", model.tokenizer_config())
    template = model.field("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", list(model.tensors()), progress)
