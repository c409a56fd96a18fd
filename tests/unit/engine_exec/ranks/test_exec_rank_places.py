"""Which part of a model a rank has, what cannot be divided, and how a step is cut for a pipeline."""

from __future__ import annotations

import random

import pytest

from diptych.common import kv_parts
from diptych.common.errors import ConfigError
from diptych.engine.exec.backends.base import make_plan
from diptych.engine.exec.backends.torch import TorchBackend
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import names_elsewhere
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.micro_batches import cut_step, micro_batches_of
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace, local_description
from diptych_tests.quantized import GPTQ
from diptych_tests.rank_threads import places

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {**SMOLLM2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}


def test_a_rank_computes_its_heads_columns_and_layers():
    local = local_description(describe(SMOLLM2), RankPlace(4, tensor_parallel=3, pipeline=2))
    attention, mlp = local.blocks[0].attention, local.blocks[0].mlp
    assert (local.num_layers, local.blocks[0].attention_norm.name) == (15, "model.layers.15.input_layernorm")
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (3, 1, 64)
    assert [(part.outputs, part.heads) for part in attention.qkv.parts] == [(192, 3), (64, 1), (64, 1)]
    assert (attention.qkv.inputs, attention.o.inputs, attention.o.outputs) == (576, 192, 576)
    assert (mlp.size, mlp.gate_up.outputs, mlp.down.outputs) == (512, 1024, 576)
    assert (local.head.linear.outputs, local.vocab_size) == (16384, 49152)


def test_the_parts_of_all_ranks_are_the_model():
    model = describe(LLAMA)
    for tensor_parallel, pipeline in ((1, 1), (2, 1), (8, 1), (1, 7), (4, 3)):
        parts = [local_description(model, place) for place in places(tensor_parallel, pipeline)]
        assert sum(part.layer_weights for part in parts) >= model.layer_weights
        if tensor_parallel <= 2:  # with more ranks than KV heads some have the same ones
            assert sum(part.layer_weights for part in parts) == model.layer_weights
        firsts = [part.blocks[0].attention_norm.name for part in parts[::tensor_parallel]]
        assert len(set(firsts)) == pipeline
        assert sum(part.num_layers for part in parts[::tensor_parallel]) == 30
        kv = kv_format_of(model, block_size=8)
        own = [place.part(kv) for place in places(tensor_parallel, pipeline)]
        assert own == list(kv_parts.split(kv, tensor_parallel=tensor_parallel, pipeline=pipeline))
        assert [part.num_layers for part in parts] == [part.num_layers for part in own]
        assert {
            (part.num_kv_heads, one.groups[0].heads_per_rank(one.shard)) for part, one in zip(parts, own, strict=True)
        } == {(max(1, 2 // tensor_parallel), max(1, 2 // tensor_parallel))}
    assert local_description(model, WHOLE_PLACE) is model


def test_who_samples_and_who_embeds():
    found = [(one.stage, one.shard.rank, one.first_stage, one.last_stage, one.samples) for one in places(2, 2)]
    assert found == [
        (0, 0, True, False, False), (0, 1, True, False, False), (1, 0, False, True, True), (1, 1, False, True, False),
    ]  # fmt: skip
    segments = [
        [(s.first, s.last, s.embedding, s.head, s.has_last_layer) for _, s in plan.segments()]
        for place in places(1, 3)
        for plan in [
            make_plan(
                describe(LLAMA), place.part(kv_format_of(describe(LLAMA), block_size=8)), [TorchBackend()], place=place
            )
        ]
    ]
    assert segments == [[(0, 10, True, False, False)], [(0, 10, False, False, False)], [(0, 10, False, True, True)]]


def test_a_stage_leaves_the_tensors_of_others():
    tied, loose = describe(SMOLLM2), describe(LLAMA)
    first, last = RankPlace(0, pipeline=2), RankPlace(1, pipeline=2)
    assert {"model.norm", "lm_head", "model.layers.15.mlp.down_proj"} < set(names_elsewhere(loose, first))
    assert "model.layers.14.mlp.down_proj" not in names_elsewhere(loose, first)
    assert "model.embed_tokens" in names_elsewhere(loose, last)
    assert "model.embed_tokens" not in names_elsewhere(tied, last), "it is the head's weight"
    assert names_elsewhere(loose, RankPlace(1, tensor_parallel=2)) == []


@pytest.mark.parametrize(
    ("fields", "degrees", "field", "message"),
    [
        ({}, (2, 1), "tensor_parallel_size",
         "the model has 9 attention heads (num_attention_heads); --tensor-parallel-size can be 1, 3"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1538}, (4, 1), "tensor_parallel_size",
         "the model's MLP has 1,538 columns (intermediate_size); --tensor-parallel-size can be 1, 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, (6, 1), "tensor_parallel_size",
         "the model has 4 KV heads (num_key_value_heads), which can be neither divided nor replicated evenly; "
         "--tensor-parallel-size can be 1, 2, 4, 12"),
        ({"vocab_size": 49153}, (3, 1), "tensor_parallel_size",
         "the model has 49,153 tokens (vocab_size); --tensor-parallel-size can be 1"),
        ({}, (1, 31), "pipeline_parallel_size", "the model has 30 layers; --pipeline-parallel-size can be 1 to 30"),
        ({}, (0, 1), "tensor_parallel_size", "must be at least 1"),
        ({}, (1, -2), "pipeline_parallel_size", "must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_by_name_with_the_numbers(fields, degrees, field, message):
    with pytest.raises(ConfigError) as error:
        local_description(describe({**SMOLLM2, **fields}), RankPlace(0, *degrees))
    assert (error.value.field, error.value.value) == (field, next(degree for degree in degrees if degree != 1))
    assert error.value.rule == message


def test_a_quantized_layer_whose_scales_would_be_cut_is_refused_before_weights_are_read():
    sizes = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024 + 64, "head_dim": 64}
    model = describe({**sizes, "quantization_config": {**GPTQ, "group_size": 64}})
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel_size=2: model\.layers\.0\.mlp\.down_proj is cut at multiples of 64.*; "
        "--tensor-parallel-size can be 1$",
    ):
        local_description(model, RankPlace(1, 2))
    whole = describe({**sizes, "intermediate_size": 1024, "quantization_config": {**GPTQ, "group_size": 64}})
    assert local_description(whole, RankPlace(1, 2)).blocks[0].mlp.size == 512


def test_a_rank_outside_the_degrees_is_refused():
    with pytest.raises(ConfigError, match=r"rank=4: must be in \[0, 4\)"):
        RankPlace(4, 2, 2)


def cut(rows, count, whole=()):
    return [[(piece.index, piece.first, piece.end) for piece in part] for part in cut_step(rows, count, whole)]


def test_a_step_is_cut_into_pieces_with_like_numbers_of_rows():
    single = [(i, 0, 1) for i in range(8)]
    assert cut([1] * 8, 4) == [single[:2], single[2:4], single[4:6], single[6:]]
    assert cut([1], 4) == [[(0, 0, 1)]]
    assert cut([100, 1, 1, 1, 1], 2) == [[(0, 0, 52)], [(0, 52, 100), *((i, 0, 1) for i in range(1, 5))]]
    assert cut([100, 1, 1], 2, [True, True, True]) == [[(0, 0, 100)], [(1, 0, 1), (2, 0, 1)]]
    assert cut([40, 40], 2) == [[(0, 0, 40)], [(1, 0, 40)]]
    assert cut([60, 20], 2) == [[(0, 0, 60)], [(1, 0, 20)]], "a piece would be too small"
    rng = random.Random(3)
    for _ in range(300):
        rows = [rng.choice([1, 1, 1, 17, 300]) for _ in range(rng.randint(1, 12))]
        whole = [rng.random() < 0.2 for _ in rows]
        count = rng.randint(1, 5)
        cuts = cut_step(rows, count, whole)
        found = {i: [(p.first, p.end) for part in cuts for p in part if p.index == i] for i in range(len(rows))}
        for i, size in enumerate(rows):
            assert [at for pair in found[i] for at in pair][:: len(found[i]) * 2 - 1] == [0, size]
            assert all(a[1] == b[0] for a, b in zip(found[i], found[i][1:], strict=False))
            assert len(found[i]) == 1 or not whole[i]
        assert len(cuts) <= count
        largest = max([size for size, stays in zip(rows, whole, strict=True) if stays] + [64])
        assert max(sum(p.end - p.first for p in part) for part in cuts) <= sum(rows) / count + largest


def test_a_step_is_cut_where_a_stage_would_not_take_as_long_for_a_part_of_it():
    assert [micro_batches_of(rows, 2, "cpu") for rows in (1, 127, 128, 256, 512, 9999)] == [1, 1, 2, 4, 8, 8]
    assert [micro_batches_of(rows, 4, "cuda") for rows in (1, 64, 512, 2048, 9999)] == [1, 1, 2, 8, 16]
    assert micro_batches_of(9999, 1, "cpu") == 1
