"""`make quality`: every method has a row, every row a gate, and a ratio above it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.bench.engine import quality
from diptych.bench.engine.quality import BASE, GGUF, MODELS, RECIPES, Measured, Model, Row
from diptych.common.errors import ConfigError
from diptych.common.kv_format import COMPUTE_DTYPES, QUANTIZED_KV
from diptych.engine.exec.methods.registry import METHODS

RESULTS = sorted((Path(__file__).resolve().parents[3] / "bench" / "results").glob("quality-*.json"))


def test_every_method_and_dtype_has_rows_and_every_row_a_gate():
    assert set(METHODS) == {"plain", GGUF, *RECIPES}
    names = [row.name for row in quality.rows()]
    assert len(set(names)) == len(names)
    assert set(COMPUTE_DTYPES) <= set(names)
    assert {row.load["kv_cache_dtype"] for row in quality.rows() if row.load} == set(QUANTIZED_KV)
    for model in MODELS.values():
        assert {*model.gates, *model.left_out} == set(names)
        assert not set(model.gates) & set(model.left_out)
        assert all(1.0 <= gate < 1.6 for gate in model.gates.values())
    assert {name for model in MODELS.values() for name in model.gates} == set(names), "each row has a model"


def test_a_method_without_a_recipe_is_an_error(monkeypatch):
    monkeypatch.setattr(quality, "METHODS", {**METHODS, "int2": None})
    with pytest.raises(KeyError, match="int2"):
        quality.rows()


@pytest.mark.parametrize(("ratio", "gate", "passed"), [(1.01, 1.02, True), (1.03, 1.02, False), (1.0, None, False)])
def test_a_row_passes_below_its_gate_only(ratio, gate, passed):
    assert Measured("row", 20.0 * ratio, ratio, gate, 1.0).passed is passed


def run_with(monkeypatch, tmp_path, perplexities, models=None, *arguments) -> int:
    """`main` over a base and one row; what would be computed is given."""
    named = [Row(BASE), Row("other", dtype="float16")]
    monkeypatch.setattr(quality, "rows", lambda: named)
    models = models or {"tiny": Model("tiny", lambda: "tiny", {BASE: 1.0, "other": 1.05})}
    monkeypatch.setattr(quality, "MODELS", models)
    monkeypatch.setattr(quality, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr(quality, "model_fingerprint", lambda _: "revision")
    monkeypatch.setattr(quality, "ModelTokenizer", lambda _: None)
    text = quality.Text("text", "hash", (), ((1, 2, 3),))
    monkeypatch.setattr(quality, "read_text", lambda *_, **__: text)
    monkeypatch.setattr(quality, "perplexity", lambda folder, text, *, dtype, tick: perplexities[dtype])
    return quality.main(["--out", str(tmp_path), *arguments])


@pytest.mark.parametrize(("other", "code"), [(21.0, 0), (21.1, 1)])
def test_a_ratio_above_its_gate_fails_the_run(monkeypatch, tmp_path, capsys, other, code):
    assert run_with(monkeypatch, tmp_path, {"float32": 20.0, "float16": other}) == code
    written = json.loads((tmp_path / "quality-tiny.json").read_text())
    [run] = written["runs"]
    assert [(row["row"], row["ratio"], row["passed"]) for row in run["rows"]] == [
        (BASE, 1.0, True),
        ("other", other / 20.0, code == 0),
    ]
    assert ("above their gates: tiny: other" in capsys.readouterr().err) is (code == 1)


def test_a_row_that_a_model_leaves_out_is_named_with_the_reason_and_can_be_asked_for(monkeypatch, tmp_path, capsys):
    left_out = {"tiny": Model("tiny", lambda: "tiny", {BASE: 1.0}, {"other": "it is too large"})}
    perplexities = {"float32": 20.0, "float16": 20.0}
    assert run_with(monkeypatch, tmp_path, perplexities, left_out) == 0
    assert "tiny: other is left out: it is too large" in capsys.readouterr().out
    assert run_with(monkeypatch, tmp_path, perplexities, left_out, "--only", "other") == 1, "it has no gate"


@pytest.mark.parametrize(("gate", "code"), [(1.2, 0), (1.05, 1)])
def test_runs_are_merged_where_model_and_text_are_the_same_and_judged_again(monkeypatch, tmp_path, gate, code):
    monkeypatch.setattr(quality, "MODELS", {name: Model(name, lambda: "", {"a row": gate}) for name in ("a", "b")})
    row = {"row": "a row", "perplexity": 22.0, "ratio": 1.1, "gate": None, "passed": False, "seconds": 1.0}
    names = []
    for i, model in enumerate(("a", "a", "b")):
        names.append(tmp_path / f"{i}.json")
        names[-1].write_text(
            json.dumps({"model": {"name": model}, "text": "t", "runs": [{"surroundings": i, "rows": [row]}]})
        )
    assert quality.main(["--merge", *map(str, names[:2]), "--out", str(tmp_path / "out.json")]) == code
    judged = {**row, "gate": gate, "passed": code == 0}
    runs = [{"surroundings": i, "rows": [judged]} for i in range(2)]
    assert json.loads((tmp_path / "out.json").read_text()) == {"model": {"name": "a"}, "text": "t", "runs": runs}
    with pytest.raises(ConfigError, match="another model than"):
        quality.merged(names)


@pytest.mark.parametrize("key", MODELS)
def test_gates_follow_from_the_committed_results(key):
    model, records = MODELS[key], [json.loads(path.read_text()) for path in RESULTS]
    newest = [record for record in records if record["model"]["name"] == model.name][-1]
    found = {row["row"]: row for run in newest["runs"] for row in run["rows"]}
    assert set(found) == set(model.gates)
    for name, row in found.items():
        loss = row["ratio"] - 1.0
        margin = min(max(loss / 3, 0.005), 0.05) if name != BASE else 0.0
        assert model.gates[name] == pytest.approx(max(row["ratio"], 1.0) + margin, abs=0.002), name
        assert row["passed"] is True
