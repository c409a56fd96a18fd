"""A method for linear layers, and a format of checkpoints, are one file and one line of a registry each: shown with ones
that exist in this test only."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.common.errors import ConfigError, InternalError
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.formats import registry as formats
from diptych.engine.exec.formats.base import Quantization, left_out_by, only
from diptych.engine.exec.layers.linear import PLAIN, Linear, Part
from diptych.engine.exec.loading import load_weights
from diptych.engine.exec.lora import LoraSizes
from diptych.engine.exec.methods.base import StepRows, TensorPart
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.models.registry import describe
from diptych_tests.cpu_graphs import CpuGraphs

QUANTIZED = {"quant_method": "int8-rows-of-a-test", "bits": 8}


# ---- the files ----


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """weight: [outputs, inputs] int8; scales: [outputs, 1] float32; offsets: [adapters, 1], what each adapter adds."""

    weight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_bytes(self):
        return self.weight.nbytes + self.scales.nbytes


class Int8RowsFormat:
    name = "int8-rows"
    quant_methods = ("int8-rows-of-a-test",)
    without_effect = ("damp_percent",)

    def read(self, config):
        only(config, "bits", 8)
        left_out = left_out_by(config, "modules_to_not_convert")

        def declare(layer):
            return layer if left_out(layer) else replace(layer, method="int8-rows", settings=(("bits", 8),))

        return Quantization(declare, head=config.get("lm_head") is True)


class Int8RowsMethod:
    name = "int8-rows"

    def create(self, layer, shard):
        whole = (slice(None), slice(None))
        return [
            part
            for one in layer.parts
            for part in (
                TensorPart(f"{one.name}.weight", (one.outputs, layer.inputs), whole),
                TensorPart(f"{one.name}.weight_scale", (one.outputs, 1), whole),
            )
        ]

    def load(self, layer, source, shard):
        parts = [source.take(part.name, part.shape, as_stored=True)[part.where] for part in self.create(layer, shard)]
        assert dict(layer.settings) == {"bits": 8}
        return Int8Rows(
            torch.cat(parts[::2]), torch.cat(parts[1::2]), torch.tensor([[0.25], [-0.5]]).to(parts[0].device)
        )

    def apply(self, weights, x, step: StepRows):
        out = x @ weights.weight.float().T * weights.scales.T
        if step.adapters is None:
            return out
        assert len(step.adapters) == len(x), "of the same rows"
        added = weights.offsets[step.adapters.clamp(min=0).long()]
        return torch.where(step.adapters[:, None] >= 0, out + added, out)


@pytest.fixture
def int8_rows(monkeypatch):
    """The lines of the registries."""
    monkeypatch.setitem(METHODS, "int8-rows", Int8RowsMethod())
    monkeypatch.setitem(formats.FORMATS, "int8-rows", Int8RowsFormat())


# ---- checkpoints of it ----


def linears_of(tensors):
    return [name for name in tensors if name.endswith("proj.weight")]


def quantize(folder, left_out=()):
    """Quantize a model's linear layers in place. Returns: the same values as plain tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = dict(tensors)
    for name in linears_of(tensors):
        if any(one in name for one in left_out):
            continue
        scales = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scales).round().to(torch.int8)
        tensors[f"{name}_scale"] = scales
        plain[name] = tensors[name].float() * scales
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZED, "modules_to_not_convert": list(left_out)}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.fixture
def pair(model_dir_of, tmp_path_factory, int8_rows):
    """pair(names left out, sizes) -> folder of a quantized model, folder of a plain one with its values."""

    def make(left_out=(), **overrides):
        folder, plain = model_dir_of("LlamaForCausalLM", **overrides), tmp_path_factory.mktemp("plain")
        (plain / "config.json").write_text((folder / "config.json").read_text())
        save_file(quantize(folder, left_out), plain / "model.safetensors")
        return folder, plain

    return make


# ---- what follows ----


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("left_out", [(), ("model.layers.1.self_attn",), ("down_proj",)])
def test_a_quantized_checkpoint_runs_where_its_method_is_and_only_there(pair, driver_of, caplog, left_out):
    folder, plain = pair(left_out)
    with caplog.at_level(logging.WARNING):
        driver = driver_of(folder)
    assert "native refuses layer 0 to layer 2: it has no linear method int8-rows" in caplog.text
    assert driver.runner.backend == "torch"
    assert driver.runner.description.method == "int8-rows"
    prompts = prompts_of(1, 9, 20)
    assert driver.generate(prompts, 8, chunk=7) == driver_of(plain, backend="torch").generate(prompts, 8, chunk=7)
    with pytest.raises(ConfigError, match="it has no linear method int8-rows"):
        driver_of(folder, backend="native")


def test_triton_refuses_a_method_that_it_does_not_list(int8_rows):
    pytest.importorskip("triton", reason="Triton is not installed")
    from diptych.engine.exec.backends.triton import TritonBackend
    from diptych.engine.exec.kv_pool import kv_format_of

    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 64, "quantization_config": QUANTIZED,
    }  # fmt: skip
    model = describe(raw)
    kv = kv_format_of(model, block_size=16)
    assert TritonBackend().refusal(model.blocks[0], kv) == "it has no linear method int8-rows"
    assert TritonBackend().refusal(model.head, kv) is None, "a head is quantized only where the config says so"
    headed = describe({**raw, "quantization_config": {**QUANTIZED, "lm_head": True}})
    assert headed.head.linear.method == "int8-rows"


TWO_SLOTS = LoraSizes(2, 8)


def adapted(driver, prompts, adapters, *, together=True, ahead=False):
    """5 tokens of each prompt with its adapter. ahead: the last ones are launched, not executed."""
    outputs = [[] for _ in prompts]
    tables = [driver.table(len(prompt) + 6) for prompt in prompts]
    for group in [range(len(prompts))] if together else [[i] for i in range(len(prompts))]:
        for index in range(5):
            steps = []
            for i in group:
                tokens = prompts[i] if not index else outputs[i][-1:]
                step = driver.seq(tokens, 0 if not index else len(prompts[i]) + index - 1, tables[i], index=index)
                step.adapter = adapters[i]
                steps.append(step)
            if ahead and index > 2:
                flying = driver.runner.launch(steps)
                flying.draw()
                result = flying.result()
            else:
                result = driver.runner.execute(steps)
            for i, row in zip(group, result.token_ids, strict=True):
                outputs[i] += row
    return outputs


def test_each_row_meets_its_own_adapter(pair, driver_of):
    """Drill: apply() had no step. Chunks, decodes and rows whose logits are wanted: every layer gets the adapters of its rows."""
    driver = driver_of(pair()[0])
    prompts, adapters = prompts_of(9, 5, 12), [0, -1, 1]
    with pytest.raises(InternalError, match="there is no slot 0, only 0"):
        adapted(driver, prompts, adapters)
    driver.runner.loras = TWO_SLOTS
    assert driver.runner.capabilities.max_loras == 2
    together = adapted(driver, prompts, adapters)
    assert together == adapted(driver, prompts, adapters, together=False)
    plain = driver.generate(prompts, 5)
    assert [a == b for a, b in zip(together, plain, strict=True)] == [False, True, False]
    with pytest.raises(InternalError, match="there is no slot 2, only 2"):
        adapted(driver, prompts, [2, 0, 0])


def give_graphs(driver, monkeypatch):
    from diptych.engine.exec.cuda import graphs

    fused = driver.runner._fused
    cpu = CpuGraphs(monkeypatch, fused._runtime.decoder)
    monkeypatch.setattr(graphs, "feed_ids", cpu.captured(graphs.feed_ids))
    fused._graphs = graphs.DecodeGraphs(
        cpu, torch.device("cpu"), fused._draw.drawn, num_groups=1, num_kv_heads=1, num_programs=8, sizes=(1, 2, 4)
    )


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_triton_gives_each_row_its_adapter(pair, driver_of, monkeypatch, device):
    """Drill: every layer was told that no row has one. On a GPU from the buffers of a CUDA graph; steps ahead, too."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton import knobs

    from diptych.engine.exec.backends import triton

    if device == "cpu" and not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    monkeypatch.setattr(triton, "_METHODS", triton._METHODS | {"int8-rows"})
    folder, _ = pair(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
    )
    prompts, adapters = prompts_of(7, 3, 5), [0, -1, 1]
    outputs = []
    for backend, where in (("torch", "cpu"), ("triton", device)):
        driver = driver_of(folder, backend=backend, device=where)
        driver.runner.loras = TWO_SLOTS
        outputs.append(adapted(driver, prompts, adapters))
    assert outputs[1] == outputs[0]
    assert adapted(driver, prompts, adapters, ahead=True) == outputs[0]
    plain = adapted(driver, prompts, [-1] * 3)
    assert plain != outputs[0]
    if device == "cpu":
        give_graphs(driver, monkeypatch)
        assert adapted(driver, prompts, adapters) == outputs[0]
        assert adapted(driver, prompts, [-1] * 3) == plain, "of the step before, nothing is left in the buffer"


def test_tensors_survive_as_stored_for_the_method_that_asks(tmp_path):
    stored = {
        "int4": torch.tensor([[1, -8], [7, 0]], dtype=torch.int8),
        "fp8": torch.tensor([[0.4375, 448.0]]).to(torch.float8_e4m3fn),
        "scale": torch.tensor([[1e-3, 3.3333333]], dtype=torch.float32),
    }
    save_file(stored, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu")) as source:
        for name, tensor in stored.items():
            taken = source.take(name, tuple(tensor.shape), as_stored=True)
            assert taken.dtype == tensor.dtype
            assert torch.equal(taken.view(torch.uint8), tensor.view(torch.uint8))
        source.finish()
    with (
        Checkpoint(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu")) as source,
        pytest.raises(ConfigError, match="tensor int4 holds torch.int8"),
    ):
        source.take("int4", (2, 2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_a_stored_tensor_with_nan_is_refused_by_name(tmp_path, dtype):
    save_file({"fp8": torch.tensor([[1.0, float("nan")]]).to(dtype)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, dtype=torch.float32, device=torch.device("cpu")) as source:
        source.take("fp8", (1, 2), as_stored=True)
        with pytest.raises(ConfigError, match="tensor fp8 holds NaN or infinity"):
            source.finish()


RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "reason"),
    [
        ({"quant_method": "bnb"}, "quantization_config.quant_method", "int8-rows-of-a-test"),
        ({"quant_method": ["awq"]}, "quantization_config.quant_method", "int8-rows-of-a-test"),
        ({"bits": 4}, "quantization_config.quant_method", "int8-rows-of-a-test"),
        ("awq", "quantization_config", "must be an object"),
        ({**QUANTIZED, "bits": 4}, "quantization_config.bits", "must be 8"),
        (
            {**QUANTIZED, "modules_to_not_convert": "q_proj"},
            "quantization_config.modules_to_not_convert",
            "list of names",
        ),
        ({**QUANTIZED, "modules_to_not_convert": [3]}, "quantization_config.modules_to_not_convert", "list of names"),
        (
            {**QUANTIZED, "modules_to_not_convert": ["q_proj"]},
            "quantization_config.modules_to_not_convert",
            "one layer",
        ),
        ({**QUANTIZED, "desc_act": True}, "quantization_config.desc_act", "nothing of LlamaForCausalLM reads it"),
        ({**QUANTIZED, "damp_percent": 0.1, "group": {"size": 8}}, "quantization_config.group", "nothing of"),
    ],
)
def test_what_no_method_can_do_is_refused_by_name(int8_rows, config, field, reason):
    with pytest.raises(ConfigError) as error:
        describe({**RAW, "quantization_config": config})
    assert error.value.field == field
    assert reason in str(error.value)


def test_a_key_of_how_weights_were_made_is_known(int8_rows):
    made = describe({**RAW, "quantization_config": {**QUANTIZED, "damp_percent": 0.1}})
    assert made == describe({**RAW, "quantization_config": QUANTIZED})


def test_an_unknown_quant_method_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="supported: awq, compressed-tensors, fp8, gguf, gptq"):
        describe({**RAW, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert describe(RAW).method == PLAIN


def test_left_out_names_are_modules_and_not_pieces_of_words(int8_rows):
    declare = formats.quantization_of({**QUANTIZED, "modules_to_not_convert": ["layers.1", "lm_head"]}).declare
    names = {"model.layers.1.mlp.down_proj": PLAIN, "model.layers.10.mlp.down_proj": "int8-rows", "lm_head": PLAIN}
    assert {name: declare(Linear((Part(name, 4),), 4)).method for name in names} == names


def test_a_missing_scale_is_an_error_with_its_name(pair, tmp_path):
    folder, _ = pair()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    description = describe(json.loads((folder / "config.json").read_text()))
    from diptych.engine.exec.backends.base import make_plan
    from diptych.engine.exec.backends.torch import TorchBackend
    from diptych.engine.exec.kv_pool import kv_format_of

    plan = make_plan(description, kv_format_of(description, block_size=8), [TorchBackend()])
    with (
        Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu")) as source,
        pytest.raises(ConfigError, match=r"model.layers.1.self_attn.k_proj.weight_scale is missing"),
    ):
        load_weights(source, plan)
