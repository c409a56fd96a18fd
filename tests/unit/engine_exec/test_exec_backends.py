"""Descriptions, and the back ends that run them: which block goes to whom, and several in one step."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat, KvGroup, KvKind, Shard, full_format
from diptych.engine.exec.backends.base import make_plan
from diptych.engine.exec.backends.native import NativeBackend
from diptych.engine.exec.backends.torch import TorchBackend
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead
from diptych.engine.exec.layers.linear import Linear, Part, ShardBy
from diptych.engine.exec.layers.mlp import Mlp
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope
from diptych.engine.exec.methods.base import PLAIN_ROWS, WHOLE, cut_out
from diptych.engine.exec.methods.plain import PlainMethod
from diptych.engine.exec.models import parts
from diptych.engine.exec.models.registry import ARCHITECTURES, describe
from diptych.engine.exec.native.library import load_library

RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


KV = full_format(6, 2, 8, block_size=8, dtype="float32")


class Picky(TorchBackend):
    """Refuses what the test says."""

    name = "picky"

    def __init__(self, refused):
        self.refused = refused

    def refusal(self, block, kv):
        return "not to its taste" if self.refused(block) else None


def layer_is(*indices):
    names = [f"model.layers.{i}.input_layernorm" for i in indices]
    return lambda block: isinstance(block, DecoderBlock) and block.attention_norm.name in names


def test_the_next_back_end_takes_what_one_refuses():
    model, torch_backend = describe(RAW), TorchBackend()
    plan = make_plan(model, KV, [Picky(layer_is(2, 5)), torch_backend])
    assert [owner.name for owner in plan.block_owners] == ["picky", "picky", "torch", "picky", "picky", "torch"]
    assert plan.summary() == "picky (embedding, layers 0-1 and 3-4), torch (layers 2 and 5, head)"
    assert plan.reasons() == [("picky", "picky refuses layer 2 and layer 5: not to its taste")]
    found = [(b.name, s.first, s.last, s.embedding, s.head) for b, s in plan.segments()]
    assert found == [
        ("picky", 0, 2, True, False), ("torch", 2, 3, False, False), ("picky", 3, 5, False, False),
        ("torch", 5, 6, False, True),
    ]  # fmt: skip


def test_the_ends_may_be_refused_as_well():
    ends = make_plan(describe(RAW), KV, [Picky(lambda block: isinstance(block, (Embedding, LmHead))), TorchBackend()])
    assert ends.summary() == "picky (layers 0-5), torch (embedding, head)"
    assert [(s.first, s.last, s.embedding, s.head) for _, s in ends.segments()] == [
        (0, 0, True, False), (0, 6, False, False), (6, 6, False, True),
    ]  # fmt: skip


def test_a_block_that_no_back_end_runs_is_named_with_every_reason():
    with pytest.raises(ConfigError, match=r"no back end runs layer 3: picky: not to its taste"):
        make_plan(describe(RAW), KV, [Picky(layer_is(3))])


def fast_backends(compiler):
    """Those beside torch: each refuses what it does not implement, torch then takes it."""
    found = [NativeBackend(load_library(torch.float32), describe(TAKEN), torch.float32)]
    if importlib.util.find_spec("triton") is not None:
        from diptych.engine.exec.backends.triton import TritonBackend

        found.append(TritonBackend())
    return found


TAKEN = {**RAW, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 32}
"""What every back end takes."""
BLOCK = describe(TAKEN).blocks[0]


def test_a_block_without_a_required_norm_is_refused_by_name(compiler):
    """Drill: a family that norms behind a layer only (OLMo 2) ended in an AttributeError of the C back end."""
    for backend in fast_backends(compiler):
        assert backend.refusal(BLOCK, KV) is None
        for name in ("attention_norm", "mlp_norm"):
            assert backend.refusal(replace(BLOCK, **{name: None}), KV) == f"it needs {name} of DecoderBlock"


def places_of(layer):
    """(the layer with a replacement of one of its layers, path) -> each layer inside and itself."""
    yield (lambda new: new), layer
    for field in fields(layer):
        inner = getattr(layer, field.name)
        if is_dataclass(inner):
            for put, found in places_of(inner):
                yield (lambda new, put=put, name=field.name: replace(layer, **{name: put(new)})), found


def test_a_field_that_a_back_end_does_not_know_is_never_ignored(compiler, monkeypatch):
    """Of every kind of layer, wherever it stands, on torch too: as if a newcomer had added the field."""
    normed = replace(BLOCK, attention=replace(BLOCK.attention, q_norm=Norm("q", 32, 1e-6), k_norm=Norm("k", 32, 1e-6)))
    model = describe(TAKEN)
    kinds = set()
    for backend in (*fast_backends(compiler), TorchBackend()):
        module = sys.modules[type(backend).__module__]
        for whole in (normed, model.embedding, model.head):
            assert backend.refusal(whole, KV) is None
            for _, layer in places_of(whole):
                kind, takes = type(layer), module._TAKES[type(layer)]
                kinds.add(kind)
                for field in fields(layer):
                    known, optional = (tuple({*names} - {field.name}) for names in (takes.required, takes.optional))
                    older = {**module._TAKES, kind: replace(takes, required=known, optional=optional)}
                    with monkeypatch.context() as patch:
                        patch.setattr(module, "_TAKES", older)
                        reason = backend.refusal(whole, KV)
                    used = any(
                        type(one) is kind and getattr(one, field.name) != field.default for _, one in places_of(whole)
                    )
                    assert reason == (f"it does not know {field.name} of {kind.__name__}" if used else None)
    assert kinds == {DecoderBlock, Attention, Linear, Norm, Mlp, Rope, Embedding, LmHead}


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """The same fields, and other numbers."""


@dataclass(frozen=True, slots=True)
class Experts:
    """In the place of a feed-forward layer."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: replace(b, mlp=replace(b.mlp, activation="relu2")), "it does not know activation relu2 of Mlp"),
        (
            lambda b: replace(b, attention=replace(b.attention, rope=replace(b.attention.rope, kind="yarn"))),
            "it does not know kind yarn of Rope",
        ),
        (lambda b: replace(b, mlp_norm=LayerNorm("n", 96, 1e-6)), "it has no layer LayerNorm"),
        (lambda b: replace(b, mlp=Experts()), "it has no layer Experts"),
        (
            lambda b: replace(b, mlp=replace(b.mlp, down=replace(b.mlp.down, method="gptq"))),
            "it has no linear method gptq",
        ),
    ],
)
def test_what_no_back_end_computes_is_refused_by_every_one(compiler, change, reason):
    """Drill: an unknown kind of rope was computed as the default one, and torch failed at the first step for the others."""
    for backend in (*fast_backends(compiler), TorchBackend()):
        assert backend.refusal(change(BLOCK), KV) == reason
    with pytest.raises(ConfigError, match="no back end runs layer 0"):
        make_plan(replace(describe(TAKEN), blocks=(change(BLOCK),)), KV, [TorchBackend()])


def test_norms_of_queries_and_keys_are_both_there_or_neither():
    """Drill: torch left a single one out, without a word."""
    attention = replace(BLOCK.attention, q_norm=Norm("model.layers.0.q_norm", 32, 1e-6))
    with pytest.raises(ConfigError, match="q_norm and k_norm: both, or neither"):
        replace(describe(TAKEN), blocks=(replace(BLOCK, attention=attention),))


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        (full_format(6, 2, 8, block_size=8, dtype="int8", scale_dtype="float16"), "no int8 with scales in float16"),
        (full_format(6, 2, 8, block_size=8, dtype="float8_e4m3fn"), "no float8_e4m3fn without scales"),
        (KvFormat((KvGroup(KvKind.LATENT, tuple(range(6)), 1, (16,), "float32", 8),)), "no latent group"),
    ],
)
def test_kv_that_the_pool_does_not_hold_is_refused_by_name(compiler, kv, reason):
    """Drill: the format counted scales, and the pool had none."""
    for backend in (*fast_backends(compiler), TorchBackend()):
        assert reason in backend.refusal(BLOCK, kv)
    with pytest.raises(ConfigError, match=rf"no back end runs layer 0: torch: the KV pool .*{reason}"):
        make_plan(describe(RAW), kv, [TorchBackend()])


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as error:
        describe({**RAW, "architectures": ["MambaForCausalLM"]})
    assert all(name in str(error.value) for name in ARCHITECTURES)


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def run(driver):
    """A chunked prompt beside decodes, several steps, and a step without logits."""
    one, two, three = prompt_of(9), prompt_of(23, 2), prompt_of(4, 3)
    tables = [driver.table(40) for _ in range(3)]
    first = driver.prefill(one, tables[0], chunk=4)
    driver.runner.execute([driver.seq(two[:11], 0, tables[1], sample=False)])
    mixed = [
        driver.seq(two[11:], 11, tables[1]),
        driver.seq([first], 9, tables[0], index=1),
        driver.seq(three, 0, tables[2]),
    ]
    return [first, *driver.runner.execute(mixed).token_ids, *driver.generate([prompt_of(5), prompt_of(17)], 4)]


@pytest.mark.parametrize("refused", [(1,), (0,), (2,), (0, 2)])
@pytest.mark.usefixtures("compiler")
def test_compiled_kernels_and_torch_take_turns(tiny_dir, driver_of, monkeypatch, caplog, refused):
    """Embedding and head go with the layer beside them; the order of the rows is the same for both."""
    own = NativeBackend.refusal
    monkeypatch.setattr(
        NativeBackend,
        "refusal",
        lambda self, block, kv: "the test" if layer_is(*refused)(block) else own(self, block, kv),
    )
    with caplog.at_level(logging.WARNING):
        mixed = driver_of(tiny_dir)
    assert mixed.runner.backend.startswith("native (") == (len(refused) == 1)
    assert "native refuses layer" in caplog.text
    reported = []
    mixed.runner.on_layers = reported.append
    assert run(mixed) == run(driver_of(tiny_dir, backend="torch"))
    assert set(reported) == {1, 2}
    with pytest.raises(ConfigError, match="the test"):
        driver_of(tiny_dir, backend="native")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("refused", [(1,), (0, 2)])
def test_triton_and_torch_take_turns(model_dir_of, driver_of, monkeypatch, refused):
    """As on a GPU whose kernels do not take a layer: kernel by kernel, without graphs and steps ahead."""
    from triton import knobs

    from diptych.engine.exec.backends import registry
    from diptych.engine.exec.backends.triton import TritonBackend

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    folder = model_dir_of(
        "LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
    )
    expected = run(driver_of(folder, backend="torch"))
    own = TritonBackend.refusal
    monkeypatch.setattr(
        TritonBackend,
        "refusal",
        lambda self, block, kv: "the test" if layer_is(*refused)(block) else own(self, block, kv),
    )
    monkeypatch.setattr(registry, "choose_backend", lambda device, wanted: "triton")
    mixed = driver_of(folder)
    assert "triton (" in mixed.runner.backend
    assert "torch (" in mixed.runner.backend
    assert not mixed.runner.capabilities.runs_ahead
    assert not mixed.runner.capabilities.reports_layers
    assert run(mixed) == expected


class Tensors:
    """A source of random tensors, each once."""

    def __init__(self):
        self.made = {}

    def take(self, name, shape, *, as_stored=False, where=()):
        made = self.made.setdefault(name, torch.randn(shape, generator=torch.Generator().manual_seed(len(name))))
        return cut_out(made, where)


@pytest.mark.parametrize("rule", list(ShardBy))
def test_shards_of_a_linear_layer_make_the_whole(rule):
    layer = Linear((Part("a.q", 8), Part("a.kk", 4)), 12, bias=True, shard=rule)
    method, source, x = PlainMethod(), Tensors(), torch.randn(3, 12)
    whole = method.apply(method.load(layer, source, WHOLE), x, PLAIN_ROWS)
    shards = [method.load(layer, source, Shard(rank, 2)) for rank in range(2)]
    if rule is ShardBy.INPUTS:
        got = sum(method.apply(shard, part, PLAIN_ROWS) for shard, part in zip(shards, x.chunk(2, 1), strict=True))
    elif rule is ShardBy.OUTPUTS:  # of each part, one after the other
        outs = [method.apply(shard, x, PLAIN_ROWS) for shard in shards]
        got = torch.cat([out[:, span] for span in (slice(4), slice(4, 6)) for out in outs], 1)
    else:
        got = method.apply(shards[1], x, PLAIN_ROWS)
    torch.testing.assert_close(got, whole)
    if rule is not ShardBy.REPLICATED:
        with pytest.raises(ConfigError, match="cannot be divided among 5 ranks"):
            method.create(layer, Shard(0, 5))


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_rank_has_the_kv_heads_of_its_pool_also_where_ranks_share_one(degree, kv_heads):
    """Drill: with more ranks than KV heads the pool held a whole head for each rank, and its weights a part of one."""
    head_dim, source = 4, Tensors()
    qkv = parts.attention("a", hidden_size=12, heads=(8, kv_heads, head_dim), rope=Rope(), qkv_bias=True).qkv
    whole = [
        source.take(f"a.{name}_proj.weight", (heads * head_dim, 12))
        for name, heads in zip("qkv", (8, kv_heads, kv_heads), strict=True)
    ]
    biases = [
        source.take(f"a.{name}_proj.bias", (heads * head_dim,))
        for name, heads in zip("qkv", (8, kv_heads, kv_heads), strict=True)
    ]
    for rank in range(degree):
        shard = Shard(rank, degree)
        kv = full_format(1, kv_heads, head_dim, block_size=8, dtype="float32", shard=shard)
        heads = shard.heads(kv_heads)
        assert len(heads) == kv.only_group.heads_per_rank(shard)
        rows = [slice(rank * 32 // degree, (rank + 1) * 32 // degree), *[slice(heads.start * 4, heads.stop * 4)] * 2]
        got = PlainMethod().load(qkv, source, shard)
        assert torch.equal(got.weight, torch.cat([weight[some] for weight, some in zip(whole, rows, strict=True)]))
        assert torch.equal(got.bias, torch.cat([bias[some] for bias, some in zip(biases, rows, strict=True)]))
        # Its queries meet the heads that they meet in the whole model.
        queries = shard.units(8, "num_attention_heads")
        assert {query * kv_heads // 8 for query in queries} == set(heads)


def test_no_rank_has_a_part_of_a_head():
    qkv = parts.attention("a", hidden_size=12, heads=(6, 2, 8), rope=Rope()).qkv
    with pytest.raises(ConfigError, match="a.q_proj=6: cannot be divided among 4 ranks"):
        PlainMethod().create(qkv, Shard(0, 4))
    qkv = parts.attention("a", hidden_size=12, heads=(12, 3, 8), rope=Rope()).qkv
    with pytest.raises(ConfigError, match="num_kv_heads=3: cannot be divided among 4 ranks"):
        PlainMethod().create(qkv, Shard(0, 4))


class Shifted(PlainMethod):
    """As LoRA over plain weights: what it keeps is plain, what it computes is not."""

    name = "shifted"

    def apply(self, weights, x, step):
        return super().apply(weights, x, step) + 1


def test_a_method_over_plain_weights_is_applied_by_itself(compiler):
    """Drill: the type of the weights decided, and the product left the method out."""
    layer, x = Linear((Part("a", 8),), 4), torch.randn(3, 4)
    method = Shifted()
    weights = method.load(layer, Tensors(), WHOLE)
    expected = PlainMethod().apply(weights, x, PLAIN_ROWS)
    for backend in (*fast_backends(compiler), TorchBackend()):
        if isinstance(backend, NativeBackend):
            with pytest.raises(TypeError, match="shifted was refused"):
                backend.keep(method, weights)
            continue
        torch.testing.assert_close(backend.keep(PlainMethod(), weights)(x, PLAIN_ROWS), expected)
        torch.testing.assert_close(backend.keep(method, weights)(x, PLAIN_ROWS), expected + 1)
