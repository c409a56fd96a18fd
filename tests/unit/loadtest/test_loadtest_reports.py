from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
import xml.etree.ElementTree as ElementTree
from datetime import datetime
from html.parser import HTMLParser

import pytest

from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig, make_target
from diptych.loadtest.reports import csv as report_csv
from diptych.loadtest.reports import html as report_html
from diptych.loadtest.reports import json as report_json
from diptych.loadtest.reports import text as report_text
from diptych.loadtest.reports.html import sweep_charts
from diptych.loadtest.runs import compare, live
from diptych.loadtest.runs.result import begin_report, measure
from diptych.loadtest.runs.runner import Progress
from diptych.loadtest.runs.sweep import Point, conclude, sweep
from diptych.loadtest.runs.sweep_spec import SweepSpec

VLLM_KEYS = {
    *(
        "date",
        "backend",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
    ),
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *(
        "output_throughput",
        "total_token_throughput",
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "errors",
        "start_times",
    ),
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}


def config(**more) -> BenchConfig:
    return BenchConfig(
        **(
            {"num_requests": 12, "request_rate": 10.0, "output_len": "9", "input_len": "8", "label": "x", "seed": 7}
            | more
        )
    )


@pytest.fixture
def alternated(scripted, virtual):
    """A report of two targets, the second twice as slow, with tenants, cancellations and a refusal."""
    report = begin_report("compare", "A <against> B", datetime(2026, 1, 2, 3, 4, 5))
    chosen = config(cancel_rate=0.2, tenants="a,b")
    fast = scripted(label="fast")
    slow = scripted(label="slow", first_s=0.2, fault=lambda number: "refuse" if number == 5 else "")
    virtual(compare.alternate(report, ((fast, "m", chosen), (slow, "m", chosen)), 2, live.silent))
    return report


def test_alternation_and_ratio(alternated):
    assert [(run.label, run.round) for run in alternated.runs] == [("fast", 0), ("slow", 0), ("fast", 1), ("slow", 1)]
    assert alternated.runs[0].config.seed == alternated.runs[1].config.seed != alternated.runs[2].config.seed
    ttft = alternated.comparison.ratios[0]
    assert ttft.ratio == pytest.approx(2.0, rel=0.01)
    text = "\n".join(report_text.comparison_lines(alternated.comparison))
    assert "slow / fast" in text
    lines = "\n".join(line for run in alternated.runs for line in report_text.run_lines(run))
    assert "refused" in lines
    assert "WARNING: 1 of" in lines


def test_a_server_that_must_be_held_is_named_before_every_run(scripted, virtual):
    chosen = config()
    targets = (scripted(label="a"), scripted(label="b"))
    seen: list[tuple[int, int, int]] = []

    def attend(side: int) -> None:
        seen.append((side, len(targets[0].asks), len(targets[1].asks)))

    report = begin_report("compare", "t", datetime(2026, 1, 2, 3, 4, 5))
    pair = ((targets[0], "m", chosen), (targets[1], "m", chosen))
    virtual(compare.alternate(report, pair, 2, live.silent, attend=attend))
    sent = len(targets[0].asks) // 2  # warm-up included
    assert seen == [(0, 0, 0), (1, sent, 0), (0, sent, sent), (1, 2 * sent, sent)]


def test_json_has_the_fields_of_vllm_bench_serve(scripted, virtual, tmp_path):
    report = begin_report("serve", "t", datetime(2026, 1, 2, 3, 4, 5))
    chosen = config()
    report.runs.append(virtual(measure(scripted(), "m", chosen, chosen.items(), live.silent)))
    report_json.write(report, tmp_path / "r.json")
    body = json.loads((tmp_path / "r.json").read_text())
    assert body.keys() >= VLLM_KEYS
    assert body["date"] == "20260102-030405"
    assert body["median_ttft_ms"] == pytest.approx(100.0)
    assert body["mean_tpot_ms"] == pytest.approx(20.0)
    assert len(body["itls"]) == len(body["ttfts"]) == 12
    assert all(len(itl) == 8 for itl in body["itls"])
    ours = body["diptych"]
    assert ours["environment"].keys() >= {"git_hash", "cpu", "versions", "load_1m"}
    assert ours["seed"] == 7
    assert ours["summary"]["warmup_requests"] == 2


def test_json_of_several_runs_holds_them_all(alternated, tmp_path):
    report_json.write(alternated, tmp_path / "r.json")
    body = json.loads((tmp_path / "r.json").read_text())
    assert len(body["runs"]) == 4
    assert body["diptych"]["comparison"]["b"] == "slow"
    assert set(body["runs"][0]["diptych"]["tenants"]) == {"a", "b"}


def test_csv_has_a_row_for_every_request(alternated, tmp_path):
    report_csv.write(alternated, tmp_path / "r.csv")
    lines = (tmp_path / "r.csv").read_text().splitlines()
    assert [line[:2] for line in lines[:4]] == ["# "] * 4
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[4:]))))
    assert len(rows) == sum(len(run.records) for run in alternated.runs)
    whole = next(row for row in rows if row["outcome"] == "ok" and row["target"] == "slow")
    assert float(whole["ttft_ms"]) == pytest.approx(200.0)
    assert {row["outcome"] for row in rows} == {"ok", "cancelled", "refused"}


def test_html_stands_alone_and_is_well_formed(alternated, tmp_path):
    report_html.write(alternated, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "A &lt;against&gt; B" in page
    assert not any(mark in page for mark in ("<script", "src=", 'href="http', "@import"))
    for title in ("TTFT, share at or below", "Timelines, slow", "End to end", "Tenants"):
        assert title in page
    HTMLParser().feed(page)
    for part in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")  # ours, just made


def test_sweep_report(scripted, virtual, tmp_path):
    report = begin_report("sweep", "s", datetime(2026, 1, 2))
    search = SweepSpec(rates=(2.0, 4.0), point_s=3.0)
    found = virtual(sweep(report, scripted(), "m", config(slo="ttft:150"), search, live.silent))
    assert found.best_rate == 4.0
    assert [len([r for r in run.records if not r.warmup]) for run in report.runs] == [6, 12]
    report_html.write(report, tmp_path / "r.html")
    assert "Rate against goodput" in (tmp_path / "r.html").read_text()
    assert len(sweep_charts([found])) == 4
    report_json.write(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["diptych"]["sweeps"]["scripted"]["best_rate"] == 4.0
    assert "every rate held, up to 4.00 req/s: the limit is above it" in "\n".join(report_text.sweep_lines(found))


def test_a_seed_is_drawn_for_each_run_and_one_that_is_given_is_kept():
    drawn = {BenchConfig().seed for _ in range(5)}
    assert len(drawn) == 5
    assert min(drawn) >= 0
    assert dataclasses.replace(chosen := BenchConfig(), request_rate=2.0).seed == chosen.seed
    assert BenchConfig(seed=0).seed == 0
    with pytest.raises(ConfigError, match="seed"):
        BenchConfig(seed=-2)


def test_answers_from_a_warm_cache_are_named(scripted, virtual):
    def warnings(chosen: BenchConfig, cached_tokens: int | None) -> list[str]:
        target = scripted(cached_tokens=cached_tokens)
        run = virtual(measure(target, "m", chosen, chosen.items(), live.silent))
        return [text for text in run.warnings if "prefix cache" in text]

    assert warnings(config(), 0) == warnings(config(), None) == []
    (text,) = warnings(config(), 4)
    assert text.startswith("50% of the prompt tokens came from a prefix cache")
    assert "seed 7" in text
    assert warnings(config(workload="shared-prefix", prefix_len=4), 4) == []


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((1.0, 0.5), "highest rate that holds: 2.00 req/s"),
        ((1.0, 1.0), "every rate held, up to 4.00 req/s: the limit is above it"),
        ((0.5, 0.4), "no rate holds; the lowest tried was 2.00 req/s"),
        ((0.5, 1.0), "every rate held, up to 4.00 req/s: the limit is above it"),  # a lower one failed by accident
    ],
)
def test_a_sweep_names_a_highest_rate_only_where_a_higher_one_broke(kept, said):
    points = tuple(
        Point(rate, share, rate * share, 1.0, 0.1, 0.1, 0.1, 0.1, 0)
        for rate, share in zip((2.0, 4.0), kept, strict=True)
    )
    assert conclude("a", "ttft:150", 0.9, points).verdict == said


def test_a_pipe_gets_plain_lines():
    progress = Progress(total=10, done=4, running=2, failed=1, tokens=100, ttfts=[0.1, 0.3])
    assert (
        live.line("x", progress, 5.0) == "x: 4/10 done, 2 running, 1 failed, 20.0 tok/s, TTFT p50 200 ms (last 2), 5 s"
    )

    class Runner:
        def __init__(self):
            self.progress = progress

    out = io.StringIO()
    with live.watcher(out)("x", Runner()):
        pass
    assert out.getvalue().startswith("x: 4/10 done")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_live_view():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class Runner:
        progress = Progress(total=10, done=4)

    out = Terminal()
    with live.watcher(out)("x", Runner()):
        pass
    assert "4/10 done" in out.getvalue()


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("api", {"api": "soap"}),
        ("workload", {"workload": "nothing"}),
        ("dataset", {"workload": "azure"}),
        ("slo", {"slo": "x"}),
        ("request_rate", {"request_rate": 0.0}),
        ("max_concurrency", {"closed_loop": True}),
        ("prompt_form", {"prompt_form": "messages"}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("warmup", {"warmup": -1}),
    ],
)
def test_a_bad_setting_is_named(field, more):
    with pytest.raises(ConfigError) as error:
        config(**more)
    assert error.value.field == field


def test_targets_by_their_url():
    assert make_target("a=http://h:1/v1/", config()).url == "http://h:1"
    assert make_target("a=http://h:1", config()).label == "a"
    assert make_target("http://h:1/x?a=b", config()).label == "http://h:1/x?a=b"
    assert type(make_target("grpc://h:1", config())).__name__ == "GrpcTarget"
    with pytest.raises(ConfigError, match="target"):
        make_target("ftp://h", config())


def test_warm_up_shares_nothing_with_what_is_measured():
    chosen = config(prefix_len=32)
    prompts = {item.token_ids[:16] for item in chosen.items()}
    assert not prompts & {item.token_ids[:16] for item in chosen.warmup_items()}
    assert all(item.output_tokens <= 8 for item in config(output_len="uniform:20,90").warmup_items())
    assert dataclasses.replace(chosen, warmup=0).warmup_items() == []
    assert asyncio.iscoroutinefunction(measure)
