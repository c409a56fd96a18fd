"""The converter on a tiny GGUF file that the `gguf` package writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from diptych.cli.models.gguf_convert import convert
from diptych.common.errors import ConfigError
from diptych.common.tokenizer import ModelTokenizer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "Ġ1", "ĠĠ", "ab"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The permutation of q and k by llama.cpp's writer."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, *, arch: str = "llama", pre: str = "smollm", extra_tensor: str = ""
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["1 2", "Ġ 1", "Ġ Ġ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    if extra_tensor:
        shapes[extra_tensor] = (HIDDEN,)
    tensors = {}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        tensors[name] = weight
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-1])
        if name == "blk.0.ffn_down":
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            tensors[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", weight if heads is None else permuted(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("converted")
    source = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tensors = write_gguf(source)
    calls: list[tuple[int, int]] = []
    convert(source, folder, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(tensor.nbytes for tensor in tensors.values())
    return folder, tensors


def test_weights_are_named_and_unpermuted(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, tensors = converted
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == {f"{name}.weight" for name in names.values()}
    for theirs, ours in names.items():
        np.testing.assert_array_equal(loaded[f"{ours}.weight"], tensors[theirs])


def test_config(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    expected: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_digits_are_split_before_the_byte_level(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = ModelTokenizer(converted[0])
    pieces = [tokenizer.raw.id_to_token(i) for i in tokenizer.encode("  12 1ab<|im_end|>")]
    assert pieces == ["ĠĠ", "1", "2", "Ġ", "1", "ab", "<|im_end|>"]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == tokenizer.encode("ab")
    assert isinstance(tokenizer.raw, Tokenizer)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"arch": "qwen2"}, "general.architecture"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre"),
        ({"extra_tensor": "blk.0.attn_q_norm"}, "gguf"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, options: dict[str, str], field: str) -> None:
    write_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "other.gguf", tmp_path)
    assert error.value.field == field


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="not a readable GGUF"):
        convert(tmp_path / "x.gguf", tmp_path)
