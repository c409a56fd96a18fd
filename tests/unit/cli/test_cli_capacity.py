from __future__ import annotations

import json

import pytest

from diptych.cli.capacity import run_capacity
from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format, windowed_format
from diptych.engine.capacity import WeightSizes, cache_of, capacity_line

LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

GEMMA_3_LIKE = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "intermediate_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 262144,
    "torch_dtype": "float32",
}


def test_llama_3_70b_takes_320_kib_per_token_in_fp16(tmp_path, capsys):
    assert cache_of(LLAMA_3_70B, "float16").bytes_per_token == 320 * 1024
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_70B))
    for model in (file, tmp_path):
        assert run_capacity(str(model), dtype="float16", memory_gib=40.0) == 0
        out = capsys.readouterr().out
        assert (
            "2 (K and V) x 80 layers x 8 KV heads x 128 head dim x 2 bytes (float16) = 327,680 bytes = 320 KiB" in out
        )
        assert "KV: 8,192 blocks x 16 tokens = 131,072 tokens, 320 KiB per token" in out
        assert "2.50 GiB" in out
        assert "16.0 whole contexts" in out


def test_23_what_each_rank_holds_is_shown(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    for degrees, expected in (
        (
            {"tensor_parallel": 4},
            [
                "in float16, weights: 130,560 MiB of layers + 2,004 MiB of output head + 2,004 MiB of embedding = 134,568 MiB",
                "4 ranks (tensor parallel 4, pipeline 1):",
                "  weights in float16: 32.85 GiB a rank, 131.41 GiB in all",
                "  KV of a token: 80 KiB a rank, 320 KiB in all",
            ],
        ),
        (
            {"tensor_parallel": 16, "pipeline": 2, "memory_gib": 10.0},
            [
                "32 ranks (tensor parallel 16, pipeline 2):",
                "  weights in float16: 4.18 GiB a rank, 133.91 GiB in all",
                "  KV of a token: 20 KiB a rank, 640 KiB in all: KV heads are replicated",
                "  10 GiB for KV on each rank hold 524,288 tokens (32,768 blocks)",
            ],
        ),
    ):
        assert run_capacity(str(tmp_path), dtype="float16", **degrees) == 0
        assert capsys.readouterr().out.splitlines()[-len(expected) :] == expected
    with pytest.raises(ConfigError, match="pipeline_parallel_size=0"):
        run_capacity(str(tmp_path), pipeline=0)


def test_23_capacity_refuses_the_degrees_that_a_worker_refuses(tmp_path, capsys):
    """It printed figures for 6 ranks of a model with 9 heads."""
    served = {**LLAMA_3_70B, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 300}
    served["intermediate_size"] = 1536
    for config in (served, {**served, "architectures": ["Unheard"]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for degree in (4, 6):
            with pytest.raises(ConfigError) as error:
                run_capacity(str(tmp_path), tensor_parallel=degree)
            assert str(error.value) == (
                f"tensor_parallel_size={degree}: the model has 9 attention heads (num_attention_heads); "
                "--tensor-parallel-size can be 1, 3"
            )
    assert capsys.readouterr().out == ""


def test_a_quantized_cache_is_counted_with_its_scales(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    assert run_capacity(str(tmp_path), kv_cache_dtype="int8", memory_gib=40.0) == 0
    out = capsys.readouterr().out
    assert (
        "2 (K and V) x 80 layers x 8 KV heads x 128 head dim x 1 bytes (int8) + 1,280 scales x 4 bytes (float32) = "
        "168,960 bytes = 165 KiB" in out
    )
    assert "15,887 blocks x 16 tokens = 254,192 tokens, 165 KiB per token" in out
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        run_capacity(str(tmp_path), kv_cache_dtype="int3")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("quantization", "line", "of_ranks"),
    [
        # 68,451,041,280 weights: half a byte each, and three bytes for each 128 of them
        (
            AWQ,
            "in int4 and bfloat16, weights: 34,170 MiB of layers + 2,004 MiB of output head + 2,004 MiB of embedding = "
            "38,178 MiB",
            "  weights in int4 and bfloat16: 18.64 GiB a rank, 37.28 GiB in all",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            "in fp8 and bfloat16, weights: 65,296 MiB of layers + 2,004 MiB of output head + 2,004 MiB of embedding = "
            "69,304 MiB",
            "  weights in fp8 and bfloat16: 33.84 GiB a rank, 67.68 GiB in all",
        ),
    ],
)
def test_21_quantized_weights_are_counted_with_their_scales(tmp_path, capsys, quantization, line, of_ranks):
    """It said that a worker's log says how many bytes they are."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_70B, "quantization_config": quantization}))
    run_capacity(str(tmp_path), dtype="bfloat16", tensor_parallel=2)
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert of_ranks in lines


def test_21_a_form_of_quantized_weights_that_is_not_served_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_70B, "quantization_config": {**AWQ, "bits": 8}}))
    run_capacity(str(tmp_path), dtype="bfloat16")
    expected = "weights: not counted, since no worker serves them: quantization_config.bits=8: must be 4"
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_small_model_is_shown_in_small_units(tmp_path, capsys):
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    for context, shown in ((64, "64 tokens: 32.00 KiB"), (4096, "4,096 tokens: 2.00 MiB")):
        (tmp_path / "config.json").write_text(json.dumps({**small, "max_position_embeddings": context}))
        run_capacity(str(tmp_path), prefill_rate=2000.0, copy_rate=1.0)
        out = capsys.readouterr().out
        assert f"a whole context of {shown}\n" in out
        assert "= 1.953 MiB/s: a slower link" in out


def test_it_says_when_up_would_take_another_dtype(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    run_capacity(str(tmp_path))
    assert "in the config's bfloat16; `diptych up` serves float32 on a CPU unless --dtype" in capsys.readouterr().out
    run_capacity(str(tmp_path), dtype="bfloat16")
    assert "diptych up" not in capsys.readouterr().out


def test_the_line_a_worker_prints():
    line = capacity_line(full_format(30, 3, 64, block_size=16, dtype="float32"), (18_432,))
    assert line == "KV: 18,432 blocks x 16 tokens = 294,912 tokens, 45 KiB per token"
    kv = windowed_format([512, 512, 0], 1, 64, block_size=16, dtype="float32")
    line = capacity_line(kv, (1_000, 300))
    assert line == (
        "KV: 1,000 blocks of full x 16 tokens = 16,000 tokens, 0.5 KiB per token; window-512: 300 blocks, 1 KiB per token"
    )


def test_a_model_with_windows_is_counted_by_what_its_layers_keep(tmp_path, capsys):
    """Item 17: five layers with a window of 512 to each full one hold less than a quarter at 8,192 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_LIKE))
    kv = cache_of(GEMMA_3_LIKE).kv
    assert [(group.name, group.num_layers) for group in kv.groups] == [("full", 3), ("window-512", 15)]
    run_capacity(str(tmp_path), dtype="float32", memory_gib=4.0)
    out = capsys.readouterr().out
    assert "a sequence of 8,192 tokens holds 63 MiB while it decodes, 22% of what it would without windows" in out
    assert "and at most 78 MiB while its prompt is computed in chunks of 512 tokens" in out
    assert "window-512: 2,144 blocks" in out
    assert "(window blocks for 64 sequences, --max-num-seqs)" in out


@pytest.mark.parametrize(("pipeline", "blocks"), [(2, 58_032), (6, 126_784)])
def test_23_stages_of_a_model_with_windows_are_counted_by_what_their_layers_keep(tmp_path, capsys, pipeline, blocks):
    """Of two stages the second has two full layers and seven with windows; of six, three have windows only."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_LIKE))
    run_capacity(str(tmp_path), dtype="float32", memory_gib=4.0, pipeline=pipeline)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"  KV of a token: {36 // pipeline} KiB a rank, 36 KiB in all",
        f"  4 GiB for KV on each rank hold {16 * blocks:,} tokens ({blocks:,} blocks)",
    ]


def test_windows_of_a_quantized_model_count_whatever_its_format():
    """A format that is not served made every layer count as seeing all tokens."""
    quantized = {**GEMMA_3_LIKE, "quantization_config": {"quant_method": "unheard-of"}}
    assert cache_of(quantized).kv == cache_of(GEMMA_3_LIKE).kv


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 4),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 10, "dtype": "float16"}, 2 * 2 * 40 * 2),
        (
            {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
            2 * 32 * 64 * 4,
        ),
        (
            {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"},
            61 * 576 * 2,
        ),
        ({"text_config": LLAMA_3_70B}, 320 * 1024),
    ],
)
def test_configs_of_other_families(config, size):
    assert cache_of(config).bytes_per_token == size


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3}, "hidden_size"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 10}, "hidden_size"),
        ({**LLAMA_3_70B, "num_key_value_heads": -1}, "num_key_value_heads"),
        ({**LLAMA_3_70B, "torch_dtype": "float4"}, "dtype"),
    ],
)
def test_a_config_without_sense_names_the_field(config, named):
    with pytest.raises(ConfigError, match=named):
        cache_of(config)


def test_the_break_even_is_printed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    run_capacity(str(tmp_path), dtype="float16", prefill_rate=10_000.0, copy_rate=20.0)
    assert "6.104 GiB/s: a slower link never pays" in (out := capsys.readouterr().out)
    assert "at 20 GiB/s: swap from" in out
    run_capacity(str(tmp_path), dtype="float16", prefill_rate=10_000.0, copy_rate=6.0)
    assert "always recompute" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="copy_rate"):
        run_capacity(str(tmp_path), prefill_rate=10.0)


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_no_config_there(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="model"):
        run_capacity(str(tmp_path))


def test_the_weights_line_names_what_is_there_twice():
    line = WeightSizes(layers=405 << 20, head=108 << 20, embedding=108 << 20).line()
    assert line == "weights: 405 MiB of layers + 108 MiB of output head + 108 MiB of embedding = 621 MiB"
    assert "embedding" not in WeightSizes(layers=405 << 20, head=108 << 20, embedding=0).line()
