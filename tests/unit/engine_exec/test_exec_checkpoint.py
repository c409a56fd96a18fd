"""Checkpoints are read strictly: what is wrong with one is said before readiness, with the names of file and tensor."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.common.errors import ConfigError
from diptych.engine.exec import checkpoint
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.cuda.file_reader import FileReader


def prompt_of(length):
    rng = random.Random(1)
    return [rng.randrange(320) for _ in range(length)]


def spoiled(folder, spoil):
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def set_one(name, value):
    def spoil(tensors):
        tensors[name].view(-1)[3] = value

    return spoil


@pytest.fixture(params=["native", "torch"])
def backend(request, tiny):
    if request.param == "native" and tiny.runner.backend != "native":
        pytest.skip("no native backend here")
    return request.param


@pytest.mark.parametrize(
    ("spoil", "tensor", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight", "is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight", "is missing"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(1)}), "model.layers.0.extra", "is unexpected"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), "model.norm.weight", "has shape"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(96, dtype=torch.int32)}),
            "model.norm.weight",
            "not floating-point",
        ),
        (set_one("model.layers.2.self_attn.o_proj.weight", float("nan")), "layers.2.self_attn.o_proj.weight", "NaN"),
        (set_one("model.embed_tokens.weight", float("inf")), "model.embed_tokens.weight", "infinity"),
        (set_one("model.layers.0.input_layernorm.weight", float("nan")), "layers.0.input_layernorm.weight", "NaN"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said_with_its_name(model_dir_of, driver_of, backend, spoil, tensor, words):
    folder = spoiled(model_dir_of("LlamaForCausalLM"), spoil)
    with pytest.raises(ConfigError, match=words) as error:
        driver_of(folder, backend=backend)
    assert f"tensor {tensor}" in str(error.value) or f".{tensor}" in str(error.value)
    assert str(folder) in str(error.value)


def test_large_numbers_are_numbers(model_dir_of, driver_of):
    """Whose sum overflows fp32."""
    folder = spoiled(model_dir_of("LlamaForCausalLM"), lambda t: t["model.norm.weight"].fill_(3e38))
    driver_of(folder)
    with pytest.raises(ConfigError, match="NaN or infinity in float16"):
        driver_of(folder, dtype="float16")


def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_described(model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1_000_000_000}))
    with pytest.raises(ConfigError, match="at most 10000") as error:
        driver_of(folder)
    assert error.value.field == "num_hidden_layers"


def test_an_adapter_beside_the_weights_is_refused_not_left_out(model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json: adapters are not supported"):
        driver_of(folder)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"hidden_size": 64}, "model.embed_tokens.weight"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight"),
        ({"num_key_value_heads": 3}, "self_attn.k_proj.weight"),
        ({"head_dim": 64}, "self_attn.q_proj.weight"),
        ({"vocab_size": 300}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 2}, "model.layers.2."),
        ({"num_hidden_layers": 4}, "model.layers.3."),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "q_norm.weight"),
    ],
)
def test_a_config_that_contradicts_its_tensors(model_dir_of, driver_of, changes, tensor):
    folder = model_dir_of("LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match="tensor") as error:
        driver_of(folder)
    assert tensor in str(error.value)


@pytest.fixture
def sharded(model_dir_of):
    folder = model_dir_of("LlamaForCausalLM", shard="200KB", head_dim=32)
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def test_sharded_checkpoint(sharded, driver_of, tiny):
    assert driver_of(sharded).generate([prompt_of(9)], 4) == tiny.generate([prompt_of(9)], 4)


def test_a_missing_shard(sharded, driver_of):
    path = min(sharded.glob("model-*.safetensors"))
    path.unlink()
    with pytest.raises(ConfigError, match="shard") as error:
        driver_of(sharded)
    assert path.name in str(error.value)


def test_a_truncated_shard(sharded, driver_of):
    path = max(sharded.glob("model-*.safetensors"))
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=f"the file ends before the end of tensor {last}") as error:
        driver_of(sharded)
    assert path.name in str(error.value)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ConfigError, match="not a readable safetensors file") as error:
        driver_of(sharded)
    assert path.name in str(error.value)


def test_a_tensor_in_two_shards(sharded, driver_of):
    paths = sorted(sharded.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(paths[0]).items()))
    save_file({**load_file(paths[1]), name: tensor}, paths[1])
    with pytest.raises(ConfigError, match="is also in") as error:
        driver_of(sharded)
    assert name in str(error.value)
    assert paths[1].name in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index(sharded, driver_of, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="model"):
        driver_of(sharded)


def test_17_a_weights_file_that_is_written_over_changes_nothing_that_is_served(model_dir_of, driver_of, backend):
    """Nor does one that is cut off end the process: no weight is a view of the file."""
    folder = model_dir_of("LlamaForCausalLM", tie_word_embeddings=True)
    driver = driver_of(folder, backend=backend)
    expected = driver.generate([prompt_of(9)], 4)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert driver.generate([prompt_of(9)], 4) == expected


def test_18_threads_read_what_a_mapping_shows(tmp_path, monkeypatch):
    """Sizes that threads and pieces do not divide, two shards, another dtype, and a tensor too small for them."""
    monkeypatch.setattr(checkpoint, "_LEAST_READ_BYTES", 1000)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "bf16": torch.randn(37, 211, generator=generator).to(torch.bfloat16),
        "fp16": torch.randn(5003, generator=generator).to(torch.float16),
        "fp32": torch.randn(3, 1009, generator=generator),
        "small": torch.randn(7, generator=generator),
        "whole": torch.arange(4000).view(40, 100),
    }
    for number, names in enumerate((["bf16", "small", "whole"], ["fp16", "fp32"])):
        save_file({name: tensors[name] for name in names}, tmp_path / f"part-{number}.safetensors")
    weight_map = {name: f"part-{int(name in ('fp16', 'fp32'))}.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = []
    monkeypatch.setattr(
        FileReader, "read", lambda self, *args, read_it=FileReader.read: (read.append(args[1]), read_it(self, *args))
    )
    with Checkpoint(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), threads=3) as source:
        for name, tensor in tensors.items():
            taken = source.take(name, tuple(tensor.shape), as_stored=name == "whole")
            expected = tensor if name == "whole" else tensor.to(torch.bfloat16)
            assert taken.dtype == expected.dtype
            assert torch.equal(taken, expected), name
        source.finish()
    assert len(read) == 3


@pytest.mark.parametrize(("threads", "piece"), [(1, 1), (2, 7), (3, 4096)])
def test_18_pieces_of_any_size_make_up_the_file(tmp_path, threads, piece):
    (tmp_path / "file").write_bytes(bytes(i * 7 % 251 for i in range(1000)))
    with FileReader(torch.device("cpu"), num_threads=threads, piece_bytes=piece) as reader:
        out = torch.empty(900, dtype=torch.uint8)
        reader.read(tmp_path / "file", 100, out)
        assert out.tolist() == [i * 7 % 251 for i in range(100, 1000)]
        with pytest.raises(EOFError, match="the file ends at byte 1000"):
            reader.read(tmp_path / "file", 101, out)


def test_18_a_file_that_is_cut_off_while_it_is_loaded_is_named(tmp_path):
    save_file({"one": torch.ones(1 << 19)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, dtype=torch.float32, device=torch.device("cpu"), threads=2) as source:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(1 << 20)
        with pytest.raises(ConfigError, match="tensor one cannot be read: the file ends at byte 1048576"):
            source.take("one", (1 << 19,))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_part_of_a_tensor_is_read_alone(tmp_path, monkeypatch, threads):
    """As whole tensors, of every dtype, by rows and by columns: of rows that are read by their place only those bytes."""
    monkeypatch.setattr(checkpoint, "_LEAST_READ_BYTES", 16)
    kinds = (torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.float8_e4m3fn)
    stored = {str(kind): (torch.randn(12, 6) * 9).to(kind) for kind in kinds}
    save_file(stored, tmp_path / "model.safetensors")
    sizes, read = [], FileReader.read

    def noted(reader, path, offset, out):
        sizes.append(out.nbytes)
        read(reader, path, offset, out)

    monkeypatch.setattr(FileReader, "read", noted)
    cuts = [(slice(4, 8),), (slice(0, 12), slice(3, 6)), (slice(6, 9), slice(0, 2)), (slice(None), slice(0, 6)), ()]
    for where in cuts:
        with Checkpoint(tmp_path, dtype=torch.float32, device=torch.device("cpu"), threads=threads) as source:
            for name, tensor in stored.items():
                part = source.take(name, (12, 6), as_stored=True, where=where)
                assert torch.equal(part.view(torch.uint8), tensor[where].contiguous().view(torch.uint8))
                assert part.untyped_storage().nbytes() == part.nbytes, "of its own"
            source.finish()
    assert len(sizes) == (3 * len(kinds) if threads else 0)
    assert min(sizes, default=24) == 24, "four rows of six bytes"


def test_a_part_of_a_tensor_of_another_shape_is_refused(tmp_path):
    save_file({"a": torch.zeros(12, 6)}, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path, dtype=torch.float32, device=torch.device("cpu")) as source,
        pytest.raises(ConfigError, match=r"tensor a has shape \(12, 6\), where config.json asks for \(12, 8\)"),
    ):
        source.take("a", (12, 8), where=(slice(0, 6),))
