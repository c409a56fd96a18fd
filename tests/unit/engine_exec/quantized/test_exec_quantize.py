"""`diptych quantize` from a plain model's folder to the logits of what it wrote."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych.common.errors import ConfigError
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.models.registry import describe
from diptych.engine.quantize import folder as written
from diptych.engine.quantize import run as running
from diptych.engine.quantize.blocks import LAYERS, CalibrationRun, PlainCheckpoint
from diptych.engine.quantize.methods import smooth
from diptych.engine.quantize.perplexity import perplexity, step_tokens
from diptych.engine.quantize.run import Job, quantize
from diptych.engine.quantize.settings import MANIFEST_FILE, QuantizeSettings
from diptych.engine.quantize.text import HELD_OUT, read_text

WORDS = "The keeper of the lighthouse wrote down the weather, and in the evening the ships that had passed. "
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 16, "query_pre_attn_scalar": 32}),
}
TEXT = Path("calibration.txt")
"""Its folder is the test's: see job_of."""
METHODS = {
    "int8": QuantizeSettings("int8"),
    "int8-smoothed": QuantizeSettings("int8", calibration=TEXT),
    "fp8": QuantizeSettings("fp8"),
    "int4-nearest": QuantizeSettings("int4", symmetric=False),
    "int4-gptq": QuantizeSettings("int4", calibration=TEXT),
    "int4-gptq-in-order": QuantizeSettings("int4", group_size=32, symmetric=False, act_order=False, calibration=TEXT),
}


def silent(stage, done, total):
    pass


def add_tokenizer(folder: Path) -> Path:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def source(model_dir_of):
    return add_tokenizer(model_dir_of("LlamaForCausalLM", **SIZES))


@pytest.fixture
def texts(tmp_path):
    calibration, held_out = tmp_path / "calibration.txt", tmp_path / "held-out.txt"
    calibration.write_text(WORDS * 20)
    held_out.write_text(HELD_OUT.read_text()[:700])
    return {"calibration": calibration, "held_out": held_out}


def job_of(source, tmp_path, texts, settings) -> Job:
    if settings.calibration is not None:
        settings = replace(settings, calibration=texts["calibration"])
    return Job(source, tmp_path / "out", settings, texts["held_out"])


def values(stored: dict[str, torch.Tensor], layer: str, inputs: int) -> torch.Tensor:
    """The weight that the tensors of a layer mean, by the layout's rule, code by code."""
    scales = stored[f"{layer}.weight_scale"].float()
    if f"{layer}.weight" in stored:
        return stored[f"{layer}.weight"].float() * scales
    words = stored[f"{layer}.weight_packed"].to(torch.int64)
    codes = torch.stack([words[:, i // 8] >> 4 * (i % 8) & 15 for i in range(inputs)], 1)
    size = inputs // scales.shape[1]
    zeros = torch.full(scales.shape, 8)
    if f"{layer}.weight_zero_point" in stored:
        packed = stored[f"{layer}.weight_zero_point"].to(torch.int64)
        zeros = torch.stack([packed[o // 8] >> 4 * (o % 8) & 15 for o in range(len(scales))])
    return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def reference(out: Path, plain: Path, most: float | None):
    """transformers' own model with the weights that the folder means. most: the largest code of the activations' method."""
    stored, kept = load_file(out / "model.safetensors"), load_file(plain / "model.safetensors")
    for name, tensor in kept.items():
        layer = name.removesuffix(".weight")
        kept[name] = stored[name] if f"{layer}.weight_scale" not in stored else values(stored, layer, tensor.shape[1])
    folder = out.with_name("meant")
    folder.mkdir()
    (folder / "config.json").write_text((plain / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    architecture = json.loads((plain / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def rounded(module, args):
        [x] = args
        scales = x.abs().amax(-1, keepdim=True) / most
        codes = x / scales
        codes = codes.round() if most == 127 else codes.to(torch.float8_e4m3fn).float()
        return (codes * scales,)

    for name, module in model.named_modules():
        if most is not None and f"{name}.weight_scale" in stored:
            module.register_forward_pre_hook(rounded)
    return model


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_model_has_the_logits_of_what_its_folder_means(
    model_dir_of, driver_of, tmp_path, texts, family, name
):
    architecture, overrides = FAMILIES[family]
    source = add_tokenizer(model_dir_of(architecture, **(SIZES | overrides)))
    settings = METHODS[name]
    job = job_of(source, tmp_path, texts, settings)
    manifest = quantize(job, silent)
    assert json.loads((job.out / MANIFEST_FILE).read_text()) == manifest

    driver = driver_of(job.out, backend="torch")
    description = driver.runner.description
    assert description.method == settings.method
    assert {linear.method for block in description.blocks for linear in block.linears} == {settings.method}
    assert description.head.linear.method == "plain"
    prompt = ModelTokenizer(source).encode(WORDS)
    decoder = driver.runner._decoder
    layout = decoder.lay_out([driver.seq(prompt, 0, driver.table(len(prompt)))])
    with torch.inference_mode():
        [found] = decoder.forward(layout, None)
        model = reference(job.out, source, {"int8": 127.0, "fp8": 448.0}.get(settings.method))
        wanted = model(torch.tensor([prompt])).logits[0, -1]
        plain = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32).eval()
        before = plain(torch.tensor([prompt])).logits[0, -1]
    # Activations in the middle of two codes may go either way, where they differ in the last bit.
    bound = 1e-4 if settings.method == "int4" else 0.02
    assert float((found - wanted).norm() / wanted.norm()) < bound
    assert 1e-3 < float((wanted - before).norm() / before.norm()) < 0.5, "quantized, and still the same model"


def blocks_of(source, prompts):
    description = describe(json.loads((source / "config.json").read_text()))
    checkpoint = PlainCheckpoint(Checkpoint(source, dtype=torch.float32, device=torch.device("cpu")), description)
    return description, checkpoint.blocks(), CalibrationRun(description, checkpoint.embedding, prompts)


def test_calibration_sees_what_transformers_linear_layers_get(source):
    prompts = [list(range(40)), list(range(100, 121))]
    description, blocks, run = blocks_of(source, prompts)
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    got: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: got.setdefault(name, []).append(args[0][0]))
    with torch.inference_mode():
        for prompt in prompts:
            model(torch.tensor([prompt]))
    last = dict(zip(LAYERS, ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"), strict=True))
    for index, block in enumerate(blocks):
        inputs = run.observe(index, block)
        run.accept()
        for layer, end in last.items():
            x = torch.cat(got[f"model.layers.{index}.{end}"])
            torch.testing.assert_close(inputs[layer].hessian, x.T @ x, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(inputs[layer].largest, x.abs().amax(0), rtol=1e-4, atol=1e-4)
    assert len(model.model.layers) == description.num_layers == index + 1


def test_smoothing_changes_no_bit_of_the_plain_model(model_dir_of):
    source = model_dir_of("LlamaForCausalLM", **SIZES, mlp_bias=True)
    description, blocks, run = blocks_of(source, [list(range(60))])
    for index, block in enumerate(blocks):
        inputs = run.observe(index, block)
        plain = run._behind
        smoothed, replaced, most = smooth(description.blocks[index], block, inputs)
        assert most > 1.0
        prefix = f"model.layers.{index}"
        assert replaced.keys() == {
            f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight", f"{prefix}.mlp.up_proj.bias"
        }  # fmt: skip
        run.advance(index, smoothed)
        assert torch.equal(run._states[0], plain[0])
        assert not torch.equal(smoothed.linears["qkv"].weight, block.linears["qkv"].weight)
        assert not torch.equal(smoothed.linears["down"].weight, block.linears["down"].weight)


def test_a_norm_with_an_offset_is_left_alone(model_dir_of):
    """1 + weight, divided, has no exact weight."""
    architecture, overrides = FAMILIES["gemma3"]
    source = model_dir_of(architecture, **SIZES, **overrides)
    description, blocks, run = blocks_of(source, [list(range(60))])
    block = next(blocks)
    smoothed, replaced, _ = smooth(description.blocks[0], block, run.observe(0, block))
    assert not replaced
    assert torch.equal(smoothed.linears["qkv"].weight, block.linears["qkv"].weight)
    assert not torch.equal(smoothed.linears["down"].weight, block.linears["down"].weight)


def test_calibration_keeps_the_model_nearer(source, tmp_path, texts):
    """Weights with a few large activations, as large models have them."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::17] *= 30
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "gate_proj.weight")):
            tensor[:, ::17] /= 30
    save_file(tensors, file, {"format": "pt"})
    texts["calibration"] = texts["held_out"]
    off = {}
    for name in ("int8", "int8-smoothed", "int4-nearest", "int4-gptq"):
        settings = METHODS[name]
        if settings.method == "int4":
            settings = replace(settings, symmetric=False)
        job = replace(job_of(source, tmp_path, texts, settings), out=tmp_path / name)
        off[name] = abs(quantize(job, silent)["perplexity"]["ratio"] - 1.0)
    assert off["int8-smoothed"] < off["int8"]
    assert off["int4-gptq"] < off["int4-nearest"]


def test_the_manifest_says_what_was_made_of_what(source, tmp_path, texts):
    job = job_of(source, tmp_path, texts, METHODS["int4-gptq"])
    seen = []
    manifest = quantize(job, lambda stage, done, total: seen.append((stage, done, total)))
    assert manifest["method"] == "int4"
    assert manifest["group_size"] == 64
    assert re.fullmatch("[0-9a-f]{32}", manifest["source"]["revision"])
    assert manifest["calibration"] | {"blake3": ""} == {
        "file": "calibration.txt", "blake3": "", "num_tokens": 1920, "num_pieces": 15,
    }  # fmt: skip
    found = manifest["perplexity"]
    text = read_text(texts["held_out"], "held_out", ModelTokenizer(source), piece=127)
    assert found["before"] == perplexity(source, text)
    assert found["after"] == perplexity(job.out, text)
    assert found["ratio"] == found["after"] / found["before"] != 1.0
    assert found["text"]["num_tokens"] == 700
    assert {"diptych", "torch", "python"} <= manifest["versions"].keys()
    stages = {stage for stage, _, _ in seen}
    assert stages == {"perplexity before", "int4: layers", "perplexity after"}
    for stage in stages:
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert [done for done, _ in steps] == list(range(steps[-1][1] + 1))


def test_perplexity_is_that_of_transformers(source, texts):
    text = read_text(texts["held_out"], "held_out", ModelTokenizer(source), piece=100)
    assert [len(piece) for piece in text.pieces] == [100] * 7
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        for piece in text.prompts():
            ids = torch.tensor(piece)
            losses.append(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    assert perplexity(source, text) == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)


def test_21_logits_of_a_step_are_bounded_where_the_vocabulary_is_large():
    """Those of 512 tokens of Gemma are 512 MiB, and twice more while they become probabilities."""
    assert [step_tokens(vocab_size) for vocab_size in (49_152, 128_256, 262_144, 10**9)] == [512, 256, 128, 16]


def test_perplexity_counts_no_special_token(source, texts):
    """Each piece begins with a BOS, which predicts the piece's first token and is not predicted itself."""
    plain = read_text(texts["held_out"], "held_out", ModelTokenizer(source), piece=100)
    with_bos = replace(plain, prefix=(1,), pieces=plain.pieces[:1])
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.tensor(with_bos.prompts()[0])
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:])
    assert perplexity(source, with_bos) == pytest.approx(float(loss.exp()), rel=1e-4)
    two = replace(plain, prefix=(1, 1), pieces=plain.pieces[:1])
    ids = torch.tensor(two.prompts()[0])
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, 1:-1], ids[2:])
    assert perplexity(source, two) == pytest.approx(float(loss.exp()), rel=1e-4)


def test_the_folder_is_a_model_of_its_own(source, tmp_path, texts):
    beside = {
        "chat_template.jinja": "{{ messages }}", "generation_config.json": "{}", "LICENSE.txt": "as it is",
        "diptych-manifest.json": "{}", "notes.md": "not of the model", "additional_chat_templates/tool_use.jinja": "{}",
    }  # fmt: skip
    (source / "additional_chat_templates").mkdir()
    for name, content in beside.items():
        (source / name).write_text(content)
    (source / "diptych-manifest.json").unlink()  # it would be held against the test's own files
    job = job_of(source, tmp_path, texts, METHODS["int8-smoothed"])
    quantize(job, silent)
    names = {str(path.relative_to(job.out)) for path in job.out.rglob("*") if path.is_file()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE.txt",
        "additional_chat_templates/tool_use.jinja", MANIFEST_FILE,
    }  # fmt: skip
    assert (job.out / "LICENSE.txt").read_text() == "as it is"
    assert job.out.stat().st_mode & 0o777 == 0o755
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, job.out))
    config = after.pop("quantization_config")
    assert after == before
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["lm_head"]
    stored, plain = load_file(job.out / "model.safetensors"), load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(stored[name], plain[name])


def test_large_models_are_written_in_several_files(source, tmp_path, texts, monkeypatch, driver_of):
    one, several = (replace(job_of(source, tmp_path, texts, METHODS["fp8"]), out=tmp_path / end) for end in "ab")
    quantize(one, silent)
    limit = 200_000
    monkeypatch.setattr(running, "WeightWriter", lambda folder: written.WeightWriter(folder, most_bytes=limit))
    quantize(several, silent)
    files = sorted(several.out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert max(sum(tensor.nbytes for tensor in load_file(file).values()) for file in files) <= limit
    prompts = [list(range(20))]
    assert driver_of(several.out).generate(prompts, 5) == driver_of(one.out).generate(prompts, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_quantized_keeps_its_dtype(source, tmp_path, texts, dtype):
    file = source / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for name in ("int8-smoothed", "int4-gptq"):
        job = replace(job_of(source, tmp_path, texts, METHODS[name]), out=tmp_path / name)
        quantize(job, silent)
        stored = load_file(job.out / "model.safetensors")
        layer = "model.layers.1.self_attn.o_proj"
        assert stored["model.layers.0.input_layernorm.weight"].dtype == dtype
        assert stored["model.embed_tokens.weight"].dtype == dtype
        assert stored[f"{layer}.weight_scale"].dtype == (dtype if "int4" in name else torch.float32)


# ---- refusals ----


def test_parents_that_were_made_for_the_folder_go_with_it(tmp_path):
    out = tmp_path / "kept" / "made" / "deeper" / "out"
    (tmp_path / "kept").mkdir()
    with pytest.raises(KeyboardInterrupt), written.new_folder(out):
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]
    other = tmp_path / "kept" / "made" / "of-another"

    def fail() -> None:
        other.touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), written.new_folder(out):
        fail()
    assert other.exists()
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"method": "int3"}, "method"),
        ({"method": "int8", "group_size": 64}, "group_size"),
        ({"method": "fp8", "symmetric": True}, "symmetric"),
        ({"method": "int4", "group_size": 48}, "group_size"),
        ({"method": "int4", "act_order": True}, "act_order"),
        ({"method": "int8", "act_order": False, "calibration": TEXT}, "act_order"),
        ({"method": "fp8", "calibration": TEXT}, "calibration"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings, field):
    with pytest.raises(ConfigError) as caught:
        QuantizeSettings(**settings)
    assert caught.value.field == field


def refused(job: Job) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        quantize(job, silent)
    assert not job.out.exists()
    assert not list(job.out.parent.glob(f".{job.out.name}*"))
    return caught.value


def test_a_group_size_that_does_not_divide_names_the_layer_and_a_size_that_does(source, tmp_path, texts):
    error = refused(job_of(source, tmp_path, texts, QuantizeSettings("int4", group_size=128)))
    assert error.field == "group_size"
    assert "192 inputs of model.layers.0.mlp.down_proj; 64 divides" in str(error)


def test_a_model_that_no_group_size_divides_is_refused(model_dir_of, tmp_path, texts):
    source = add_tokenizer(model_dir_of("LlamaForCausalLM", **(SIZES | {"intermediate_size": 200})))
    error = refused(job_of(source, tmp_path, texts, QuantizeSettings("int4")))
    assert error.field == "group_size"
    assert "no size divides those of every layer" in str(error)


@pytest.mark.parametrize("field", ["calibration", "held_out"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "0 tokens"), (b"too short", "9 tokens"), (b"\xff" * 99, "UTF-8"), (None, "cannot be read")],
)
def test_a_text_that_cannot_be_used_is_refused_by_name(source, tmp_path, texts, field, content, reason):
    texts[field] = tmp_path / "bad.txt"
    if content is not None:
        texts[field].write_bytes(content)
    error = refused(job_of(source, tmp_path, texts, METHODS["int4-gptq"]))
    assert error.field == field
    assert reason in str(error)


def test_a_folder_that_is_there_is_never_written(source, tmp_path, texts):
    job = job_of(source, tmp_path, texts, METHODS["int8"])
    job.out.mkdir()
    (job.out / "mine").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        quantize(job, silent)
    assert caught.value.field == "out"
    assert [path.name for path in job.out.iterdir()] == ["mine"]


def test_a_quantized_model_is_not_quantized_again(source, tmp_path, texts):
    job = job_of(source, tmp_path, texts, METHODS["int8"])
    quantize(job, silent)
    error = refused(replace(job, source=job.out, out=tmp_path / "again"))
    assert error.field == "model"
    assert "is quantized already" in str(error)


def test_a_broken_checkpoint_is_refused_by_tensor(source, tmp_path, texts):
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    error = refused(job_of(source, tmp_path, texts, METHODS["int8"]))
    assert error.field == "model"
    assert "model.layers.1.mlp.up_proj.weight holds NaN" in str(error)


@pytest.mark.parametrize("stage", ["perplexity before", "int4: layers", "perplexity after"])
def test_an_interrupted_run_leaves_nothing(source, tmp_path, texts, stage):
    job = job_of(source, tmp_path, texts, METHODS["int4-gptq"])

    def interrupted(at, done, total):
        if at == stage and done == total:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        quantize(job, interrupted)
    assert sorted(tmp_path.iterdir()) == before
