"""The weights' fingerprint from the loaded files to the handshake and the router (17: Checkpoints, Bad input)."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from diptych.common.block_identity import block_keys
from diptych.common.checkpoint.hashing import renew_manifest
from diptych.common.compat import as_strings, differences
from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret, load_secret
from diptych.common.store.worker_record import WorkerRecord
from diptych.engine.exec.formats.registry import FORMATS
from diptych.engine.exec.methods.registry import METHODS
from diptych.router.cluster.compatibility import pair_differences
from diptych.router.config import RouterConfig
from diptych.router.served_model import load_folders
from diptych.worker.config import WorkerConfig
from diptych.worker.model import LoadedModel, load_model
from diptych_tests import router_fleet
from diptych_tests.records import worker_record
from diptych_tests.scripts import load_script

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a tokenizer."""
    kit = load_script("tests/unit/engine_exec/conftest.py")
    folder: Path = kit.tiny_model_dir(tmp_path_factory.mktemp("made") / "model", "LlamaForCausalLM")
    tokenizer = router_fleet.make_model_folder(tmp_path_factory.mktemp("words") / "t")
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "chat")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedModel]:
    create_secret(tmp_path / "secret")

    def run(folder: Path, role: str = "decode", **settings: Any) -> LoadedModel:
        return load_model(
            WorkerConfig(
                model=str(folder),
                served_model_name="chat",
                role=role,
                secret_file=str(tmp_path / "secret"),
                num_blocks=24,
                backend="torch",
                grammar_backend="none",
                **settings,
            )
        )

    return run


def change_one_weight(folder: Path) -> None:
    """Its last bit."""
    file = folder / WEIGHTS
    raw = bytearray(file.read_bytes())
    [first] = struct.unpack("<Q", raw[:8])
    raw[8 + first] ^= 1
    file.write_bytes(raw)
    with safe_open(file, framework="pt") as opened:
        assert opened.keys()  # a good file still


def record_of(model: LoadedModel, worker_id: str) -> WorkerRecord:
    return worker_record(worker_id, role="decode", model="chat", compat=as_strings(model.compat), max_model_len=64)


def test_another_fine_tune_under_the_same_name_reuses_nothing_and_is_never_paired(
    folder: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    other = shutil.copytree(folder, tmp_path / "fine-tune")
    change_one_weight(other)
    prefill, same, tuned = load(folder, "prefill"), load(folder), load(other)
    assert differences(prefill.compat, same.compat) == []
    assert prefill.identity == same.identity
    mine, theirs = prefill.compat.model_revision, tuned.compat.model_revision
    for converting in (False, True):
        found = differences(prefill.compat, tuned.compat, converting=converting)
        assert f"model_revision: mine {mine}, theirs {theirs}" in found
    found = pair_differences(as_strings(prefill.compat), as_strings(tuned.compat))
    assert f"model_revision: prefill {mine}, decode {theirs}" in found
    tokens = list(range(320))
    assert not set(block_keys(prefill.identity, tokens)) & set(block_keys(tuned.identity, tokens))


@pytest.mark.parametrize("router_has", ["weights", "manifest", "tokenizer"])
def test_a_router_takes_the_fingerprint_from_its_workers_leases(
    folder: Path, tmp_path: Path, load: Callable[..., LoadedModel], router_has: str
) -> None:
    """It computes the keys of its workers, whatever lies in its own folder; what it knows of the weights it checks."""
    other = shutil.copytree(folder, tmp_path / "fine-tune")
    change_one_weight(other)
    here = shutil.copytree(folder, tmp_path / "router")
    if router_has != "weights":
        renew_manifest(here)
        (here / WEIGHTS).unlink()
    if router_has == "tokenizer":
        (here / "diptych-manifest.json").unlink()
    config = RouterConfig(model=str(here), served_model_name="chat", secret_file=str(tmp_path / "secret"))
    model, tuned = load(folder), load(other)
    [served] = load_folders(config, load_secret(tmp_path / "secret"))
    check = served.check
    assert check.header(record_of(model, "d0")) == model.identity
    if router_has == "tokenizer":
        assert check.header(record_of(tuned, "d1")) == tuned.identity
    else:
        theirs, mine = tuned.compat.model_revision, model.compat.model_revision
        assert check.why_not(record_of(tuned, "d1")) == f"model_revision: worker {theirs}, router {mine}"


def test_weights_that_differ_from_the_folders_manifest_are_never_served(
    folder: Path, load: Callable[..., LoadedModel]
) -> None:
    renew_manifest(folder)
    load(folder)
    change_one_weight(folder)
    with pytest.raises(ConfigError, match=f"{WEIGHTS}.*BLAKE3"):
        load(folder)
    with pytest.raises(ConfigError, match="verify_weights"):
        load(folder, verify_weights="never")


def test_weights_that_are_replaced_while_they_are_loaded_are_never_served(
    folder: Path, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.engine.exec.model_runner import TorchModelRunner

    original = TorchModelRunner.load

    def replaced(path: Path, **settings: Any) -> Any:
        loaded = original(path, **settings)
        change_one_weight(path)
        return loaded

    monkeypatch.setattr(TorchModelRunner, "load", replaced)
    with pytest.raises(ConfigError, match=f"{WEIGHTS}.*changed while it was loaded"):
        load(folder)


def test_the_method_of_quantized_weights_is_in_handshake_and_identity(
    folder: Path, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drill: it was `plain`, whatever the weights were."""
    of_a_test = load_script("tests/unit/engine_exec/quantized/test_exec_methods.py")
    monkeypatch.setitem(METHODS, "int8-rows", of_a_test.Int8RowsMethod())
    monkeypatch.setitem(FORMATS, "int8-rows", of_a_test.Int8RowsFormat())
    assert load(folder).compat.method == "plain"
    of_a_test.quantize(folder)
    quantized = load(folder)
    assert (quantized.compat.method, quantized.identity.method) == ("int8-rows", "int8-rows")
