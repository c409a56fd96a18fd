"""The flags of `diptych bench`; what the commands do is tested with the harness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.bench import suite as bench_suite
from diptych.cli.bench import cluster as bench_cluster
from diptych.cli.bench import command as bench
from diptych.cli.bench import run as bench_run
from diptych.cli.bench.capacity import CapacityPlan
from diptych.cli.bench.config import ClusterChoice
from diptych.cli.bench.run import Place, Targets
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig


@pytest.fixture
def called(monkeypatch):
    """The calls that the commands would have made."""
    calls = []

    def keep(name):
        def run(*args, **kwargs):
            calls.append((name, args, kwargs))
            return 0

        return run

    monkeypatch.setattr(bench_run, "serve", keep("serve"))
    monkeypatch.setattr(bench_run, "sweep", keep("sweep"))
    return calls


def invoke(*arguments: str, code: int = 0):
    result = CliRunner().invoke(bench.build_app(), list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_serve_takes_a_target_or_starts_clusters(called):
    invoke("serve", "--target", "http://h:1", "--input-len", "uniform:1,9", "--request-rate", "inf", "--no-ignore-eos")
    invoke("serve", "--decode-workers", "2")
    (_, (config, given, rounds), _), (_, (_, own, _), _) = called
    assert (config.input_len, config.request_rate, config.ignore_eos, rounds) == ("uniform:1,9", float("inf"), False, 2)
    assert given.places == (Place("http://h:1"),)
    assert own == Targets.own(ClusterChoice(decode_workers=2))


def test_compare_and_sweep(called):
    invoke("compare", "a=http://h:1", "b=grpc://h:2", "--rounds", "5")
    invoke("sweep", "--target", "http://h:1", "--rates", "1,2.5", "--slo", "ttft:9")
    (_, (_, targets, rounds), kwargs), (name, (config, search, _), _) = called
    assert [place.text for place in targets.places] == ["a=http://h:1", "b=grpc://h:2"]
    assert (rounds, kwargs, name) == (5, {"kind": "compare"}, "sweep")
    assert (search.rates, config.slo) == ((1.0, 2.5), "ttft:9")


def test_replay_names_its_format(called):
    invoke("replay", "trace.jsonl", "--format", "mooncake", "--time-scale", "4", "--target", "http://h:1")
    config = called[0][1][0]
    assert (config.workload, config.dataset, config.time_scale, config.num_requests) == (
        "mooncake",
        Path("trace.jsonl"),
        4.0,
        0,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--target", "http://h:1", "--slo", "nonsense"),
        ("serve", "--request-rate", "0"),
        ("replay", "x", "--format", "nope", "--target", "http://h:1"),
        ("compare", "http://h:1"),
        ("sweep", "--step", "0.5"),
    ],
)
def test_wrong_usage_is_exit_code_2(called, arguments):
    invoke(*arguments, code=2)
    assert not called


def test_a_file_that_is_not_there_is_named_before_a_cluster_starts(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(bench_cluster, "running", lambda *args, **kwargs: started.append(args))
    config = BenchConfig(workload="mooncake", dataset=tmp_path / "no-such-trace.jsonl", num_requests=0)
    with pytest.raises(ConfigError, match="no-such-trace"):
        bench_run.serve(config, Targets.own(ClusterChoice()), 1, kind="replay")
    assert not started


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://h:1", "http://h:1"),
        ("a=http://h:1", "b=http://h:1/"),
        ("a=http://H:1", "http://h:1/v1"),
        ("grpc://h:2", "b=grpc://h:2"),
    ],
)
def test_one_server_is_not_compared_with_itself(first, second):
    with pytest.raises(ConfigError, match=r"^target='.*': is the same server as .*prefix cache"):
        Targets.given(first, second)


def test_two_servers_and_two_apis_of_one_are_compared():
    assert len(Targets.given("http://h:1", "http://h:2", "").places) == 2
    assert len(Targets.given("https://h:1", "http://g:1").places) == 2


def test_the_baseline_goes_first():
    given = Targets.given("new=http://h:1", "old=http://h:2").places
    assert [place.text for place in bench_run._baseline_first(given, "serve")] == ["old=http://h:2", "new=http://h:1"]
    assert bench_run._baseline_first(given, "compare") == given
    own = (Place("colocated=http://h:1", 2), Place("pd=http://h:2", 2))
    assert bench_run._baseline_first(own, "serve") == own


def test_capacity_keeps_every_stream_open_through_the_full_load():
    plan = CapacityPlan(2000, 5000.0, 4, 20.0)
    assert plan.streams / plan.script.token_s == pytest.approx(5000.0)
    assert (plan.output_tokens - 1) * plan.script.token_s >= plan.ramp_s + plan.duration_s - 2 * plan.script.token_s


def test_a_part_of_the_suite_that_fails_does_not_end_it(monkeypatch, tmp_path, capsys):
    def broken(*_: object) -> int:
        raise ConfigError("transport", "ucx", "is not there")

    for name in ("run_startup", "_harness", "_serving", "run_capacity", "run_router_bench"):
        monkeypatch.setattr(bench_suite, name, lambda *_: 0)
    monkeypatch.setattr(bench_suite.bench_kv, "run_kv", broken)
    monkeypatch.setattr(bench_suite, "_module", lambda name, *_: 3 if name.endswith("engine.scheduler") else 0)
    assert bench_suite.run_suite(tmp_path, 1.0) == 1
    parts = {part["part"]: part["exit_code"] for part in json.loads((tmp_path / "suite.json").read_text())["parts"]}
    assert parts == dict.fromkeys(("startup", "harness", "capacity", "serving", "router", "engine"), 0) | {
        "kv": 2,
        "scheduler": 3,
    }
    assert "FAILED or distorted: kv, scheduler" in capsys.readouterr().out
