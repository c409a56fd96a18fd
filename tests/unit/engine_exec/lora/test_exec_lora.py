"""Adapters in the linear layers: what a row's adapter adds, over every method, and what does not fit the model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from diptych.common.adapters.peft import read_adapter
from diptych.common.errors import AdapterError, ConfigError, InternalError
from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import Linear, Part, ShardBy
from diptych.engine.exec.lora import LayerAdapter, LoraLinear, LoraModel, LoraSizes, LoraSlots, lora_delta, slot_bytes
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes, merge_adapter, write_adapter

PROMPTS = [[5, 9, 17, 250, 31, 8, 77, 120, 3], [44, 12, 90], [200, 201, 202, 203, 9, 9], [7, 300, 11, 2, 5]]


def kept(driver, folder, slot):
    facts = read_adapter(folder)
    adapter = driver.runner.read_adapter(folder, facts)
    driver.runner.install_adapter(slot, adapter)
    return adapter


@pytest.fixture
def adapters(model_dir_of, tmp_path):
    """A model, and three adapters: of some modules and a low rank; of all, with several ranks and rsLoRA; of one."""
    model = model_dir_of("LlamaForCausalLM")
    folders = [
        write_adapter(tmp_path / "some", linear_shapes(model, ("q_proj", "v_proj", "down_proj")), rank=3, seed=1),
        write_adapter(
            tmp_path / "all", linear_shapes(model), rank=4, seed=2, use_rslora=True,
            ranks=lambda name: 8 if "o_proj" in name else 2 if "up" in name else 4, size=0.2,
        ),
        write_adapter(tmp_path / "one", linear_shapes(model, ("layers.1.mlp.gate_proj",)), rank=1, seed=3, alpha=3, size=1.0),
    ]  # fmt: skip
    return model, folders


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_rows_of_one_batch_have_the_results_of_merged_weights(adapters, driver_of, tmp_path, compiler, backend):
    model, folders = adapters
    driver = driver_of(model, backend=backend, max_loras=3, max_lora_rank=8)
    plain = driver_of(model, backend=backend).in_one_batch(PROMPTS[:1], [-1])
    for slot, folder in zip((2, 0, 1), folders, strict=True):
        kept(driver, folder, slot)
    ids, logprobs = driver.in_one_batch(PROMPTS, [2, 0, -1, 1])
    for i, folder in ((0, folders[0]), (1, folders[1]), (3, folders[2])):
        merged = driver_of(merge_adapter(model, folder, tmp_path / f"merged{i}"), backend=backend)
        expected, known = merged.in_one_batch(PROMPTS[i : i + 1], [-1])
        assert ids[i] == expected[0]
        np.testing.assert_allclose(logprobs[i], known[0], atol=2e-4)
    untouched = driver_of(model, backend=backend).in_one_batch(PROMPTS[2:3], [-1])
    np.testing.assert_allclose(logprobs[2], untouched[1][0], atol=1e-5)
    assert np.abs(logprobs[0] - plain[1][0]).max() > 1e-2, "the adapters change something"
    if backend == "native":
        for i, slot in enumerate([2, 0, -1, 1]):
            alone, same = driver.in_one_batch(PROMPTS[i : i + 1], [slot])
            assert alone[0] == ids[i]
            assert np.array_equal(same[0], logprobs[i]), "in any company"
        assert np.array_equal(untouched[1][0], logprobs[2])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("method", ["bfloat16", "int8"])
def test_the_compiled_layers_add_adapters_over_other_weights(adapters, driver_of, method):
    """Near torch's numbers, and the same bits in any company."""
    model, folders = adapters
    how = {"dtype": "bfloat16"} if method == "bfloat16" else {}
    if method == "int8":
        quantized.quantize_folder(model, quantized.COMPRESSED_INT8, quantized.int8_rows)
    slots, numbers = [1, -1, 0, 1], []
    for backend in ("torch", "native"):
        driver = driver_of(model, backend=backend, max_loras=2, max_lora_rank=8, **how)
        for slot in (0, 1):
            kept(driver, folders[slot], slot)
        numbers.append(driver.in_one_batch(PROMPTS, slots, count=1)[1])
    np.testing.assert_allclose(numbers[1], numbers[0], atol=0.1)
    ids, logprobs = driver.in_one_batch(PROMPTS, slots)
    for i, slot in enumerate(slots):
        alone, same = driver.in_one_batch(PROMPTS[i : i + 1], [slot])
        assert alone[0] == ids[i]
        assert np.array_equal(same[0], logprobs[i])


def test_a_slot_holds_nothing_of_its_former_adapter(adapters, driver_of):
    model, folders = adapters
    driver = driver_of(model, backend="torch", max_loras=1, max_lora_rank=8)
    fresh = driver_of(model, backend="torch", max_loras=1, max_lora_rank=8)
    kept(driver, folders[1], 0)
    kept(driver, folders[2], 0)
    kept(fresh, folders[2], 0)
    assert driver.in_one_batch(PROMPTS, [0] * 4)[0] == fresh.in_one_batch(PROMPTS, [0] * 4)[0]
    for (_, slots), (_, other) in zip(driver.runner._lora._layers, fresh.runner._lora._layers, strict=True):
        assert torch.equal(slots.a, other.a)
        assert torch.equal(slots.b, other.b)


def test_an_adapter_fits_over_a_method_that_is_not_plain():
    """MethodLinear and its like return what the wrapper adds to; rows without an adapter are left as they are."""
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 5, generator=rng)
    slots = LoraSlots((3, 4), 5, LoraSizes(2, 4), torch.empty(0))
    a, b = torch.randn(2, 2, 5, generator=rng), torch.randn(7, 2, generator=rng)
    slots.install(1, LayerAdapter(a, b, (2, 2)))
    layer = LoraLinear(lambda x, step: x @ weight.T, slots)
    x = torch.randn(6, 5, generator=rng)
    rows = torch.tensor([1, -1, 0, 1, -1, 1], dtype=torch.int32)
    out = layer(x, StepRows(rows))
    plain = x @ weight.T
    expected = plain.clone()
    for row in (0, 3, 5):
        expected[row] += torch.cat([b[:3] @ (a[0] @ x[row]), b[3:] @ (a[1] @ x[row])])
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[[1, 2, 4]], plain[[1, 2, 4]]), "without an adapter, and of an empty slot"
    assert torch.equal(layer(x, PLAIN_ROWS), plain)


def test_shards_add_up_to_the_whole_layer(model_dir_of, tmp_path):
    """A layer that is divided by outputs, one by inputs: each rank reads its part of A and B."""
    by_outputs = Linear((Part("l.q_proj", 12, 4), Part("l.k_proj", 6, 2, kv=True)), 8, shard=ShardBy.OUTPUTS)
    by_inputs = Linear((Part("l.o_proj", 8),), 12, shard=ShardBy.INPUTS)
    folder = write_adapter(tmp_path / "a", {"l.q_proj": (12, 8), "l.k_proj": (6, 8), "l.o_proj": (8, 12)}, rank=3)
    facts, sizes = read_adapter(folder), LoraSizes(1, 4)

    def deltas(shard, x, y):
        model = LoraModel(sizes, shard)
        slots = [model.add(layer, torch.empty(0)) for layer in (by_outputs, by_inputs)]
        model.install(0, model.read(folder, facts))
        columns = slice(None) if shard.degree == 1 else slice(6 * shard.rank, 6 * shard.rank + 6)
        return lora_delta(x, slots[0], 0), lora_delta(y[:, columns], slots[1], 0), model.num_bytes

    x, y = torch.randn(3, 8), torch.randn(3, 12)
    whole, summed, size = deltas(Shard(), x, y)
    parts = [deltas(Shard(rank, 2), x, y) for rank in (0, 1)]
    q, k = (torch.cat([part[0][:, rows] for part in parts], 1) for rows in (slice(0, 6), slice(6, 9)))
    torch.testing.assert_close(torch.cat((q, k), 1), whole)
    torch.testing.assert_close(parts[0][1] + parts[1][1], summed)
    assert size == 4 * (4 * (2 * 8 + 18) + 4 * (12 + 8))
    assert all(part[2] < size for part in parts)


def test_bfloat16_multiplies_the_scale_before_it_rounds(tmp_path):
    layer = Linear((Part("l.o_proj", 8),), 12)
    folder = write_adapter(tmp_path / "a", {"l.o_proj": (8, 12)}, rank=3, alpha=5.0)
    model = LoraModel(LoraSizes(1, 4))
    slots = model.add(layer, torch.empty(0, dtype=torch.bfloat16))
    model.install(0, model.read(folder, read_adapter(folder)))
    exact = LoraModel(LoraSizes(1, 4))
    known = exact.add(layer, torch.empty(0))
    exact.install(0, exact.read(folder, read_adapter(folder)))
    assert torch.equal(slots.b, known.b.bfloat16())
    assert torch.equal(slots.a, known.a.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "alpha"), [("float32", 1e38), ("bfloat16", 1e38), ("float16", 3e5), ("float32", 1e308)]
)
def test_a_scale_that_makes_b_infinite_is_refused_at_the_load(tmp_path, dtype, alpha):
    """Every token of such an adapter was one without a number, and answers ended at once, with success."""
    folder = write_adapter(tmp_path / "a", {"l.o_proj": (8, 12)}, rank=1, alpha=alpha, size=8.0)
    model = LoraModel(LoraSizes(1, 4))
    model.add(Linear((Part("l.o_proj", 8),), 12), torch.empty(0, dtype=getattr(torch, dtype)))
    with pytest.raises(
        AdapterError, match=rf"B of l\.o_proj times its scale, .*, is not finite in torch\.{dtype}"
    ) as error:
        model.read(folder, read_adapter(folder))
    assert error.value.param == "lora_alpha"


def test_an_a_that_half_precision_does_not_hold_is_refused_by_its_name(tmp_path):
    folder = write_adapter(tmp_path / "a", {"l.o_proj": (8, 12)}, rank=1, alpha=1e-9, size=1e6)
    halves, floats = LoraModel(LoraSizes(1, 4)), LoraModel(LoraSizes(1, 4))
    for model, dtype in ((halves, torch.float16), (floats, torch.float32)):
        model.add(Linear((Part("l.o_proj", 8),), 12), torch.empty(0, dtype=dtype))
    floats.read(folder, facts := read_adapter(folder))
    name = "base_model.model.l.o_proj.lora_A.weight"
    with pytest.raises(AdapterError, match=r"lora_A\.weight holds numbers that torch\.float16 does not") as error:
        halves.read(folder, facts)
    assert error.value.param == name


def test_what_does_not_fit_the_model_is_refused_with_the_numbers(adapters, driver_of, model_dir_of, tmp_path):
    model, folders = adapters
    runner = driver_of(model, backend="torch", max_loras=1, max_lora_rank=4).runner
    facts = read_adapter(folders[0])
    with pytest.raises(AdapterError, match="rank 8 of .*o_proj is above the maximum of 4"):
        runner.read_adapter(folders[1], read_adapter(folders[1]))
    narrow = write_adapter(tmp_path / "narrow", {"model.layers.0.self_attn.q_proj": (192, 95)})
    with pytest.raises(AdapterError, match="95 inputs and 192 outputs in the adapter, 96 and 192 in the model"):
        runner.read_adapter(narrow, read_adapter(narrow))
    beyond = write_adapter(tmp_path / "beyond", {"model.layers.3.self_attn.q_proj": (192, 96)})
    with pytest.raises(AdapterError, match=r"the model has no linear layer model\.layers\.3\.self_attn\.q_proj"):
        runner.read_adapter(beyond, read_adapter(beyond))
    with pytest.raises(AdapterError, match=f"holds the adapter {facts.id}, not {'0' * 32}"):
        runner.read_adapter(folders[0], dataclasses.replace(facts, id="0" * 32))
    without = driver_of(model, backend="torch").runner
    assert (without.capabilities.max_loras, without.capabilities.max_lora_rank) == (0, 0)
    with pytest.raises(AdapterError, match="keeps no adapters"):
        without.read_adapter(folders[0], facts)
    with pytest.raises(InternalError, match="was not read by this runner"):
        without.install_adapter(0, runner.read_adapter(folders[0], facts))
    for fields, name in (({"max_loras": -1}, "max_loras"), ({"max_loras": 1, "max_lora_rank": 65}, "max_lora_rank")):
        with pytest.raises(ConfigError) as error:
            driver_of(model, **fields)
        assert error.value.field == name


def test_the_memory_of_slots_is_known_before_they_are_made(adapters, driver_of):
    model, _ = adapters
    runner = driver_of(model, backend="torch", max_loras=3, max_lora_rank=8).runner
    assert runner.weight_sizes.adapters == slot_bytes(runner.description, LoraSizes(3, 8), 4) > 0
    assert "of slots for adapters" in runner.weight_sizes.line()
    assert driver_of(model, backend="torch").runner.weight_sizes.adapters == 0
