"""peft's folders: what an adapter's id depends on, and what is refused by the name of its field."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from diptych.common.adapters.peft import read_adapter
from diptych.common.errors import AdapterError, from_reason
from diptych.common.request import is_adapter_id

Q, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qv")
CONFIG = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none", "use_rslora": False,
    "base_model_name_or_path": "some/model", "lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM",
    "megatron_core": "megatron.core", "qalora_group_size": 16, "init_lora_weights": True, "use_dora": False,
}  # fmt: skip


def tensors_of(*modules, rank=4, seed=0):
    rng = np.random.default_rng(seed)
    out = {}
    for module in modules or (Q, V):
        out[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, 6), dtype=np.float32)
        out[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((10, rank), dtype=np.float32)
    return out


@pytest.fixture
def write(tmp_path):
    """write(tensors, **changed fields) -> folder."""

    def make(tensors=None, **changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
        save_file(tensors_of() if tensors is None else tensors, folder / "adapter_model.safetensors")
        return folder

    return make


def test_facts(write):
    facts = read_adapter(write())
    assert is_adapter_id(facts.id)
    assert (facts.rank, facts.base_model, facts.num_bytes) == (4, "some/model", 2 * (24 + 40) * 4)
    assert [(m.name, m.rank, m.scale, m.inputs, m.outputs) for m in facts.modules] == [
        (Q, 4, 2.0, 6, 10),
        (V, 4, 2.0, 6, 10),
    ]


def test_the_id_is_what_it_computes_and_not_where_or_how_it_was_made(write):
    first = read_adapter(write()).id
    assert read_adapter(write(lora_dropout=0.3, base_model_name_or_path="other", task_type=None)).id == first
    assert read_adapter(write(target_modules=r".*\.(q|v)_proj")).id == first
    assert (
        read_adapter(write(r=8, lora_alpha=9, rank_pattern={"self_attn.*": 4}, alpha_pattern={"[qv]_proj": 8})).id
        == first
    )
    flipped = tensors_of()
    flipped[f"base_model.model.{V}.lora_B.weight"][9, 3] = np.nextafter(
        flipped[f"base_model.model.{V}.lora_B.weight"][9, 3], 9
    )
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors_of().items()}
    others = [
        write(lora_alpha=9),
        write(use_rslora=True),
        write(alpha_pattern={"q_proj": 9}),
        write(flipped),
        write(halves),
        write(tensors_of(Q)),
        write(tensors_of(Q, V.replace("0", "1"))),
    ]
    ids = [read_adapter(folder).id for folder in others]
    assert len({first, *ids}) == 1 + len(others)


def test_layers_are_found_as_peft_finds_them(write):
    for fields in ({}, {"layers_pattern": "layers"}, {"layers_pattern": ["h", r"model\.layers"]}):
        assert len(read_adapter(write(layers_to_transform=[0, 3], **fields)).modules) == 2
        with pytest.raises(AdapterError, match="which target_modules leaves out"):
            read_adapter(write(layers_to_transform=1, **fields))
    with pytest.raises(AdapterError, match="which target_modules leaves out"):
        read_adapter(write(layers_to_transform=0, layers_pattern="h"))


def test_scales_are_peft_s(write):
    """rsLoRA divides by the root of the rank; the first pattern that matches counts, at the end of a module's name."""
    scales = [module.scale for module in read_adapter(write(use_rslora=True)).modules]
    assert scales == [8 / math.sqrt(4)] * 2
    mixed = tensors_of(Q) | tensors_of(V, rank=2)
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"0.self_attn.q_proj": 6, ".*": 3}}
    assert [(m.rank, m.scale) for m in read_adapter(write(mixed, **patterns)).modules] == [(4, 6 / 4), (2, 3 / 2)]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"of_a_later_peft": True}, "of_a_later_peft"),
        ({"r": 0}, "r"),
        ({"r": 4.5}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": -(10**400)}}, "alpha_pattern"),
        ({"r": 10**400}, "r"),
        ({"r": 10**300}, "r"),
        ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"layers_to_transform": [0, True]}, "layers_to_transform"),
        ({"layers_to_transform": [10**400]}, "target_modules"),
        ({"target_modules": "(.|.|.|.)*!"}, "target_modules"),
        ({"target_modules": r"(.)\1"}, "target_modules"),
        ({"alpha_pattern": {"a" * 9000: 4}}, "alpha_pattern"),
        ({"rank_pattern": {str(number): 4 for number in range(70_000)}}, "rank_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": "(.|.)*"}, "layers_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": [3]}, "layers_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": ["layers"] * 65}, "layers_pattern"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"layers_to_transform": [1]}, "target_modules"),
        ({"r": 8}, f"base_model.model.{Q}.lora_A.weight"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(write, changes, param):
    with pytest.raises(AdapterError) as error:
        read_adapter(write(**changes))
    assert error.value.param == param
    assert param in str(error.value) or param == "target_modules"
    assert isinstance(from_reason(error.value.reason, "m"), AdapterError), "it crosses the wire as what it is"


@pytest.mark.parametrize(
    ("name", "shape", "param"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 6), "target_modules"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 6), "target_modules"),
        (f"base_model.model.{Q}.lora_magnitude_vector", (10,), "use_dora"),
        (f"base_model.model.{Q}.base_layer.bias", (10,), f"base_model.model.{Q}.base_layer.bias"),
        (f"base_model.model.{Q}2.lora_A.weight", (4, 6), f"base_model.model.{Q}2.lora_B.weight"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_lora_of_a_linear_layer_are_refused_by_their_name(write, name, shape, param):
    with pytest.raises(AdapterError) as error:
        read_adapter(write({**tensors_of(), name: np.zeros(shape, np.float32)}))
    assert error.value.param == param


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_no_number_is_refused_in_every_dtype(write, dtype):
    bits = {"F32": np.uint32(0xFF800000), "F16": np.uint16(0x7C01), "BF16": np.uint16(0x7F80)}[dtype]
    data = np.zeros((4, 6), bits.dtype)
    data[2, 5] = bits
    name, folder = f"base_model.model.{Q}.lora_A.weight", write()
    entries = {name: {"dtype": dtype, "shape": [4, 6], "data_offsets": [0, data.nbytes]}}
    entries[name.replace("_A", "_B")] = {"dtype": dtype, "shape": [6, 4], "data_offsets": [0, data.nbytes]}
    header = json.dumps(entries).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    with pytest.raises(AdapterError) as error:
        read_adapter(folder)
    assert error.value.param == name


@pytest.mark.parametrize("shape", [[10**4000] * 200, [True, 6], [4, 6] + [1] * 7, [-4, -6], [4.0, 6], "46"])
def test_a_shape_that_is_none_is_refused_before_it_is_computed_with(write, shape):
    folder = write()
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 96]}
    header = json.dumps({f"base_model.model.{Q}.lora_A.weight": entry}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(96))
    with pytest.raises(AdapterError, match="no shape") as error:
        read_adapter(folder)
    assert error.value.param == "adapter_model.safetensors"


def test_names_that_no_message_can_carry_are_refused_or_left_out(write):
    for name in ("model.\n.q_proj", "a" * 600):
        with pytest.raises(AdapterError, match="printable characters") as error:
            read_adapter(write(tensors_of(name)))
        str(error.value).encode()
    assert read_adapter(write(base_model_name_or_path="\ud800")).base_model == ""
    assert read_adapter(write(base_model_name_or_path="m" * 9999)).base_model == "m" * 512


def test_a_rank_above_the_maximum_is_refused_with_the_numbers(write):
    with pytest.raises(AdapterError, match=r"rank 4 of .*q_proj is above the maximum of 3"):
        read_adapter(write(), max_rank=3)


def test_files_that_are_missing_or_broken(write, tmp_path):
    with pytest.raises(AdapterError, match=r"no adapter_config.json can be read"):
        read_adapter(tmp_path / "nowhere")
    folder = write()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is not read: save the adapter as safetensors"):
        read_adapter(folder)
    whole = (write() / "adapter_model.safetensors").read_bytes()
    for broken in (b"", whole[:7], whole[:40], whole[:-1], b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:]):
        (folder / "adapter_model.safetensors").write_bytes(broken)
        with pytest.raises(AdapterError) as error:
            read_adapter(folder)
        assert error.value.param == "adapter_model.safetensors"
    for text in ("{", "[]", "1"):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterError) as error:
            read_adapter(folder)
        assert error.value.param == "adapter_config.json"
    empty = write({})
    with pytest.raises(AdapterError, match="holds no tensor"):
        read_adapter(empty)
