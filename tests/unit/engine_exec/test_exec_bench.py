from __future__ import annotations

import json

import pytest

from diptych.engine.exec.bench.bench_vs_transformers import Outcome, main, parse, ragged_prompts
from diptych.engine.exec.bench.report import make_row, table


def test_row_and_table():
    row = make_row("decode, batch 8", 1, [100.0, 50.0, 25.0], [50.0, 10.0, 12.5], same_ids=8, requests=8)
    assert (row.ours.median, row.ours.low, row.ours.high) == (50.0, 25.0, 100.0)
    assert row.ratio == 2.0
    assert "50.0 (25.0 - 100.0)" in table([row])


def test_decode_counts_from_the_last_first_token():
    outcome = Outcome([[1, 2, 3], [4, 5]], [[1.0, 2.0, 4.0], [3.0, 5.0]])
    assert outcome.prefill_s() == 3.0
    assert outcome.decode_rate() == 2 / (5.0 - 3.0)


def test_prompts_are_ragged_and_always_the_same():
    prompts = ragged_prompts(5, 4, 20, 320)
    assert sorted(map(len, prompts)) == [4, 8, 12, 16, 20]
    assert prompts == ragged_prompts(5, 4, 20, 320)


def test_quick_form_and_checks():
    assert parse(["--quick"]).threads == [1]
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])


def test_whole_bench_on_a_tiny_model(tiny_dir, tmp_path, capsys):
    sizes = ["--threads", "1", "--rounds", "2", "--batches", "3", "--prefill", "40", "--new-tokens", "4"]
    main(["--model", str(tiny_dir), "--out", str(tmp_path), "--longest-prompt", "30", *sizes])
    [path] = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [(r["scenario"], r["same_ids"]) for r in record["rows"]] == [("decode, batch 3", 3), ("prefill 40", 1)]
    assert record["machine"]["torch"]
    assert "prefill 40" in capsys.readouterr().out
