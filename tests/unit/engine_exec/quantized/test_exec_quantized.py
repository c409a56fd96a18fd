"""Quantized weights: from the checkpoints of each tool to tokens, and their arithmetic against the rule."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.capacity import weight_sizes
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.formats.registry import quantization_of
from diptych.engine.exec.layers.linear import PLAIN, Linear, Part, ShardBy
from diptych.engine.exec.methods.base import PLAIN_ROWS, WHOLE, cut_out
from diptych.engine.exec.methods.gguf_blocks import decoded
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.quantized import Fp8Weights, GgufWeights, Int4Weights, Int8Weights, packed, unpacked
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.models.config_keys import TrackedConfig
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.division import method_of_ranks
from diptych_tests import quantized
from diptych_tests.quantized import AWQ, COMPRESSED_FP8, COMPRESSED_INT4, COMPRESSED_INT8, FP8, GPTQ

RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj"


def with_path(config, path, value):
    """A copy of the config in which the field at `path` is `value`."""
    made = copy.deepcopy(config)
    inner = made
    *way, last = path.split(".")
    for key in way:
        inner = inner[key]
    inner[last] = value
    return made


def shuffled_groups(inputs, size):
    return (torch.arange(inputs) // size)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


# ---- from each tool's checkpoint to tokens ----

SYMMETRIC_GPTQ = partial(quantized.gptq, size=32, symmetric=True)
INT4_CHECKPOINTS = {
    "awq": (AWQ, partial(quantized.awq, size=32)),
    "awq-of-gptqmodel": (
        {**AWQ, "checkpoint_format": "gemm", "format": "gemm", "desc_act": False, "sym": True, "zero_point": False,
         "method": "awq", "pack_dtype": "int32",
         "meta": {"quantizer": ["gptqmodel:5.0.0"], "failsafe": {"strategy": "rtn"}}},
        partial(quantized.awq, size=32),
    ),
    "gptq": (GPTQ, SYMMETRIC_GPTQ),
    "gptq-asymmetric": ({**GPTQ, "sym": False}, partial(quantized.gptq, size=32, symmetric=False)),
    "gptq-v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2", "format": "gptq_v2"},
        partial(quantized.gptq, size=32, symmetric=False, version=2),
    ),
    "gptq-act-order": (
        {**GPTQ, "desc_act": True, "sym": False},
        lambda w: quantized.gptq(w, 32, symmetric=False, groups=shuffled_groups(w.shape[1], 32)),
    ),
    "compressed": (COMPRESSED_INT4, partial(quantized.compressed_int4, size=32, symmetric=True)),
    "compressed-asymmetric": (
        with_path(COMPRESSED_INT4, "config_groups.group_0.weights.symmetric", False),
        partial(quantized.compressed_int4, size=32, symmetric=False),
    ),
    "compressed-act-order": (
        with_path(COMPRESSED_INT4, "config_groups.group_0.weights.actorder", "group"),
        lambda w: quantized.compressed_int4(w, 32, symmetric=True, groups=shuffled_groups(w.shape[1], 32)),
    ),
    "compressed-channel": (
        with_path(
            with_path(COMPRESSED_INT4, "config_groups.group_0.weights.strategy", "channel"),
            "config_groups.group_0.weights.group_size", None,
        ),
        lambda w: quantized.compressed_int4(w, w.shape[1], symmetric=True),
    ),
}  # fmt: skip


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", INT4_CHECKPOINTS)
def test_int4_checkpoints_of_each_tool_give_the_tokens_of_what_they_mean(
    model_dir_of, driver_of, tmp_path_factory, name
):
    config, quantize = INT4_CHECKPOINTS[name]
    folder = model_dir_of("LlamaForCausalLM", num_hidden_layers=2, attention_bias=True)
    plain = quantized.plain_folder(tmp_path_factory.mktemp("plain"), folder, load_file(folder / "model.safetensors"))
    meant = quantized.quantize_folder(folder, config, quantize)
    quantized.plain_folder(plain, folder, meant)
    driver = driver_of(folder, backend="torch")
    assert driver.runner.description.method == "int4"
    prompts = prompts_of(1, 9, 20)
    assert driver.generate(prompts, 8, chunk=7) == driver_of(plain, backend="torch").generate(prompts, 8, chunk=7)


def naive_int8(codes, scales, bias, x):
    """The rule, number by number of a row, in NumPy."""
    out = np.zeros((len(x), len(codes)), dtype=np.float32)
    for i, row in enumerate(x.astype(np.float32)):
        scale = np.float32(np.abs(row).max()) / np.float32(127)
        rounded = np.zeros_like(row) if scale == 0 else np.clip(np.rint(row / scale), -127, 127)
        sums = codes.astype(np.int64) @ rounded.astype(np.int64)
        out[i] = sums.astype(np.float32) * (scale * scales.astype(np.float32))
    return out if bias is None else out + bias


def test_int8_is_the_rule_bit_for_bit():
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (70, 1100), dtype=torch.int8)
    weights = Int8Weights(weight, torch.rand(70) + 0.01, torch.randn(70))
    x = torch.randn(5, 1100)
    x[2] = 0
    x[3] *= 1e-30
    out = METHODS["int8"].apply(weights, x, PLAIN_ROWS)
    assert np.array_equal(
        out.numpy(), naive_int8(weight.numpy(), weights.scales.numpy(), weights.bias.numpy(), x.numpy())
    )
    assert torch.equal(out[2], weights.bias)
    largest = torch.full((1, 1100), 3.0)
    full = Int8Weights(torch.full((1, 1100), -128, dtype=torch.int8), torch.ones(1), None)
    assert METHODS["int8"].apply(full, largest, PLAIN_ROWS).item() == np.float32(-128 * 127 * 1100) * (
        np.float32(3) / np.float32(127)
    )


@pytest.mark.parametrize("blocked", [False, True])
def test_fp8_is_the_rule(blocked):
    """Within the rounding of float32: sums here are of float64, element by element."""
    torch.manual_seed(1)
    outputs, inputs = 200, 300
    weight = torch.randn(outputs, inputs)
    tensors, meant = (quantized.fp8_blocks if blocked else quantized.fp8_rows)(weight)
    scales = tensors["weight_scale_inv"] if blocked else tensors["weight_scale"].flatten()
    weights = Fp8Weights(tensors["weight"], scales, (128, 128) if blocked else None, torch.randn(outputs))
    x = torch.randn(4, inputs)
    x[1] = 0
    rounded = torch.zeros_like(x)
    for row in range(4):
        for span in [slice(0, 128), slice(128, 256), slice(256, 300)] if blocked else [slice(None)]:
            scale = x[row, span].abs().max() / 448
            if scale:
                codes = (x[row, span] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                rounded[row, span] = codes.float() * scale
    wanted = (rounded.double() @ meant.double().T + weights.bias.double()).float()
    out = METHODS["fp8"].apply(weights, x, PLAIN_ROWS)
    torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-5)
    assert torch.equal(out[1], weights.bias)
    assert METHODS["fp8"].apply(weights, x.bfloat16(), PLAIN_ROWS).dtype == torch.bfloat16


def test_every_number_of_e4m3_has_its_value():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()].reshape(-1, 1)
    assert len(codes) == 254
    weights = Fp8Weights(codes, torch.ones(254), None, None)
    out = METHODS["fp8"].apply(weights, torch.full((1, 1), 448.0), PLAIN_ROWS)
    assert torch.equal(out[0], codes.float().flatten() * 448)


def int4_weights(outputs=96, inputs=256, size=64):
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales, zeros = torch.rand(outputs, inputs // size) + 0.01, torch.randint(0, 16, (outputs, inputs // size))
    weights = Int4Weights(packed(codes), scales, zeros.to(torch.uint8), size, None, torch.randn(outputs))
    spread = partial(torch.repeat_interleave, repeats=size, dim=1)
    return weights, (codes.double() - spread(zeros)) * spread(scales.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 256])
def test_int4_is_the_rule(dtype, size):
    torch.manual_seed(2)
    weights, meant = int4_weights(size=size)
    x = (torch.randn(6, 256) * torch.tensor([1.0, 1e-20, 0.0, 1e20, 3.0, 1.0])[:, None]).to(dtype)
    order = torch.randperm(256).to(torch.int32)
    for given, seen in ((weights, x), (replace(weights, order=order), x[:, order])):
        wanted = seen.double() @ meant.T + weights.bias.double()
        out = METHODS["int4"].apply(given, x, PLAIN_ROWS)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), wanted, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_low_codes_are_even_inputs():
    assert unpacked(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 4]]
    assert packed(torch.tensor([[1, 2, 3, 4]])).tolist() == [[0x21, 0x43]]


def gguf_rows(kind, outputs, inputs):
    """Random blocks whose scales are ordinary numbers."""
    rng, one = np.random.default_rng(3), KINDS[kind]
    blocks = rng.integers(0, 256, (outputs, inputs // one.weights, one.size_bytes), dtype=np.uint8)
    scales = {"Q8_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in scales:
        blocks[..., at : at + 2] = rng.normal(0, 0.05, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_mean_what_the_gguf_package_says(kind):
    rows = gguf_rows(kind, 24, 512)
    meant = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float64)
    codes, scales, offsets = decoded(kind, torch.from_numpy(rows))
    spread = partial(torch.repeat_interleave, repeats=KINDS[kind].group, dim=1)
    ours = codes.double() * spread(scales.double()) + (0 if offsets is None else spread(offsets.double()))
    np.testing.assert_allclose(ours.numpy(), meant, rtol=1e-6, atol=1e-7)
    assert codes.int().abs().max() <= 2 ** KINDS[kind].code_bits
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    out = METHODS["gguf"].apply(GgufWeights(kind, torch.from_numpy(rows), None), x, PLAIN_ROWS)
    np.testing.assert_allclose(out.numpy(), x.double().numpy() @ meant.T, rtol=2e-5, atol=2e-5)


def weights_of(method, outputs=96, inputs=256):
    torch.manual_seed(5)
    weight = torch.randn(outputs, inputs)
    if method == "int8":
        tensors, _ = quantized.int8_rows(weight)
        return Int8Weights(tensors["weight"], tensors["weight_scale"].flatten(), None)
    if method == "fp8":
        tensors, _ = quantized.fp8_rows(weight)
        return Fp8Weights(tensors["weight"], tensors["weight_scale"].flatten(), None, None)
    if method == "fp8-blocks":
        tensors, _ = quantized.fp8_blocks(weight)
        return Fp8Weights(tensors["weight"], tensors["weight_scale_inv"], (128, 128), None)
    if method == "int4":
        return int4_weights(outputs, inputs)[0]
    return GgufWeights("Q6_K", torch.from_numpy(gguf_rows("Q6_K", outputs, inputs)), None)


@pytest.mark.parametrize("method", ["int8", "fp8", "fp8-blocks", "int4", "gguf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_in_any_company(method, dtype):
    """Alone, among others, in another place, with another number of threads, beside a row of NaN."""
    weights, apply = weights_of(method), METHODS[method.removesuffix("-blocks")].apply
    x = torch.randn(40, 256).to(dtype)
    whole = apply(weights, x, PLAIN_ROWS)
    assert whole.isfinite().all()
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        for first, last in ((0, 1), (7, 8), (3, 20), (39, 40)):
            assert torch.equal(apply(weights, x[first:last], PLAIN_ROWS), whole[first:last])
    finally:
        torch.set_num_threads(threads)
    x[11] = float("nan")
    beside = apply(weights, x, PLAIN_ROWS)
    assert beside[11].isnan().all(), "what is no number is not hidden by rounding"
    others = [i for i in range(40) if i != 11]
    assert torch.equal(beside[others], whole[others])


COUNTED = {
    **{name: INT4_CHECKPOINTS[name] for name in ("awq", "gptq-act-order", "compressed-channel")},
    "int8": (COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (COMPRESSED_FP8, quantized.fp8_rows),
    "fp8-blocks": (FP8, quantized.fp8_blocks),
    "gguf": (None, quantized.gguf_rows),
}


@pytest.mark.parametrize("name", COUNTED)
def test_21_capacity_counts_the_bytes_that_a_worker_loads(tmp_path, driver_of, name):
    """`diptych capacity` knew nothing of quantized weights."""
    config, quantize = COUNTED[name]
    folder = quantized.write_llama(tmp_path, hidden=256, mlp=384, layers=1)
    quantized.quantize_folder(folder, config or quantized.gguf_config(folder), quantize)
    loaded = driver_of(folder, backend="torch", dtype="bfloat16").runner.weight_sizes
    assert weight_sizes(json.loads((folder / "config.json").read_text()), "bfloat16") == loaded
    assert loaded.method in (name.removesuffix("-blocks"), "int4")


# ---- which layers, and what is refused ----


def methods_of(config, **overrides):
    """Method of each layer, by its first part's name behind the block."""
    description = describe({**RAW, **overrides, "quantization_config": config})
    [block] = description.blocks
    found = {linear.parts[0].name.rpartition(".")[2]: linear.method for linear in block.linears}
    return {**found, "lm_head": description.head.linear.method}


QUANTIZED_ALL = {"q_proj": "int4", "o_proj": "int4", "gate_proj": "int4", "down_proj": "int4", "lm_head": PLAIN}


def test_layers_that_a_checkpoint_leaves_out_are_plain():
    assert methods_of(AWQ) == QUANTIZED_ALL
    assert methods_of({**AWQ, "modules_to_not_convert": ["down_proj"]}) == {**QUANTIZED_ALL, "down_proj": PLAIN}
    assert methods_of({**GPTQ, "lm_head": True})["lm_head"] == "int4"
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]}
    assert methods_of({**GPTQ, **listed}) == {**dict.fromkeys(QUANTIZED_ALL, PLAIN), "q_proj": "int4"}
    assert methods_of({**FP8, "ignored_layers": ["model.layers.0.mlp"]}) == {
        "q_proj": "fp8", "o_proj": "fp8", "gate_proj": PLAIN, "down_proj": PLAIN, "lm_head": PLAIN,
    }  # fmt: skip
    assert methods_of(COMPRESSED_INT4) == QUANTIZED_ALL
    assert methods_of({**COMPRESSED_INT4, "ignore": None})["lm_head"] == "int4"
    assert methods_of({**COMPRESSED_INT4, "ignore": None}, tie_word_embeddings=True)["lm_head"] == PLAIN
    ignore = ["lm_head", "re:.*down_proj$", "model.layers.0.self_attn.o_proj", "o_proj"]
    assert methods_of({**COMPRESSED_INT4, "ignore": ignore}) == {**QUANTIZED_ALL, "o_proj": PLAIN, "down_proj": PLAIN}
    targets = with_path(COMPRESSED_INT4, "config_groups.group_0.targets", ["re:.*mlp.*"])
    assert methods_of(targets) == {**QUANTIZED_ALL, "q_proj": PLAIN, "o_proj": PLAIN}
    groups = {
        "attention": {**COMPRESSED_INT8["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"],
                      "format": "int-quantized"},
        "rest": {**COMPRESSED_INT4["config_groups"]["group_0"], "format": "pack-quantized"},
    }  # fmt: skip
    mixed = {**COMPRESSED_INT4, "format": "mixed-precision", "config_groups": groups}
    assert methods_of(mixed) == {**QUANTIZED_ALL, "q_proj": "int8", "o_proj": "int8"}
    model = describe({**RAW, "quantization_config": mixed})
    assert model.method == "int4+int8"
    assert [method_of_ranks(model, degree) for degree in (1, 2)] == ["int4+int8", "int4+int8@tp2"]


OF_TRANSFORMERS = [
    {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.1,
     "dataset": None, "desc_act": True, "disable_exllama": True, "exllama_config": {"version": 1}, "group_size": 64,
     "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
     "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None,
     "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
    {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None, "group_size": 64,
     "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm", "zero_point": True},
]  # fmt: skip


@pytest.mark.parametrize("config", OF_TRANSFORMERS, ids=["gptq", "awq"])
def test_21_what_transformers_writes_beside_the_settings_changes_nothing(config):
    """`disable_exllama`, of its first versions with GPTQ, was refused as unknown."""
    assert methods_of(config) == QUANTIZED_ALL


@pytest.mark.parametrize(
    ("quantization", "names"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ["fp8", "fp8@tp2", "fp8@tp3"]),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, ["fp8"] * 3),
        (quantized.GPTQ, ["int4"] * 3),
        ({}, ["plain"] * 3),
    ],
)
def test_23_the_degree_is_part_of_the_method_where_ranks_quantize_parts_of_rows(quantization, names):
    """Pairs of unequal degrees were accepted, and shared blocks, though their values differ by more than last bits."""
    model = describe({**RAW, "quantization_config": quantization})
    assert [method_of_ranks(model, degree) for degree in (1, 2, 3)] == names


WEIGHTS, INPUTS = "config_groups.group_0.weights", "config_groups.group_0.input_activations"


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (AWQ, "bits", 8),
        (AWQ, "version", "gemv"),
        (AWQ, "zero_point", "no"),
        (AWQ, "backend", "llm-awq"),
        (AWQ, "checkpoint_format", "gemv_fast"),
        (AWQ, "desc_act", True),
        (AWQ, "group_size", 48),
        (AWQ, "group_size", 0),
        (AWQ, "group_size", None),
        (AWQ, "modules_to_not_convert", ["q_proj"]),
        *[(GPTQ, "bits", bits) for bits in (2, 3, 8)],
        (GPTQ, "checkpoint_format", "marlin"),
        (GPTQ, "format", "gptq_v2"),
        (GPTQ, "is_marlin_format", True),
        (GPTQ, "activation", {"mode": "w4afp8"}),
        (GPTQ, "dynamic", {"-:.*down.*": {}}),
        (GPTQ, "sym", "yes"),
        (GPTQ, "modules_in_block_to_quantize", [["mlp.up_proj"]]),
        (FP8, "activation_scheme", "static"),
        (FP8, "fmt", "e5m2"),
        (FP8, "scale_fmt", "ue8m0"),
        (FP8, "weight_block_size", [64, 128]),
        (FP8, "kv_cache_quant_method", "fp8"),
        (COMPRESSED_INT8, "kv_cache_scheme", {"num_bits": 8, "type": "float"}),
        (COMPRESSED_INT8, "sparsity_config.format", "sparse-24-bitmask"),
        (COMPRESSED_INT8, "transform_config", {"config_groups": {"u": {"type": "hadamard"}}}),
        (COMPRESSED_INT8, "quantization_status", "calibration"),
        (COMPRESSED_INT8, "format", "pack-quantized"),
        (COMPRESSED_INT8, "config_groups", {}),
        (COMPRESSED_INT8, "config_groups.group_0.output_activations", {"num_bits": 8}),
        (COMPRESSED_INT8, "config_groups.group_0.targets", ["re:("]),
        (COMPRESSED_INT8, f"{INPUTS}.dynamic", False),
        (COMPRESSED_INT8, f"{INPUTS}.strategy", "tensor"),
        (COMPRESSED_INT8, f"{INPUTS}.symmetric", False),
        (COMPRESSED_INT8, INPUTS, None),
        (COMPRESSED_INT8, f"{WEIGHTS}.symmetric", False),
        (COMPRESSED_INT8, f"{WEIGHTS}.strategy", "group"),
        (COMPRESSED_INT8, f"{WEIGHTS}.num_bits", 2),
        (COMPRESSED_FP8, f"{WEIGHTS}.block_structure", [128, 64]),
        (COMPRESSED_FP8, f"{WEIGHTS}.actorder", "group"),
        (COMPRESSED_INT4, f"{WEIGHTS}.type", "float"),
        (COMPRESSED_INT4, f"{WEIGHTS}.group_size", 96),
        (COMPRESSED_INT4, f"{WEIGHTS}.actorder", "sideways"),
        (COMPRESSED_INT4, f"{WEIGHTS}.unheard_of", 1),
        (COMPRESSED_INT4, INPUTS, {"num_bits": 8, "dynamic": True}),
    ],
)  # fmt: skip
def test_what_cannot_be_run_exactly_is_refused_by_its_field(config, path, value):
    if path == "sparsity_config.format":
        config = {**config, "sparsity_config": {"format": None}}
    with pytest.raises(ConfigError) as error:
        describe({**RAW, "quantization_config": with_path(config, path, value)})
    assert error.value.field.startswith(f"quantization_config.{path}"), str(error.value)


def paths_of(config, before=()):
    """Of every value in it, objects themselves included."""
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*before, key))


GGUF_CONFIG = {"quant_method": "gguf", "lm_head": False, "kinds": {DOWN: "Q4_1"}}
COMPRESSED_BLOCKS = quantized.compressed(
    "float-quantized",
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128},
)


@pytest.mark.parametrize(
    "config", [AWQ, GPTQ, FP8, COMPRESSED_INT8, COMPRESSED_FP8, COMPRESSED_BLOCKS, COMPRESSED_INT4, GGUF_CONFIG]
)
def test_any_value_in_any_field_is_taken_or_refused_by_name(config):
    describe({**RAW, "quantization_config": config})
    elsewhere = []
    for *way, last in paths_of(config):
        for value in (None, True, 0, -3, 1.5, 10**400, "x", "", [], [[]], [1, "a"], {}, {"a": [1]}, {"a": {"b": None}}):
            made = copy.deepcopy(config)
            inner = made
            for key in way:
                inner = inner[key]
            inner[last] = value
            try:
                describe({**RAW, "quantization_config": made})
            except ConfigError as error:
                elsewhere += [] if error.field.startswith("quantization_config") else [error]
    assert not elsewhere


# ---- bad tensors ----


@pytest.fixture
def loaded(model_dir_of):
    """loaded(config, quantize, change of the tensors) -> the weights of the first layer's MLP output."""

    def load(config, quantize, change=lambda tensors: None, shard=WHOLE):
        folder = model_dir_of(
            "LlamaForCausalLM", num_hidden_layers=1, hidden_size=128, intermediate_size=256, num_attention_heads=4,
            num_key_value_heads=4,
        )  # fmt: skip
        quantized.quantize_folder(folder, config, quantize)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        [block] = describe(json.loads((folder / "config.json").read_text())).blocks
        layer = block.mlp.down
        with Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu")) as source:
            return METHODS[layer.method].load(layer, source, shard)

    return load


def put(name, at, value):
    def change(tensors):
        tensors[f"{DOWN}.{name}"][at] = value

    return change


def drop(name):
    return lambda tensors: tensors.pop(f"{DOWN}.{name}")


@pytest.mark.parametrize(
    ("checkpoint", "change", "tensor", "reason"),
    [
        ("awq", drop("scales"), "scales", "is missing"),
        ("awq", put("scales", (0, 5), 0.0), "scales", "has a scale of 0.0"),
        ("gptq", put("scales", (1, 5), float("nan")), "scales", "has a scale of nan"),
        ("gptq", put("scales", (1, 5), float("inf")), "scales", "has a scale of inf"),
        ("gptq", put("g_idx", 7, 8), "g_idx", "names the group 8: there are 8"),
        ("gptq", put("g_idx", 7, -1), "g_idx", "names the group -1"),
        ("gptq", put("g_idx", 7, 3), "g_idx", "does not give every group 32 inputs"),
        ("gptq", put("qzeros", (0, 0), -1), "qzeros", "has a zero point that does not fit"),
        ("gptq", put("qzeros", (0, 0), 0x77777776), "qzeros", "has zero points, and the config says sym"),
        (
            "gptq",
            lambda t: t.update({f"{DOWN}.bias": torch.ones(128)}),
            "bias",
            "is not 0, and the model has no bias there",
        ),
        ("gptq-act-order", drop("g_idx"), "g_idx", "is missing"),
        ("compressed", drop("weight_scale"), "weight_scale", "is missing"),
        ("compressed", put("weight_shape", 0, 96), "weight_shape", r"says \[96, 256\]"),
        ("compressed-act-order", put("weight_g_idx", 3, 99), "weight_g_idx", "names the group 99"),
        ("compressed-asymmetric", drop("weight_zero_point"), "weight_zero_point", "is missing"),
    ],
)
def test_a_bad_tensor_of_a_checkpoint_is_an_error_with_its_name(loaded, checkpoint, change, tensor, reason):
    with pytest.raises(ConfigError, match=rf"model\S*=.*tensor {DOWN}\.{tensor} {reason}") as error:
        loaded(*INT4_CHECKPOINTS[checkpoint], change)
    assert "missing" in reason or str(error.value.value).endswith("model.safetensors")


def test_another_group_size_than_the_config_says_is_an_error_with_both_shapes(loaded):
    with pytest.raises(ConfigError, match=r"scales has shape \(8, 128\), where config.json asks for \(4, 128\)"):
        loaded({**AWQ, "group_size": 64}, INT4_CHECKPOINTS["awq"][1])


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize(
    ("config", "quantize", "name"),
    [
        (COMPRESSED_INT8, quantized.int8_rows, "weight_scale"),
        (COMPRESSED_FP8, quantized.fp8_rows, "weight_scale"),
        (FP8, quantized.fp8_blocks, "weight_scale_inv"),
    ],
)
def test_a_bad_scale_of_8_bits_is_an_error_with_its_name(loaded, config, quantize, name, bad):
    with pytest.raises(ConfigError, match=rf"tensor {DOWN}.{name} has a scale of {bad}"):
        loaded(config, quantize, put(name, (0, 0), bad))


def test_another_dtype_than_the_formats_is_an_error_with_its_name(loaded):
    def widen(tensors):
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.int32)

    with pytest.raises(ConfigError, match=f"tensor {DOWN}.weight holds int32, not int8"):
        loaded(COMPRESSED_INT8, quantized.int8_rows, widen)


def test_a_bias_of_zeros_that_the_model_does_not_have_is_passed_over(loaded):
    weights = loaded(*INT4_CHECKPOINTS["gptq"], lambda t: t.update({f"{DOWN}.bias": torch.zeros(128)}))
    assert weights.bias is None


@pytest.mark.parametrize("shape", [(), (1,), (128,), (128, 1)])
def test_the_scales_of_outputs_may_have_each_form_of_the_field(loaded, shape):
    def reshape(tensors):
        name = f"{DOWN}.weight_scale"
        tensors[name] = tensors[name].flatten()[: int(np.prod(shape))].reshape(shape).contiguous()

    config = {key: value for key, value in FP8.items() if key != "weight_block_size"}
    weights = loaded(config, quantized.fp8_rows, reshape)
    assert weights.scales.shape == (128,)
    assert (len(set(weights.scales.tolist())) == 1) == (shape in ((), (1,)))


def test_parts_of_one_layer_with_several_orders_are_refused(model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM", num_hidden_layers=1)
    groups = iter(range(10))

    def quantize(weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(next(groups)))
        return quantized.gptq(weight, 32, symmetric=True, groups=(torch.arange(weight.shape[1]) // 32)[order])

    quantized.quantize_folder(folder, {**GPTQ, "desc_act": True}, quantize)
    with pytest.raises(ConfigError, match=r"q_proj and .*k_proj are one layer here, and their act-order differs"):
        driver_of(folder, backend="torch")


def test_blocks_of_fp8_may_not_reach_into_the_next_part():
    layer = Linear((Part("a", 96), Part("b", 128)), 128, method="fp8", settings=(("format", "fp8"), ("blocked", True)))
    with pytest.raises(ConfigError, match="weight_block_size=96: a is followed by another layer in one block of 128"):
        METHODS["fp8"].load(layer, Stored(layer, quantized.fp8_blocks), WHOLE)


# ---- shards ----


class Stored:
    """Implements TensorSource: random weights of a layer, quantized."""

    def __init__(self, layer, quantize):
        self.tensors, self.plain = {}, {}
        for part in layer.parts:
            torch.manual_seed(part.outputs)
            self.plain[part.name] = torch.randn(part.outputs, layer.inputs)
            tensors, _ = quantize(self.plain[part.name])
            self.tensors |= {f"{part.name}.{end}": tensor for end, tensor in tensors.items()}

    def take(self, name, shape, *, as_stored=False, where=()):
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape
        return cut_out(tensor if as_stored else tensor.float(), where)

    def shape(self, name):
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def file_of(self, name):
        return "model.safetensors"


def gguf_quantize(weight, kind="Q8_0"):
    packed_rows = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return {"weight": torch.from_numpy(packed_rows)}, None


SHARDED = {
    "awq": (AWQ, partial(quantized.awq, size=32)),
    "gptq": (GPTQ, SYMMETRIC_GPTQ),
    "int4": INT4_CHECKPOINTS["compressed"],
    "int4-asymmetric": INT4_CHECKPOINTS["compressed-asymmetric"],
    "int8": (COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (COMPRESSED_FP8, quantized.fp8_rows),
    "fp8-blocks": (FP8, quantized.fp8_blocks),
    "gguf": ({"quant_method": "gguf", "kinds": {"a": "Q8_0", "b": "Q8_0"}}, gguf_quantize),
}


@pytest.mark.parametrize("rule", [ShardBy.OUTPUTS, ShardBy.INPUTS])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_of_a_quantized_layer_make_the_whole(name, rule):
    config, quantize = SHARDED[name]
    plain = Linear((Part("a", 512), Part("b", 256)), 512, shard=rule)
    layer = quantization_of(TrackedConfig(config)).declare(plain)
    method, source, x = METHODS[layer.method], Stored(layer, quantize), torch.randn(3, 512)
    whole = method.apply(method.load(layer, source, WHOLE), x, PLAIN_ROWS)
    shards = [method.load(layer, source, Shard(rank, 2)) for rank in range(2)]
    if rule is ShardBy.INPUTS:
        got = sum(method.apply(one, part, PLAIN_ROWS) for one, part in zip(shards, x.chunk(2, 1), strict=True))
        # A rank rounds its own inputs by their own largest value.
        torch.testing.assert_close(got, whole, rtol=0, atol={"int8": 1.5, "fp8": 5.0}.get(layer.method, 1e-3))
    else:
        outs = [method.apply(one, x, PLAIN_ROWS) for one in shards]
        assert torch.equal(torch.cat([out[:, at] for at in (slice(256), slice(256, 384)) for out in outs], 1), whole)


@pytest.mark.parametrize(
    ("name", "rule", "degree"),
    [("awq", ShardBy.INPUTS, 32), ("gptq", ShardBy.INPUTS, 32), ("int4", ShardBy.INPUTS, 32),
     ("awq", ShardBy.OUTPUTS, 128), ("fp8-blocks", ShardBy.OUTPUTS, 8), ("fp8-blocks", ShardBy.INPUTS, 8),
     ("gguf", ShardBy.INPUTS, 32)],
)  # fmt: skip
def test_ranks_do_not_cut_what_has_one_scale_or_one_word(name, rule, degree):
    config, _ = SHARDED[name]
    layer = quantization_of(TrackedConfig(config)).declare(Linear((Part("a", 512), Part("b", 256)), 512, shard=rule))
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={degree}: [ab] is cut at multiples of"):
        METHODS[layer.method].create(layer, Shard(1, degree))


@pytest.mark.parametrize("rule", ShardBy)
@pytest.mark.parametrize("name", ["int4-asymmetric", "fp8-blocks"])
def test_21_what_is_not_divided_is_not_cut(name, rule):
    """Without ranks, outputs and inputs that words or blocks do not divide were refused, by tensor_parallel_size=1."""
    config, quantize = SHARDED[name]
    layer = quantization_of(TrackedConfig(config)).declare(Linear((Part("a", 204),), 288, shard=rule))
    source, x = Stored(layer, quantize), torch.randn(3, 288)
    weights = METHODS[layer.method].load(layer, source, WHOLE)
    _, meant = quantize(source.plain["a"])
    wanted = x @ meant.T
    error = (METHODS[layer.method].apply(weights, x, PLAIN_ROWS) - wanted).norm() / wanted.norm()
    assert error < (1e-5 if layer.method == "int4" else 0.04), "fp8 rounds activations, too"


def test_ranks_do_not_share_inputs_in_another_order():
    config, quantize = INT4_CHECKPOINTS["gptq-act-order"]
    layer = quantization_of(TrackedConfig(config)).declare(Linear((Part("a", 64),), 512, shard=ShardBy.INPUTS))
    source = Stored(layer, quantize)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: a orders its inputs \(act-order\)"):
        METHODS["int4"].load(layer, source, Shard(0, 2))
    outputs = replace(layer, shard=ShardBy.OUTPUTS)
    whole, part = (METHODS["int4"].load(outputs, source, shard) for shard in (WHOLE, Shard(1, 2)))
    assert torch.equal(part.codes, whole.codes[32:])
    assert torch.equal(part.order, whole.order)
