"""The converter on a tiny GGUF file that the `gguf` package writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from diptych.cli.models.gguf_convert import GgufModel, convert, merges_of
from diptych.common.errors import ConfigError
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.backends.base import make_plan
from diptych.engine.exec.backends.torch import TorchBackend
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import load_weights
from diptych.engine.exec.methods.base import PLAIN_ROWS
from diptych.engine.exec.models import registry
from diptych.engine.exec.models.registry import describe

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "Ġ1", "ĠĠ", "ab"]
Q, KV = (HEADS * HEAD_DIM, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)
BLOCK: dict[str, tuple[str, tuple[int, ...]]] = {
    "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
    "attn_q.weight": ("self_attn.q_proj.weight", Q),
    "attn_k.weight": ("self_attn.k_proj.weight", KV),
    "attn_v.weight": ("self_attn.v_proj.weight", KV),
    "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (FFN, HIDDEN)),
    "ffn_up.weight": ("mlp.up_proj.weight", (FFN, HIDDEN)),
    "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, FFN)),
}
BIASES: dict[str, tuple[str, tuple[int, ...]]] = {
    f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", shape[:1]) for x, shape in (("q", Q), ("k", KV), ("v", KV))
}
QK_NORMS: dict[str, tuple[str, tuple[int, ...]]] = {
    f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (HEAD_DIM,)) for x in "qk"
}
FOUR_NORMS: dict[str, tuple[str, tuple[int, ...]]] = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (HIDDEN,)),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (HIDDEN,)),
}
FAMILIES = {
    "llama": BLOCK,
    "qwen2": BLOCK | BIASES,
    "qwen3": BLOCK | QK_NORMS,
    "gemma2": BLOCK | FOUR_NORMS,
    "gemma3": BLOCK | FOUR_NORMS | QK_NORMS,
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's writer does to q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(weight.shape)


def as_written(arch: str, name: str, weight: np.ndarray) -> np.ndarray:
    heads = {"attn_q.weight": HEADS, "attn_k.weight": KV_HEADS}.get(name.split(".", 2)[-1])
    if arch == "llama" and heads is not None:
        return permuted(weight, heads)
    return weight + 1 if arch.startswith("gemma") and "norm" in name else weight


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    without: str = "",
    extra: str = "",
    ffn: int = FFN,
    packed: Mapping[str, str] = MappingProxyType({"ffn_down": "Q4_1"}),
    untied: bool = False,
) -> dict[str, np.ndarray]:
    """Args: packed: kind of blocks of a tensor, by a piece of its name. Returns: what the checkpoint holds, by its names."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch.startswith("gemma"):
        writer.add_sliding_window(16)
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
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    }
    names["output_norm.weight"] = ("model.norm.weight", (HIDDEN,))
    names |= {f"blk.0.{name}": (f"model.layers.0.{ours}", shape) for name, (ours, shape) in FAMILIES[arch].items()}
    if untied:
        names["output.weight"] = ("lm_head.weight", (len(TOKENS), HIDDEN))
    if extra:
        names[extra] = (extra, (HIDDEN,))
    tensors = {}
    for name, (ours, shape) in names.items():
        if name == without:
            continue
        weight = rng.standard_normal(shape).astype(np.float32)
        tensors[ours] = weight
        piece = max((one for one in packed if one in name), key=len, default=None)
        kind = None if piece is None or len(shape) == 1 else packed[piece]
        if kind is None:
            writer.add_tensor(name, as_written(arch, name, weight))
        else:
            # Blocks lie within rows, and what a writer moves is rows.
            whole = gguf.GGMLQuantizationType[kind]
            tensors[ours] = gguf.quants.dequantize(gguf.quants.quantize(weight, whole), whole)
            writer.add_tensor(name, gguf.quants.quantize(as_written(arch, name, weight), whole), raw_dtype=whole)
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


@pytest.mark.parametrize("arch", FAMILIES)
def test_weights_of_every_family_are_the_checkpoints(tmp_path: Path, arch: str) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", arch=arch)
    convert(tmp_path / "tiny.gguf", tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, weight in tensors.items():
        np.testing.assert_allclose(loaded[name], weight, rtol=0, atol=2e-7 if "norm" in name else 0)
    config = json.loads((tmp_path / "config.json").read_text())
    shapes = {name: tuple(weight.shape) for name, weight in tensors.items()}
    assert describe(config).plain_tensors() == shapes


BLOCKS = {"attn_": "Q8_0", "attn_v": "Q5_0", "ffn_": "Q4_1", "token_embd": "Q8_0", "output.weight": "Q8_0"}


def loaded_linears(folder: Path) -> dict[str, torch.Tensor]:
    """Every linear layer's weight as its method computes with it, by the name of its first part, and the embedding."""
    config = json.loads((folder / "config.json").read_text())
    description = describe(config)
    plan = make_plan(description, kv_format_of(description, block_size=8), [TorchBackend()])
    with Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu")) as source:
        weights = load_weights(source, plan).weights
    out = {"embedding": weights.embedding}
    for block, layer in zip(description.blocks, weights.blocks, strict=True):
        pairs = zip((*block.linears, description.head.linear), (*layer.linears, weights.lm_head), strict=True)
        for linear, kept in pairs:
            out[linear.parts[0].name] = kept(torch.eye(linear.inputs), PLAIN_ROWS).T
    return out


@pytest.mark.parametrize(
    ("arch", "untied"),
    [(arch, untied) for arch in FAMILIES for untied in (False, True) if not (untied and "gemma" in arch)],
)
def test_packed_weights_of_every_family_mean_what_the_converted_ones_say(
    tmp_path: Path, arch: str, untied: bool
) -> None:
    packed = BLOCKS if arch == "llama" else {name: kind for name, kind in BLOCKS.items() if name != "output.weight"}
    for name, kept in (("plain", False), ("kept", True)):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / "tiny.gguf", arch=arch, packed=packed, untied=untied)
        convert(tmp_path / "tiny.gguf", tmp_path / name, packed=kept)
    stored, config = (
        load_file(tmp_path / "kept" / "model.safetensors"),
        json.loads((tmp_path / "kept" / "config.json").read_text()),
    )
    assert stored["model.layers.0.mlp.up_proj.weight"].shape == (FFN, HIDDEN // 32 * 20)
    assert config["quantization_config"]["kinds"]["model.layers.0.self_attn.v_proj"] == "Q5_0"
    wanted, got = loaded_linears(tmp_path / "plain"), loaded_linears(tmp_path / "kept")
    assert wanted.keys() == got.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-6, atol=1e-6)
    head_is_packed = not untied or "output.weight" in packed
    assert (describe(config).head.linear.method == "gguf") == head_is_packed
    assert config["tie_word_embeddings"] is False


def test_a_layer_that_cannot_stay_packed_is_refused_by_its_kind(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", packed={**BLOCKS, "ffn_up": "Q5_1"})
    with pytest.raises(ConfigError, match=r"gguf='Q5_1': model.layers.0.mlp.up_proj cannot stay packed: supported are"):
        convert(tmp_path / "tiny.gguf", tmp_path, packed=True)
    convert(tmp_path / "tiny.gguf", tmp_path)


def test_every_family_with_a_converter_is_tested() -> None:
    assert {family.gguf.architecture for family in registry.FAMILIES if family.gguf is not None} == set(FAMILIES)


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
        ({"pre": "qwen2"}, "tokenizer.ggml.pre"),
        ({"extra": "blk.0.attn_q_norm.weight"}, "gguf"),
        ({"without": "blk.0.attn_k.weight"}, "gguf"),
        ({"ffn": 2 * FFN}, "gguf"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    write_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "other.gguf", tmp_path)
    assert error.value.field == field
    tensor = options.get("extra") or options.get("without")
    assert tensor is None or tensor in str(error.value)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="llama") as error:
        convert(tmp_path / "other.gguf", tmp_path)
    assert error.value.field == "general.architecture"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="not a readable GGUF"):
        convert(tmp_path / "x.gguf", tmp_path)


# ---- SentencePiece ----

PIECES = {
    "<pad>": (3, 0.0), "<eos>": (3, 0.0), "<bos>": (3, 0.0), "<unk>": (2, 0.0),
    **{f"<0x{i:02X}>": (6, 0.0) for i in range(256)},
    "  ": (4, -1000.0), "\n\n": (4, -1000.0),
    **{token: (1, -float(i)) for i, token in enumerate(
        ["▁t", "er", "in", "▁a", "▁the", "th", "the", "▁th", "▁in", "n", "he", "ing", "ther", "▁ther", "a", "e", "g", "h"]
        + ["i", "r", "t", "▁", "\n"]
    )},
}  # fmt: skip


def sentencepiece_ids(text: str) -> list[int]:
    """What SentencePiece does: of all neighbours that make a piece, the pair with the best score is merged, the leftmost
    first, until there is none."""
    ids = {token.replace(" ", "▁"): i for i, token in enumerate(PIECES)}
    scores = {token.replace(" ", "▁"): 0.0 if kind == 4 else score for token, (kind, score) in PIECES.items()}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    path = tmp_path_factory.mktemp("spm") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    for add, value in (
        ("block_count", 0), ("context_length", 128), ("embedding_length", 8), ("feed_forward_length", 8),
        ("head_count", 1), ("key_length", 8), ("sliding_window", 4), ("layer_norm_rms_eps", 1e-6),
        ("tokenizer_model", "llama"), ("token_list", list(PIECES)), ("token_scores", [s for _, s in PIECES.values()]),
        ("token_types", [kind for kind, _ in PIECES.values()]), ("bos_token_id", 2), ("eos_token_id", 1),
        ("unk_token_id", 3), ("pad_token_id", 0), ("add_bos_token", True), ("add_space_prefix", False),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = GgufModel(path)
    model.tokenizer().save(str(path.parent / "tokenizer.json"))
    (path.parent / "config.json").write_text(json.dumps({"vocab_size": len(PIECES), "eos_token_id": 1}))
    (path.parent / "tokenizer_config.json").write_text(json.dumps(model.tokenizer_config()))
    return ModelTokenizer(path.parent)


@pytest.mark.parametrize(
    "text",
    ["the gathering", "  there  in the\nnight", "either", "a\tb ü 日", "\n\n\nthing", "ttthhee rr nnn", "in ing  "],
)
def test_sentencepiece_merges_the_best_score_first(sentencepiece: ModelTokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids[0] == 2
    assert ids[1:] == sentencepiece_ids(text)
    assert sentencepiece.raw.decode(ids, skip_special_tokens=True) == text


def test_pieces_that_users_defined_are_merged_first() -> None:
    tokens, kinds = ["a", "b", "ab", "ba", "<x>"], [1, 1, 1, 4, 3]
    assert merges_of(tokens, [-1.0, -2.0, -3.0, -1000.0, 0.0], kinds) == [("b", "a"), ("a", "b")]
