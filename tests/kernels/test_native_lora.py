"""Adapters on the compiled kernels, at every width of vectors: against torch in float64, and the same bits in any company."""

from __future__ import annotations

import weakref

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.engine.exec.lora import LayerAdapter, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.methods.quantized import GgufParts, GgufWeights
from diptych.engine.exec.native.lora import PackedAdapter, PackedSlots
from diptych.engine.exec.native.weights import Packer
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import build
from diptych_tests.native_layers import GEMMA2, LLAMA, QWEN3, Exact, Layers, dense_delta, in_chunks, packed_slots

LENGTH = 41
SLOTS = 4
CLOSE = {"atol": 3e-4, "rtol": 3e-4}
FEATURES = {"llama": (LLAMA, LLAMA), "biases": (QWEN3,), "post norms": GEMMA2}


@pytest.fixture(params=ALL_LANES)
def library(request, compiler):
    return Library(build(cache_dir() / "native", compiler, request.param))


def made(library, name="llama", method="plain"):
    codes = torch.bfloat16 if method == "bfloat16" else None
    return Layers(library, FEATURES[name], num_blocks=128, method=method, codes=codes, loras=SLOTS)


@pytest.mark.parametrize("name", FEATURES)
def test_layers_with_an_adapter_are_what_torch_computes(library, name):
    layers = made(library, name)
    base = in_chunks(layers, 17, LENGTH).output.double()
    for slot in range(SLOTS):
        expected = layers.reference(layers.sequence(LENGTH).x, slot=slot)
        torch.testing.assert_close(in_chunks(layers, 17, LENGTH, slot=slot).output.double(), expected, **CLOSE)
        assert (expected - base).abs().max() > 0.5
    torch.testing.assert_close(base, layers.reference(layers.sequence(LENGTH).x), **CLOSE)


@pytest.mark.parametrize("method", ["bfloat16", "int8", "int4"])
def test_on_top_of_other_weights_they_are_near_it(library, method):
    """A value beside a border between two codes falls to either side."""
    layers = made(library, method=method)
    for slot in range(SLOTS):
        sequence = in_chunks(layers, 17, LENGTH, slot=slot)
        expected, without = layers.reference(sequence.x, slot=slot), layers.reference(sequence.x)
        assert (sequence.output.double() - expected).norm() / expected.norm() < 0.02
        assert (expected - without).norm() / expected.norm() > 0.1


@pytest.mark.parametrize("method", ["plain", "bfloat16", "int8", "int4"])
def test_the_bits_are_the_same_in_any_company(library, method):
    """Of rows with and without an adapter: alone, in chunks of any size, beside rows with others, at any number of threads."""
    layers = made(library, method=method)
    alone = {slot: in_chunks(layers, 1, LENGTH, slot=slot).output for slot in (-1, 0, 3)}
    for slot, expected in alone.items():
        for chunk in (5, LENGTH):
            assert torch.equal(in_chunks(layers, chunk, LENGTH, slot=slot).output, expected)
    sequences = [layers.sequence(LENGTH) for _ in range(5)]
    for sequence, slot in zip(sequences, (3, -1, 0, 0, 3), strict=True):
        sequence.slot = slot
    for index in range(LENGTH):
        some = sequences if index % 2 else sequences[::-1]
        layers.run(*((one, min(1 + i % 3, LENGTH - one.done)) for i, one in enumerate(some) if one.done < LENGTH),
                   threads=1 if index % 3 else 3)  # fmt: skip
        if all(one.done == LENGTH for one in sequences):
            break
    for sequence in sequences:
        assert torch.equal(sequence.output, alone[sequence.slot])


def test_a_step_without_adapters_has_the_bits_of_layers_without_slots(library):
    layers = made(library)
    plain = Layers(library, FEATURES["llama"])
    for some, other in zip(plain.weights, layers.weights, strict=True):
        some.update(other)
    plain._model = plain.make_model()
    assert torch.equal(in_chunks(layers, 17, LENGTH).output, in_chunks(plain, 17, LENGTH).output)


def loaded_slots(layers, inputs, *, parts=(32, 16, 16), max_rank=16):
    slots = LoraSlots(parts, inputs, LoraSizes(3, max_rank), torch.empty(0))
    for slot, ranks in enumerate([(max_rank, 1, 0), (0, 0, 7)]):
        a, b = torch.randn(len(parts), max(ranks), inputs), torch.randn(sum(parts), max(ranks))
        for part, rank in enumerate(ranks):
            a[part, rank:] = 0.0
        slots.install(slot, LayerAdapter(a.bfloat16().float(), b, ranks))
    return slots


@pytest.mark.parametrize("inputs", [8, 33, 96])
def test_a_layer_of_any_width_adds_what_its_rows_adapters_say(library, inputs):
    torch.manual_seed(0)
    weight, x = torch.randn(64, inputs), torch.randn(37, inputs)
    slots = loaded_slots(library, inputs)
    linear = Packer(library)(PlainWeights(weight, None))
    changed = linear.with_lora(packed_slots(library, slots))
    rows = torch.arange(37, dtype=torch.int32) % 4 - 1
    out = changed(x, StepRows(rows))
    for slot in range(3):
        mine = rows == slot
        expected = x[mine].double() @ (weight.double() + dense_delta(slots, slot)).T
        torch.testing.assert_close(out[mine].double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[rows < 0], linear(x, PLAIN_ROWS)[rows < 0])
    assert torch.equal(changed(x, PLAIN_ROWS), linear(x, PLAIN_ROWS))


def test_what_is_installed_in_a_slot_is_seen_at_once_and_nothing_of_the_one_before_is_left(library):
    torch.manual_seed(0)
    weight, x, slots = torch.randn(64, 96), torch.randn(2, 96), loaded_slots(library, 96)
    packed = packed_slots(library, slots)
    linear = Packer(library)(PlainWeights(weight, None)).with_lora(packed)
    rows = StepRows(torch.zeros(2, dtype=torch.int32))
    before = linear(x, rows)
    other = LayerAdapter(torch.randn(3, 2, 96), torch.randn(64, 2), (2, 2, 2))
    slots.install(0, other)
    packed.install(0, packed.pack(other, Exact()))
    after = linear(x, rows)
    expected = x.double() @ (weight.double() + dense_delta(slots, 0)).T
    torch.testing.assert_close(after.double(), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, after)
    packed.install(0, None)
    assert torch.equal(linear(x, rows), linear(x, PLAIN_ROWS))


def test_an_adapter_lives_as_long_as_a_slot_points_to_it(library):
    slots = loaded_slots(library, 96)
    packed = packed_slots(library, slots)
    adapter = packed.pack(LayerAdapter(torch.randn(3, 2, 96), torch.randn(64, 2), (2, 2, 2)), Exact())
    memory = [weakref.ref(part.untyped_storage()) for part in (adapter.a, adapter.b)]
    for slot in (1, 2):
        packed.install(slot, adapter)
    del adapter
    packed.install(1, None)
    assert all(part() is not None for part in memory)
    packed.install(2, None)
    assert all(part() is None for part in memory)


def test_values_that_bfloat16_has_are_kept_in_it_with_the_same_bits(library):
    """Of A and of B by itself: B times a scale that is no power of two needs floats."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 33), torch.randn(9, 33)
    rows = StepRows(torch.arange(9, dtype=torch.int32) % 2)
    exact_a, exact_b = torch.randn(3, 5, 33).bfloat16().float(), torch.randn(64, 5).bfloat16().float()
    out = []
    for a, b, size in (
        (exact_a, exact_b, 2 + 2), (exact_a, exact_b * 1.1, 2 + 4), (exact_a * 1.1, exact_b, 4 + 2)
    ):  # fmt: skip
        packed = PackedSlots(library.lanes, (32, 16, 16), 33, LoraSizes(2, 5), torch.float32)
        adapter = packed.pack(LayerAdapter(a, b, (5, 5, 5)), Exact())
        assert adapter.a.itemsize + adapter.b.itemsize == size
        packed.install(0, adapter)
        packed.install(1, PackedAdapter(*(part.float() for part in (adapter.a, adapter.b)), adapter.ranks))
        out.append(Packer(library)(PlainWeights(weight, None)).with_lora(packed)(x, rows))
        both = Packer(library)(PlainWeights(weight, None)).with_lora(packed)(x[:1].repeat(9, 1), rows)
        assert torch.equal(both[0], both[1]), "of bfloat16 and of floats"
    assert not torch.equal(out[0], out[1])


def test_parts_in_several_formats_have_one_adapter(library):
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (64, 3, 34), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    parts = [GgufWeights("Q8_0", part.flatten(1), None) for part in blocks.split([32, 16, 16])]
    slots, x, rows = loaded_slots(library, 96), torch.randn(5, 96), torch.tensor([0, -1, 1, 1, 0], dtype=torch.int32)
    linear = Packer(library)(GgufParts(tuple(parts)))
    added = linear.with_lora(packed_slots(library, slots))(x, StepRows(rows)) - linear(x, PLAIN_ROWS)
    expected = torch.stack(
        [x[i].double() @ dense_delta(slots, s).T if s >= 0 else torch.zeros(64) for i, s in enumerate(rows.tolist())]
    )
    torch.testing.assert_close(added.double(), expected.double(), atol=1e-4, rtol=1e-4)
