"""The doctor's verdicts: a healthy cluster has none that is bad, and each fault is named with a next step."""
# ruff: noqa: E501 - a table of faults reads better with one row a line

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from diptych.cli.doctor.command import CHECKS, as_json, examine, is_bad, lines_of, run_doctor
from diptych.cli.doctor.facts import Facts, Gpu, Host, Worker
from diptych.cli.doctor.serving import utilization
from diptych.cli.doctor.verdict import Level, Verdict
from diptych.common.block_identity import IdentityHeader, identity_facts
from diptych.common.store.interface import StoreError
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.cluster.compatibility import RouterCheck
from diptych.worker.visible_gpus import OTHER_NODE

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "native",
    "compiler": "/usr/bin/cc",
    "threads": "1",
    "max_num_seqs": "64",
    "slab_bytes": "4194304",
    "num_slabs": "8",
}
HOST = Host(
    hostname="one", cpus=8, load_1m=1.0, open_files=40, max_open_files=16384, shm_bytes=2**30, shm_free_bytes=2**30
)


def stage(p50: float, p95: float | None = None) -> dict[str, Any]:
    return {"count": 20, "p50": p50, "p95": p95 or p50}


STATUS: dict[str, Any] = {
    "ready": True,
    "reasons": [],
    "cluster": {"workers": [{"id": "p0", "index_mode": "EXACT"}, {"id": "d0", "index_mode": "EXACT"}], "incompatible": []},
    "stages": {
        "tokenize": stage(0.001), "queue": stage(0.01), "prefill": stage(0.2), "transfer": stage(0.01),
        "decode": stage(1.0), "second_token": stage(0.03),
    },
    "counters": {"placements": {"remote": 90.0, "local": 10.0}, "fallbacks": {}, "prefill_faults": {}, "request_errors": {}},
}  # fmt: skip
PREFILL = Worker(
    "p0", "prefill", path="ucx:tcp", bytes_per_s=2e9, settings=SETTINGS, host=HOST,
    before={"computed_tokens_total": 0.0},
    after={"computed_tokens_total": 300.0, "prefill_tokens_per_s": 200.0, "prompt_tokens_total": 9000, "cached_tokens_total": 900},
)  # fmt: skip
DECODE = Worker(
    "d0", "decode", path="ucx:tcp", bytes_per_s=2e9, links={"p0": 1.5e9}, settings=SETTINGS, host=HOST, slabs_total=8,
    before={"steps": 0.0, "generation_tokens_total": 0.0},
    after={"kv_bytes_received": 1e8, "steps": 60.0, "generation_tokens_total": 500.0, "decode_step_s": 0.03, "num_running": 9.0},
)  # fmt: skip


def facts(prefill: Worker = PREFILL, decode: Worker = DECODE, **status: Any) -> Facts:
    return Facts({**STATUS, **status}, [prefill, decode], 3.0)


def moved(worker: Worker, **after: float) -> Worker:
    return replace(worker, after={**worker.after, **after})


def judged(found: Facts, check: str) -> list[Verdict]:
    return [verdict for verdict in examine(found) if verdict.check == check]


def worst(found: Facts, check: str) -> Verdict:
    order = [Level.OK, Level.INFO, Level.UNKNOWN, Level.WARN, Level.BAD]
    return max(judged(found, check), key=lambda verdict: order.index(verdict.level))


def test_a_healthy_cluster_gets_good_verdicts() -> None:
    verdicts = examine(facts())
    assert {v.level for v in verdicts} <= {Level.OK, Level.INFO}, lines_of(verdicts)
    assert not is_bad(verdicts)
    named = {v.check for v in verdicts}
    assert {
        "transport",
        "batch",
        "preemptions",
        "cache",
        "time",
        "tokenizer",
        "kv",
        "clock",
        "limits",
        "rdma",
        "balance",
    } <= named


def test_an_incompatible_pair_is_one_verdict_though_the_router_names_it_among_its_reasons() -> None:
    pair = "p0 and d0 are incompatible: block_size: prefill 16, decode 32"
    why = ["block_size: prefill 16, decode 32"]
    found = facts(
        reasons=[pair, "d1 does not answer"], cluster={"incompatible": [{"prefill": "p0", "decode": "d0", "why": why}]}
    )
    said = [v.finding for v in examine(found) if v.check == "cluster" and v.level is Level.BAD]
    assert said == ["d1 does not answer", pair]


GPU = {**SETTINGS, "device": "cuda:0"}
RANKS = {**GPU, "tensor_parallel_size": "2", "rank_gpus": "2", "rank_link": "NVLink"}
RDMA = replace(HOST, rdma_devices=("mlx5_0",))
ONE_PROCESS = {
    **STATUS,
    "model": "tiny",
    "one_process": True,
    "cluster": {"workers": [{"id": "local", "role": "decode", "address": "127.0.0.1:1", "index_mode": "EXACT"}]},
}
LORA = {**SETTINGS, "enable_lora": "True", "max_loras": "2"}
TAKING_PREFILL = moved(replace(PREFILL, settings=LORA), adapters_in_slots=2.0, adapter_installs=3.0)
TAKING = moved(replace(DECODE, settings=LORA), adapters_in_slots=2.0, adapter_installs=1.0)
SHORT = moved(TAKING, adapter_installs=4.0, adapter_evictions=4.0)
HOST_TIER = {**SETTINGS, "num_host_blocks": "100", "preemption_mode": "auto"}


@pytest.mark.parametrize(
    ("check", "level", "words", "found"),
    [
        ("cluster", Level.BAD, "does not answer", facts(reasons=["d0 does not answer"], ready=False)),
        ("cluster", Level.BAD, "are incompatible: block_size", facts(cluster={"incompatible": [{"prefill": "p0", "decode": "d0", "why": ["block_size"]}]})),
        ("cluster", Level.UNKNOWN, "cannot be reached", facts(decode=Worker("d0", "decode", "d0:50051", "UNAVAILABLE"))),
        ("cluster", Level.BAD, "d0 is not running: nothing listens at d0:50051", facts(decode=Worker("d0", "decode", "d0:50051", "UNAVAILABLE: connect: Connection refused (111)"))),
        ("cluster", Level.BAD, "7 of 8 blocks", facts(decode=replace(DECODE, violations=("7 of 8 blocks",)))),
        ("transport", Level.BAD, "ib_uverbs", facts(decode=replace(DECODE, settings=GPU, host=replace(HOST, rdma_missing=("kernel module ib_uverbs is not loaded",))))),
        ("transport", Level.WARN, "20.0 MB/s", facts(decode=replace(DECODE, bytes_per_s=20e6))),
        ("rdma", Level.WARN, "mlx5_0", facts(decode=replace(DECODE, host=replace(HOST, hostname="two", rdma_devices=("mlx5_0",))))),
        ("cluster", Level.BAD, "the same --secret-file", facts(reasons=["d0 block identity: worker 1, router 2 (another cluster secret or version)"])),
        ("cluster", Level.BAD, "is Redis up", facts(reasons=["the store is unavailable, the view of the cluster may be stale (redis: ConnectionError: x)"])),
        ("cluster", Level.BAD, "cannot write its lease", facts(reasons=["d0 has no lease"])),
        ("kernels", Level.WARN, "apt-get install gcc", facts(decode=replace(DECODE, settings={**SETTINGS, "kernels": "torch", "compiler": ""}))),
        ("kernels", Level.WARN, "see its log for why", facts(decode=replace(DECODE, settings={**SETTINGS, "kernels": "torch"}))),
        ("kernels", Level.WARN, "which unpacks quantized weights in every step", facts(decode=replace(DECODE, settings={**SETTINGS, "kernels": "torch", "method": "int4"}))),
        ("kernels", Level.WARN, "head_dim 24 is no multiple", facts(decode=replace(DECODE, settings={**SETTINGS, "kernels": "torch", "kernels_refused": "native refuses layer 0 to layer 2: head_dim 24 is no multiple of 32"}))),
        ("kernels", Level.WARN, "some blocks with plain torch: native (embedding, layer 0), torch (layer 1, head)", facts(decode=replace(DECODE, settings={**SETTINGS, "kernels": "native (embedding, layer 0), torch (layer 1, head)", "kernels_refused": "x"}))),
        ("kernels", Level.WARN, "uses the numpy lookup of prompts: there is no C compiler", facts(lookup={"backend": "numpy", "wanted": "auto", "compiler": ""})),
        ("kernels", Level.OK, "all native libraries", facts(lookup={"backend": "numpy", "wanted": "numpy", "compiler": ""})),
        ("link", Level.INFO, "(almost) idle during the sample", facts(decode=moved(replace(DECODE, links={"p0": 1e6}), kv_bytes_received=0.0))),
        ("link", Level.WARN, "reads from p0", facts(decode=replace(DECODE, links={"p0": 1e8}))),
        ("link", Level.WARN, "3 of 8 slabs are quarantined", facts(decode=replace(DECODE, slabs_quarantined=3))),
        ("clock", Level.WARN, "+5.0 s", facts(decode=replace(DECODE, host=replace(HOST, clock_ahead_s=5.0, clock_error_s=0.1)))),
        ("clock", Level.BAD, "-3600.0 s", facts(decode=replace(DECODE, host=replace(HOST, clock_ahead_s=-3600.0)))),
        ("clock", Level.OK, "agree", facts(decode=replace(DECODE, host=replace(HOST, clock_ahead_s=5.0, clock_error_s=4.5)))),
        ("limits", Level.WARN, "of 256 open files", facts(decode=replace(DECODE, host=replace(HOST, max_open_files=256)))),
        ("limits", Level.BAD, "may lock", facts(decode=replace(DECODE, path="ucx:rc", host=replace(HOST, memlock_bytes=65536)))),
        ("limits", Level.WARN, "/dev/shm", facts(decode=replace(DECODE, host=replace(HOST, shm_free_bytes=2**20)))),
        ("cores", Level.WARN, "16 compute threads", facts(PREFILL, replace(DECODE, settings={**SETTINGS, "threads": "15"}))),
        ("cores", Level.WARN, "load 20.0", facts(replace(PREFILL, host=replace(HOST, load_1m=20.0)))),
        ("batch", Level.WARN, "6 wait", facts(decode=moved(DECODE, num_waiting=6.0))),
        ("batch", Level.WARN, "64 of 64 running", facts(decode=moved(DECODE, num_running=64.0))),
        ("batch", Level.INFO, "idle", facts(decode=moved(DECODE, steps=0.0))),
        ("preemptions", Level.BAD, "2 preemptions during", facts(decode=moved(DECODE, preemptions_total=2.0))),
        ("swap", Level.WARN, "no host tier", facts(decode=moved(DECODE, preemptions_total=2.0))),
        ("swap", Level.WARN, "always faster", facts(decode=replace(DECODE, settings=HOST_TIER, swap_from_tokens=math.inf))),
        ("swap", Level.OK, "from 40 tokens on", facts(decode=replace(DECODE, settings=HOST_TIER, swap_from_tokens=40.0))),
        ("swap", Level.WARN, "mode recompute", facts(decode=replace(DECODE, settings={**HOST_TIER, "preemption_mode": "recompute"}, swap_from_tokens=40.0))),
        ("kv", Level.WARN, "90%", facts(decode=moved(DECODE, kv_usage=0.9))),
        ("kv", Level.BAD, "99%", facts(decode=moved(DECODE, kv_usage=0.99))),
        ("cache", Level.WARN, "0% of 9,000 prompt tokens", facts(moved(PREFILL, cached_tokens_total=0.0))),
        ("cache", Level.WARN, "is GUESS", facts(cluster={"workers": [{"id": "d0", "index_mode": "GUESS"}]})),
        ("time", Level.BAD, "queue 900 ms", facts(stages={**STATUS["stages"], "queue": stage(0.9)})),
        ("time", Level.WARN, "transfer 150 ms", facts(stages={**STATUS["stages"], "transfer": stage(0.15)})),
        ("time", Level.INFO, "transfer 150 ms, second token 30 ms, all after the first token 1000 ms (of 19 transfers: too few", facts(stages={**STATUS["stages"], "transfer": {**stage(0.15), "count": 19}})),
        ("time", Level.WARN, "longest gap between tokens 2500 ms", facts(stages={**STATUS["stages"], "transfer": {**stage(0.15), "count": 1}, "longest_gap": stage(0.1, 2.5)})),
        ("time", Level.WARN, "longest gap between tokens 2500 ms", facts(stages={**STATUS["stages"], "longest_gap": stage(0.1, 2.5)})),
        ("time", Level.OK, "all after the first token 1000 ms", facts()),
        ("time", Level.INFO, "no request", facts(stages={})),
        ("tokenizer", Level.WARN, "p95 200 ms", facts(stages={**STATUS["stages"], "tokenize": stage(0.01, 0.2)})),
        ("balance", Level.WARN, "prefill was busy 100%, decode 5%", facts(moved(PREFILL, computed_tokens_total=590.0 + 10), moved(DECODE, steps=5.0))),
        ("balance", Level.WARN, "turn a prefill worker", facts(moved(PREFILL, computed_tokens_total=10.0), moved(DECODE, steps=95.0))),
        ("balance", Level.INFO, "no rates", facts(moved(PREFILL, prefill_tokens_per_s=0.0))),
        ("fallbacks", Level.BAD, "7 to local_prefill", facts(counters={**STATUS["counters"], "fallbacks": {"local_prefill": 7.0}, "prefill_faults": {"WORKER_LOST": 7.0}})),
        ("fallbacks", Level.OK, "but for 7 whose worker was drained", facts(counters={**STATUS["counters"], "fallbacks": {"local_prefill": 7.0}, "prefill_faults": {"WORKER_DRAINED": 7.0}})),
        ("fallbacks", Level.WARN, "8 to local_prefill", facts(counters={**STATUS["counters"], "fallbacks": {"local_prefill": 8.0}, "prefill_faults": {"WORKER_DRAINED": 7.0, "WORKER_LOST": 1.0}})),
        ("transport", Level.WARN, "less than 5.0 GB/s", facts(decode=replace(DECODE, path="nixl:cuda_ipc", settings=GPU))),
        ("rdma", Level.INFO, "no RDMA device on these hosts", facts(replace(PREFILL, host=replace(HOST, rdma_missing=("kernel module ib_uverbs is not loaded",))))),
        ("rdma", Level.OK, "faster than TCP", facts(replace(PREFILL, path="nixl:rc", host=RDMA), replace(DECODE, path="nixl:rc", host=RDMA))),
        ("preemptions", Level.WARN, "0 preemptions during the sample, 9 since", facts(decode=replace(DECODE, before=dict(DECODE.before) | {"preemptions_total": 9.0}, after=dict(DECODE.after) | {"preemptions_total": 9.0}))),
        ("ranks", Level.OK, "d0: 2 ranks (tensor parallel 2, pipeline 1) on CPU cores", facts(decode=replace(DECODE, settings={**SETTINGS, "tensor_parallel_size": "2"}))),
        ("ranks", Level.OK, "NVLink between their GPUs", facts(decode=replace(DECODE, settings=RANKS))),
        ("ranks", Level.OK, "PCIe between their GPUs", facts(decode=replace(DECODE, settings={**RANKS, "tensor_parallel_size": "1", "pipeline_parallel_size": "2", "rank_link": "PCIe"}))),
        ("ranks", Level.INFO, "NVML does not say", facts(decode=replace(DECODE, settings={**RANKS, "rank_link": ""}))),
        ("ranks", Level.WARN, "what they exchange in every layer goes over PCIe", facts(decode=replace(DECODE, settings={**RANKS, "rank_link": "PCIe"}))),
        ("ranks", Level.WARN, "in every layer crosses NUMA nodes", facts(decode=replace(DECODE, settings={**RANKS, "rank_link": OTHER_NODE}))),
        ("ranks", Level.WARN, "on 1 GPUs: ranks that share one", facts(decode=replace(DECODE, settings={**RANKS, "rank_gpus": "1"}))),
        ("ranks", Level.OK, "4 ranks (tensor parallel 2, pipeline 2), 2 on each of 2 hosts, NVLink between", facts(decode=replace(DECODE, settings={**RANKS, "pipeline_parallel_size": "2", "nnodes": "2"}))),
        ("ranks", Level.OK, "2 ranks (tensor parallel 1, pipeline 2), 1 on each of 2 hosts", facts(decode=replace(DECODE, settings={**RANKS, "tensor_parallel_size": "1", "pipeline_parallel_size": "2", "nnodes": "2", "rank_gpus": "1", "rank_link": ""}))),
        ("ranks", Level.WARN, "1 on each of 2 hosts: what they exchange in every layer crosses the network", facts(decode=replace(DECODE, settings={**SETTINGS, "tensor_parallel_size": "2", "nnodes": "2"}))),
        ("cores", Level.WARN, "9 compute threads", facts(decode=replace(DECODE, settings={**SETTINGS, "tensor_parallel_size": "4", "pipeline_parallel_size": "2"}))),
        ("cores", Level.OK, "on 8 cores", facts(decode=replace(DECODE, settings={**SETTINGS, "tensor_parallel_size": "4", "pipeline_parallel_size": "2", "nnodes": "2"}))),
        ("transport", Level.OK, "d0: ucx:tcp at 2.0 GB/s", facts(decode=replace(DECODE, settings=RANKS))),
        ("swap", Level.INFO, "not measured yet", facts(decode=replace(DECODE, settings=HOST_TIER))),
        ("tokenizer", Level.OK, "p95 1 ms", facts()),
        ("balance", Level.WARN, "both pools", facts(moved(PREFILL, computed_tokens_total=590.0), moved(DECODE, steps=95.0))),
        ("fallbacks", Level.WARN, "2 to other_prefill", facts(counters={**STATUS["counters"], "fallbacks": {"other_prefill": 2.0}})),
        ("adapters", Level.OK, "p0: 2 of 2 slots in use, 3 installs and 0 evictions", facts(TAKING_PREFILL, TAKING)),
        ("adapters", Level.WARN, "d0: 2 of 2 slots in use, 4 installs and 4 evictions", facts(TAKING_PREFILL, SHORT)),
        ("adapters", Level.WARN, "1 registered, 3 requests wait for a slot", facts(TAKING_PREFILL, TAKING, adapters=[{"name": "poems"}], adapters_waiting=3)),
        ("adapters", Level.WARN, "raise --max-loras", Facts({**ONE_PROCESS, "adapters_waiting": 3, "adapters": [{"name": "poems"}]}, [])),
        ("adapters", Level.WARN, "p0 takes no adapters: the prompts", facts(decode=TAKING)),
        ("adapters", Level.BAD, "d0 takes no adapters: requests of adapters are not answered", facts(TAKING_PREFILL)),
        ("batch", Level.WARN, "for slots of their adapters: raise --max-loras", facts(TAKING_PREFILL, moved(SHORT, num_waiting=6.0))),
        ("time", Level.BAD, "for slots of their adapters: raise --max-loras", facts(TAKING_PREFILL, SHORT, stages={**STATUS["stages"], "queue": stage(0.9)})),
        ("time", Level.BAD, "for slots of their adapters: raise --max-loras", facts(TAKING_PREFILL, TAKING, adapters_waiting=3, stages={**STATUS["stages"], "queue": stage(0.9)})),
        ("time", Level.BAD, "add workers", facts(TAKING_PREFILL, TAKING, stages={**STATUS["stages"], "queue": stage(0.9)})),
        ("errors", Level.INFO, "of the requests themselves: 1 INVALID_ARGUMENT, 2 MODEL_NOT_FOUND, 4 PROMPT_TOO_LONG", facts(counters={**STATUS["counters"], "request_errors": {"MODEL_NOT_FOUND": 2.0, "INVALID_ARGUMENT": 1.0, "PROMPT_TOO_LONG": 4.0}})),
        ("errors", Level.WARN, "3 INTERNAL, 1 NEW_REASON, 2 QUOTA_EXCEEDED", facts(counters={**STATUS["counters"], "request_errors": {"INTERNAL": 3.0, "NEW_REASON": 1.0, "QUOTA_EXCEEDED": 2.0}})),
        ("errors", Level.WARN, "3 OVERLOADED", facts(counters={**STATUS["counters"], "request_errors": {"OVERLOADED": 3.0, "CLIENT_LEFT": 9.0}})),
    ],
)  # fmt: skip
def test_each_fault_is_named(check: str, level: Level, words: str, found: Facts) -> None:
    verdict = worst(found, check)
    assert verdict.level is level, lines_of(examine(found))
    assert any(words in v.finding or words in v.next_step for v in judged(found, check) if v.level is level)


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"threads": "15"}, "lower --threads, or spread the workers over more hosts"),
        ({"tensor_parallel_size": "8"}, "give workers fewer ranks, or spread the workers over more hosts"),
        ({"threads": "16", "pipeline_parallel_size": "8"}, "lower --threads, or give workers fewer ranks, or spread"),
    ],
)
def test_23_what_too_many_compute_threads_can_be_lowered_by(settings: dict[str, str], step: str) -> None:
    """Fewer --threads were advised where each rank had the one that it must have."""
    seen = facts(PREFILL, replace(DECODE, settings={**SETTINGS, "threads": "1", **settings}))
    [verdict] = judged(seen, "cores")
    assert verdict.next_step.startswith(step)


OK, INFO, WARN, BAD, UNKNOWN = Level.OK, Level.INFO, Level.WARN, Level.BAD, Level.UNKNOWN
CAN_BE = {
    (check, level)
    for check, levels in {
        "cluster": (OK, BAD, UNKNOWN), "time": (OK, INFO, WARN, BAD), "balance": (OK, INFO, WARN), "batch": (OK, INFO, WARN),
        "preemptions": (OK, WARN, BAD), "swap": (OK, INFO, WARN), "kv": (OK, WARN, BAD), "cache": (OK, WARN),
        "tokenizer": (OK, WARN), "adapters": (OK, WARN, BAD), "fallbacks": (OK, WARN, BAD), "errors": (INFO, WARN), "transport": (OK, WARN, BAD),
        "rdma": (OK, INFO, WARN), "link": (OK, INFO, WARN), "ranks": (OK, INFO, WARN), "kernels": (OK, WARN), "cores": (OK, WARN), "limits": (OK, WARN, BAD), "clock": (OK, WARN, BAD),
    }.items()
    for level in levels
}  # fmt: skip


def test_every_check_can_find_something() -> None:
    """No branch is dead: the table above has every pair of check and level in the code."""
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS) == 18
    table = next(mark for mark in test_each_fault_is_named.pytestmark if mark.name == "parametrize").args[1]
    asked = {(row[0], row[1]) for row in table} | {(v.check, v.level) for v in examine(facts())}
    assert asked >= CAN_BE, CAN_BE - asked


def test_utilization_is_work_over_rate() -> None:
    assert utilization(PREFILL, 3.0) == pytest.approx(300 / 600)
    assert utilization(DECODE, 3.0) == pytest.approx(60 * 0.03 / 3)
    assert utilization(moved(DECODE, decode_step_s=0.0), 3.0) is None


def test_json_and_lines_tell_the_same() -> None:
    verdicts = examine(facts(decode=moved(DECODE, kv_usage=0.99)))
    reported = json.loads(as_json(verdicts))
    assert reported["ok"] is False
    assert [row["finding"] for row in reported["verdicts"]] == [v.finding for v in verdicts]
    text = "\n".join(lines_of(verdicts))
    assert all(v.finding in text and v.next_step in text for v in verdicts)


def test_a_warning_needs_a_next_step() -> None:
    with pytest.raises(AssertionError):
        Verdict("kv", Level.WARN, "full")


def test_5_5_no_compiler_a_wrong_secret_and_redis_away_have_a_next_step_each() -> None:
    """With the real messages of router and workers."""
    identity = RouterCheck("m1", "t1", bytes(32))
    record = WorkerRecord(
        worker_id="d0", incarnation="a", role="decode", address="", pid=1, model="m", kv_bytes_per_token=1, num_blocks=1,
        block_size=16, max_model_len=16, max_num_seqs=1, event_epoch=0,
        compat={**identity_facts(IdentityHeader(bytes(32), "m1", "t1", "float32", 16)), "block_identity_golden": "00"},
    )  # fmt: skip
    away = (
        f"the store is unavailable, the view of the cluster may be stale ({StoreError('redis did not answer in 1 s')})"
    )
    no_compiler = replace(DECODE, settings={**SETTINGS, "kernels": "torch", "compiler": ""})
    steps = [
        worst(facts(reasons=[f"d0 {identity.why_not(record)}"]), "cluster").next_step,
        worst(facts(reasons=[away]), "cluster").next_step,
        worst(facts(decode=no_compiler), "kernels").next_step,
    ]
    for step, words in zip(steps, ("--secret-file", "--redis-url", "gcc"), strict=True):
        assert words in step
        assert sum(words in other for other in steps) == 1


def test_5_5_a_healthy_idle_cluster_has_no_warning() -> None:
    """Its links were last used by the first, small request, at a rate that is all fixed cost."""
    idle = moved(replace(DECODE, links={"p0": 2e6}), steps=0.0, num_running=0.0, kv_bytes_received=0.0)
    found = examine(facts(moved(PREFILL, computed_tokens_total=0.0), idle, stages={}))
    assert [verdict for verdict in found if verdict.level not in (Level.OK, Level.INFO)] == []


def test_a_healthy_server_of_one_process_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Its worker is not called: it accepts calls with a secret only that `diptych serve` has."""

    class Client:
        url = "http://h:1"

        def get(self) -> dict[str, Any]:
            return ONE_PROCESS

    class NoAccess:
        def open(self, address: str) -> Any:
            raise AssertionError(f"called {address}")

    client: Any = Client()
    access: Any = NoAccess()
    assert run_doctor(client, sample_s=0.0, json_out=False, access=access) == 0
    shown = capsys.readouterr().out
    assert "info    router       http://h:1 serves tiny\n" in shown
    assert "ok      cluster      one process, colocated\n" in shown
    assert {line.split()[0] for line in shown.splitlines()} <= {"ok", "info"}, shown
    assert judged(Facts(ONE_PROCESS, []), "balance") == []
    assert (
        worst(Facts({**ONE_PROCESS, "ready": False, "reasons": ["local does not answer"]}, []), "cluster").level is BAD
    )


CARD = Gpu(uuid="GPU-d", observed_s=10.0, busy_s=5.0, throttled_s={"hw_thermal": 1.0, "sw_power_cap": 0.0}, sm_clock_hz=1.98e9, max_sm_clock_hz=1.98e9, nvlinks=18, nvlink_bytes=10**9)  # fmt: skip
ON_GPU = replace(DECODE, path="ipc:cuda", bytes_per_s=2e11, settings=GPU, gpu_before=CARD)
PREFILL_ON_GPU = replace(PREFILL, path="ipc:cuda", bytes_per_s=2e11, settings=GPU, gpu_before=replace(CARD, uuid="GPU-p"), gpu=replace(CARD, uuid="GPU-p", observed_s=13.0, busy_s=8.0))  # fmt: skip


def card(busy_s: float = 3.0, **more: Any) -> Gpu:
    """The card after a sample of 3 s; `busy_s`: of it."""
    return replace(CARD, observed_s=13.0, busy_s=5.0 + busy_s, **more)


@pytest.mark.parametrize(
    ("check", "level", "words", "found"),
    [
        # 40% of the expected throughput: the steps take all the time, and the GPU works in 40% of it
        ("gpu", Level.WARN, "a kernel ran in 40% of the sample, at 1980 of 1980 MHz, though steps took 100%", facts(decode=replace(moved(ON_GPU, steps=100.0), gpu=card(1.2)))),
        ("gpu", Level.WARN, "though 4 requests wait there", facts(decode=replace(moved(ON_GPU, steps=10.0, num_waiting=4.0), before={**DECODE.before, "num_waiting": 5.0}, gpu=card(0.3)))),
        ("gpu", Level.OK, "a kernel ran in 10%", facts(decode=replace(moved(ON_GPU, steps=10.0), gpu=card(0.3)))),
        ("gpu", Level.OK, "a kernel ran in 97%", facts(decode=replace(moved(ON_GPU, steps=100.0), gpu=card(2.9)))),
        ("gpu", Level.INFO, "too short", facts(decode=replace(ON_GPU, gpu=replace(CARD, observed_s=10.2)))),
        ("gpu", Level.INFO, "NVML does not answer", facts(decode=replace(ON_GPU, gpu=None))),
        ("gpu clocks", Level.BAD, "held down in 90% of the sample by hw_thermal; 900 of 1980 MHz", facts(decode=replace(ON_GPU, gpu=card(sm_clock_hz=9e8, throttled_s={"hw_thermal": 3.7})))),
        ("gpu clocks", Level.WARN, "held down in 10% of the sample by hw_power_brake", facts(decode=replace(ON_GPU, gpu=card(throttled_s={"hw_power_brake": 0.3, "hw_thermal": 1.0})))),
        ("gpu clocks", Level.WARN, "by sw_power_cap; 1200 of 1980 MHz", facts(decode=replace(ON_GPU, gpu=card(sm_clock_hz=1.2e9, throttled_s={"sw_power_cap": 3.0})))),
        ("nvlink", Level.WARN, "1 MB over NVLink while it read 900 MB of KV (ipc:cuda): KV crosses PCIe instead of NVLink", facts(PREFILL_ON_GPU, replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card(nvlink_bytes=10**9 + 10**6)))),
        ("nvlink", Level.OK, "2 GB over NVLink", facts(PREFILL_ON_GPU, replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card(nvlink_bytes=3 * 10**9)))),
        ("nvlink", Level.INFO, "no active NVLink", facts(PREFILL_ON_GPU, replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card(nvlinks=0)))),
    ],
)  # fmt: skip
def test_18_5_what_the_gpu_says(check: str, level: Level, words: str, found: Facts) -> None:
    verdict = worst(found, check)
    assert verdict.level is level, verdict
    assert words in verdict.finding.replace(".0 ", " "), verdict.finding


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("gpu", facts()),
        # full load at the power limit, with clocks that are nearly the highest
        ("gpu clocks", facts(decode=replace(ON_GPU, gpu=card(sm_clock_hz=1.75e9, throttled_s={"sw_power_cap": 3.0, "hw_thermal": 1.0})))),
        # both roles on one GPU, another host, little KV, counters that the card does not have
        ("nvlink", facts(replace(PREFILL_ON_GPU, gpu=CARD), replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card()))),
        ("nvlink", facts(replace(PREFILL_ON_GPU, host=replace(HOST, hostname="two")), replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card()))),
        ("nvlink", facts(PREFILL_ON_GPU, replace(moved(ON_GPU, kv_bytes_received=1e6), gpu=card()))),
        ("nvlink", facts(PREFILL_ON_GPU, replace(moved(ON_GPU, kv_bytes_received=9e8), gpu=card(nvlink_bytes=None)))),
    ],
)  # fmt: skip
def test_18_5_what_is_no_finding(check: str, found: Facts) -> None:
    assert judged(found, check) == []


def test_18_5_a_gpus_link_is_not_compared_with_its_own_memory() -> None:
    """Two H200s: 48.6 GB/s of whole reads over NVLink, 412 GB/s within one of them."""
    healthy = replace(ON_GPU, bytes_per_s=412e9, links={"p0": 48.6e9}, gpu=card())
    assert worst(facts(PREFILL_ON_GPU, healthy), "link").level is Level.OK
    assert worst(facts(PREFILL_ON_GPU, replace(healthy, links={"p0": 4e9})), "link").level is Level.WARN
