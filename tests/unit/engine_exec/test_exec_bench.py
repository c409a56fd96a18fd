from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from diptych.bench.engine.floors import Ceilings, Floor
from diptych.bench.engine.report import best_of, make_row, merge, read_rows, table
from diptych.bench.engine.vs_transformers import Outcome, main, parse, ragged_prompts
from diptych.engine.exec.models.registry import describe


def test_row_and_table():
    row = make_row("decode, batch 8", 1, [100.0, 50.0, 25.0], [50.0, 10.0, 12.5], floor=200.0, same_ids=8, requests=8)
    assert (row.ours.median, row.ours.low, row.ours.high) == (50.0, 25.0, 100.0)
    assert row.ratio == 2.0
    assert (row.share, row.their_share) == (0.25, 0.0625)
    assert "50.0 (25.0 - 100.0) 25%" in table([row])


def test_rounds_of_two_runs_are_put_together_and_each_side_gets_its_better_threads():
    one = make_row("a", 1, [10.0], [4.0], floor=50.0, same_ids=1, requests=1)
    more = make_row("a", 1, [30.0], [2.0], floor=60.0, same_ids=0, requests=1)
    two = make_row("a", 2, [15.0], [8.0], floor=90.0, same_ids=1, requests=1)
    rows = merge(read_rows(json.loads(json.dumps([asdict(one)]))), [more, two])
    assert (rows[0].our_rounds, rows[0].floor, rows[0].same_ids) == ([10.0, 30.0], 60.0, 0)
    [best] = best_of(rows)
    assert (best.our_threads, best.their_threads, best.ratio) == (1, 2, 20.0 / 8.0)


def test_floors_follow_from_bytes_and_flops():
    # 2 layers of 8 x (2 x 8 + 2 x 4) + 3 x 8 x 10 = 432 weights, 160 of the head.
    config = describe(
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": 8, "intermediate_size": 10,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5}
    )  # fmt: skip
    weights, query = 2 * 432 + 160, 4 * 2 * 8
    slow_memory = Floor(config, Ceilings(bytes_per_s=1.0, flops_per_s=1e30))
    assert slow_memory.decode_rate([5], [3]) == pytest.approx(1 / (4 * weights))
    assert slow_memory.whole_rate([5, 5], [2, 3]) == pytest.approx(5 / (4 * weights * 3))
    slow_math = Floor(config, Ceilings(bytes_per_s=1e30, flops_per_s=1.0))
    assert slow_math.decode_rate([5], [2]) == pytest.approx(1 / (2 * weights + query * 6))
    assert slow_math.prefill_rate([4]) == pytest.approx(4 / (2 * (864 * 4 + 160) + query * 10))


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
    sizes += ["--ragged", "4", "--shortest-output", "2", "--longest-output", "6"]
    path = tmp_path / "result.json"
    main(["--model", str(tiny_dir), "--out", str(path), "--longest-prompt", "30", *sizes])
    record = json.loads(path.read_text())
    assert [(r["scenario"], r["same_ids"]) for r in record["rows"]] == [
        ("decode, batch 3", 3), ("ragged, batch 4", 4), ("prefill 40", 1),
    ]  # fmt: skip
    assert record["runs"][0]["machine"]["versions"]["torch"]
    assert "prefill 40" in capsys.readouterr().out
