"""Every feature of a layer's description, on the compiled kernels against plain torch in float64, at every width of vectors; and
the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.kernels.kv_codes import dequantize, quantize
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import build
from diptych_tests.native_layers import GEMMA2, GEMMA3, LLAMA, QWEN3, Features, Layers, Sizes, in_chunks

LENGTH = 61
CLOSE = {"atol": 3e-4, "rtol": 3e-4}
"""Values of about 1; what a feature changes is far above."""
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
FEATURES = {
    "llama": (LLAMA, LLAMA),
    "bias and q/k norm": (QWEN3,),
    "window": (replace(LLAMA, window=9),),
    "softcap": (replace(LLAMA, softcap=0.5),),
    "query scale": (replace(LLAMA, scale=0.9),),
    "post norms": (replace(LLAMA, post_norms=True),),
    "GeGLU": (replace(LLAMA, activation="gelu_tanh"),),
    "rope of each layer": (replace(LLAMA, theta=100.0), replace(LLAMA, theta=1e6, stretch=4.0)),
    "gemma2": GEMMA2,
    "gemma3": (*GEMMA3, GEMMA3[0]),
}


@pytest.fixture(params=ALL_LANES)
def library(request, compiler):
    return Library(build(cache_dir() / "native", compiler, request.param))


@pytest.mark.parametrize("name", FEATURES)
def test_a_layer_is_what_torch_computes(library, name):
    layers = Layers(library, FEATURES[name])
    expected = layers.reference(layers.sequence(LENGTH).x)
    torch.testing.assert_close(in_chunks(layers, 17, LENGTH).output.double(), expected, **CLOSE)


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "llama"])
def test_each_feature_changes_the_result(library, name):
    """Else the test above would not notice that it is ignored."""
    plain = tuple(Features(group=f.group) for f in FEATURES[name])
    some, other = (Layers(library, features) for features in (FEATURES[name], plain))
    for a, b in zip(some.weights, other.weights, strict=True):
        b.update({key: value for key, value in a.items() if key in b})
    x = some.sequence(LENGTH).x
    assert (some.reference(x) - other.reference(x)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "window", "softcap", "gemma2", "gemma3"])
def test_the_bits_are_the_same_in_any_company(library, name):
    layers = Layers(library, FEATURES[name], num_blocks=128)
    alone = in_chunks(layers, 1, LENGTH).output
    for chunk in (2, 5, 32, LENGTH):
        assert torch.equal(in_chunks(layers, chunk, LENGTH).output, alone)
    others = [layers.sequence(length, seed=length) for length in (5, 40, 23, 61)]
    sequence = layers.sequence(LENGTH)
    for index in range(LENGTH):
        beside = [(o, min(3, len(o.x) - o.done)) for o in others if index % 2 and o.done < len(o.x)]
        layers.run(*beside[:2], (sequence, 1), *beside[2:], threads=1 if index % 8 else 3)
    assert torch.equal(sequence.output, alone)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_codes_and_scales_are_those_of_the_reference(library, codes, scale):
    """Bit for bit: K and V of the first layer, as a pool of floats has them."""
    some, other = (Layers(library, (LLAMA,), codes=kind) for kind in (None, codes))
    for layers in (some, other):
        layers.weights[0]["qkv"].mul_(scale)
        layers.weights[0]["qkv"][100] *= 0.0
        layers._model = layers.make_model()
    floats, quantized = (layers.kept(in_chunks(layers, 17, LENGTH), 0) for layers in (some, other))
    assert torch.equal(quantized, dequantize(*quantize(floats, codes)))
    assert not torch.equal(quantized, floats)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("name", ["llama", "window", "softcap", "gemma3"])
def test_attention_reads_codes_as_the_reference_does(library, codes, name):
    layers = Layers(library, FEATURES[name], codes=codes)
    for chunk in (1, 17, LENGTH):
        sequence = in_chunks(layers, chunk, LENGTH)
        kept = [layers.kept(sequence, i) for i in range(len(layers.features))]
        torch.testing.assert_close(sequence.output.double(), layers.reference(sequence.x, kept), **CLOSE)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("name", ["llama", "window", "gemma2"])
def test_quantized_kv_gives_the_same_bits_in_any_company(library, codes, name):
    layers = Layers(library, FEATURES[name], num_blocks=128, codes=codes)
    numbers = range(len(layers.features))
    alone = in_chunks(layers, 1, LENGTH)
    kept = [layers.kept(alone, i).clone() for i in numbers]
    for chunk in (2, 5, 32, LENGTH):
        some = in_chunks(layers, chunk, LENGTH)
        assert torch.equal(some.output, alone.output)
        assert all(torch.equal(layers.kept(some, i), kept[i]) for i in numbers)
    others = [layers.sequence(length, seed=length) for length in (5, 40, 23, 61)]
    sequence = layers.sequence(LENGTH)
    for index in range(LENGTH):
        beside = [(o, min(3, len(o.x) - o.done)) for o in others if index % 2 and o.done < len(o.x)]
        layers.run(*beside[:2], (sequence, 1), *beside[2:], threads=1 if index % 8 else 3)
    assert torch.equal(sequence.output, alone.output)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_head_that_is_not_finite_is_nan_in_the_pool(library, codes):
    layers = Layers(library, (LLAMA,), codes=codes)
    sequence = layers.sequence(9)
    sequence.x[4, 3] = float("inf")
    layers.run((sequence, 9))
    kept = layers.kept(sequence, 0)
    assert kept[:, 4].isnan().all()
    assert not kept[:, :4].isnan().any()
    assert not kept[:, 5:].isnan().any()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 4), (1, 1), (12, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_heads_of_every_size(library, heads, kv_heads, head_dim):
    sizes = Sizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=64, ffn=64)
    layers = Layers(library, GEMMA2, sizes)
    expected = layers.reference(layers.sequence(LENGTH).x)
    for chunk in (1, 30):
        torch.testing.assert_close(in_chunks(layers, chunk, LENGTH).output.double(), expected, **CLOSE)


def test_the_least_heads_of_a_width(library):
    sizes = Sizes(head_dim=max(library.panel, 2 * library.lanes), hidden=library.lanes, ffn=library.panel)
    layers = Layers(library, GEMMA3, sizes)
    expected = layers.reference(layers.sequence(LENGTH).x)
    torch.testing.assert_close(in_chunks(layers, 7, LENGTH).output.double(), expected, **CLOSE)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 33, 60, 61, 100])
def test_nothing_before_the_window_is_read(library, window):
    """Blocks there may be another's by now: the tables name one of NaN."""
    layers = Layers(library, (replace(LLAMA, window=window),))
    expected = layers.reference(layers.sequence(LENGTH).x)
    for chunk in (1, 13, 40):
        torch.testing.assert_close(in_chunks(layers, chunk, LENGTH).output.double(), expected, **CLOSE)


def test_scores_of_any_size_are_capped_as_torch_does(library):
    for cap in (0.5, 30.0, 50.0):
        values = torch.cat(
            [torch.linspace(-1e-3, 1e-3, 101), torch.linspace(-200, 200, 1003), torch.tensor([1e30, -1e30])]
        )
        expected = cap * torch.tanh(values.double() / cap)
        for count in (1, 15, 16, 17, len(values)):
            capped = values[:count].clone()
            library.softcap(capped, cap)
            torch.testing.assert_close(capped.double(), expected[:count], atol=1e-37, rtol=5e-7)
    nan = torch.full((3,), float("nan"))
    library.softcap(nan, 2.0)
    assert nan.isnan().all()


def test_a_nan_is_never_hidden(library):
    """Of a value that enters: a row computed from it is NaN, and its neighbours are not."""
    for features in (LLAMA, *GEMMA3):
        layers = Layers(library, (replace(features, group=0),))
        bad, good = layers.sequence(9, seed=1), layers.sequence(9, seed=2)
        bad.x[4, 3] = float("nan")
        layers.run((bad, 9), (good, 9))
        assert bad.output[4].isnan().all()
        assert not good.output.isnan().any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "gelu"}, "its activation is gelu"),
        ({"head_dim": 12}, "head_dim 12 is no multiple of"),
        ({"head_dim": 288}, "head_dim 288 is above 256"),
        ({"hidden": 66}, "hidden_size 66 is no multiple of"),
        ({"ffn": 66}, "intermediate_size 66 is no multiple of"),
    ],
)
def test_a_layer_that_cannot_be_computed_is_named(library, change, words):
    sizes = {"hidden": 96, "ffn": 160, "head_dim": 32, "activation": "gelu_tanh"}
    assert library.misfit(**sizes) is None
    assert words in library.misfit(**{**sizes, **change})
