"""Checks of the deployment files without a container engine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.cli.settings.merge import merge, read_file
from diptych.common.adapters.peft import AdapterFacts
from diptych.common.clock import MonotonicClock
from diptych.common.observe.metrics import Metrics
from diptych.common.observe.tracing import ENDPOINT_VARIABLES
from diptych.common.secret import load_secret
from diptych.engine.messages import LoadedAdapter
from diptych.engine.stats import ClaimStats, EngineStats, TierStats
from diptych.router.config import RouterConfig
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.requests.messages import GenerateEvent, ValidatedRequest
from diptych.router.requests.shadow import Shadows
from diptych.worker.adapters import AdapterLibrary
from diptych.worker.config import WorkerConfig
from diptych.worker.fake_nvml import UUID, FakeNvml
from diptych.worker.gpu import GpuMonitor
from diptych.worker.metrics import WorkerMetrics
from diptych.worker.rank_config import RankConfig
from diptych_tests.scripts import load_script

Parsed = Callable[[Sequence[str], Mapping[str, str]], Any]
ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
CLUSTER = {name: service for name, service in COMPOSE["services"].items() if "cpu" in service["profiles"]}
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
WORKERS = {name: service for name, service in CLUSTER.items() if name.startswith(("prefill", "decode"))}


def default(value: str) -> str:
    """A compose value with its variables at their defaults."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_images_hold_every_room_and_nothing_else() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    rooms = {link.name for link in (ROOT / "src" / "diptych").iterdir() if link.is_symlink()}
    assert set(re.findall(r"^COPY (\w+) /\1/$", dockerfile, re.M)) == (rooms - {"bench"}) | {"src"}
    assert "COPY . ." not in dockerfile


def test_the_default_model_is_made_from_what_its_stage_has(tmp_path: Path) -> None:
    """What fetches and converts it imports nothing of the rooms that the stage leaves out."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    stage = dockerfile.partition("FROM build AS model\n")[2].partition("\nFROM ")[0]
    rooms = re.findall(r"^COPY (\w+) \1$", stage, re.M)
    for room in rooms:
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True)
    command = re.search(r"python -m (diptych\.cli\.models\.\w+) smollm2", stage)
    assert command, stage
    code = f"import {command[1]}, diptych.cli.models.gguf_convert as late; print(late.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    printed = subprocess.check_output([sys.executable, "-P", "-c", code], text=True, env=env, cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(tmp_path)


def test_two_of_each_kind() -> None:
    kinds = sorted(name.partition("-")[0] for name in CLUSTER)
    assert kinds == ["decode", "decode", "prefill", "prefill", "redis", "router", "router"]


@pytest.mark.parametrize("name", CLUSTER)
def test_every_part_of_the_cluster_is_bounded(name: str) -> None:
    service = CLUSTER[name]
    assert service["init"]
    assert service["restart"] == "unless-stopped"
    assert {"test", "interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])
    assert "kv" in service["networks"]
    assert ("ports" in service) == name.startswith("router"), "only the routers are published"
    if name != "redis":
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_the_private_network_leads_nowhere() -> None:
    assert COMPOSE["networks"]["kv"]["internal"]
    assert all(service["networks"] == ["kv"] for service in [*WORKERS.values(), CLUSTER["redis"]])
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", ()):
            assert default(port).startswith("127.0.0.1:"), f"{name} is published beyond this machine by default"


@pytest.mark.parametrize("name", WORKERS)
def test_workers_get_settings_that_exist(name: str, parsed: Parsed) -> None:
    service = WORKERS[name]
    environment = {
        key: default(value) for key, value in service["environment"].items() if value and key != "DIPTYCH_CONFIG"
    }
    _, *flags = service["command"]
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {"--worker-id": name, "--host": name}
    assert service["hostname"] == name
    config = parsed(service["command"], environment)
    assert config.require_transport == "ucx:tcp"
    assert config.metrics_port == 9100
    assert service["healthcheck"]["test"][-1] == f"{name}:{config.port}"
    assert float(service["stop_grace_period"].rstrip("s")) >= config.drain_s + 10, "stopping must not cut the drain"


def test_5_1_no_container_asks_for_a_limit_that_an_engine_without_rights_cannot_give() -> None:
    assert [name for name, service in COMPOSE["services"].items() if "ulimits" in service] == []
    rdma = yaml.safe_load((ROOT / "deploy" / "compose.rdma.yaml").read_text())["services"]
    assert {name: service["ulimits"] for name, service in rdma.items()} == dict.fromkeys(GPU_WORKERS, {"memlock": -1})


@pytest.mark.parametrize(
    "name", [name for name in COMPOSE["services"] if name.startswith(("prefill", "decode", "router"))]
)
def test_5_1_what_is_set_for_traces_and_logs_is_passed_on(name: str) -> None:
    """A variable without a value is passed on if it is set; one with an empty value would be there, and empty."""
    passed = {key for key, value in COMPOSE["services"][name]["environment"].items() if value is None}
    assert {*ENDPOINT_VARIABLES, "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "DIPTYCH_LOG_LEVEL"} <= passed


def test_routers_get_settings_that_exist(parsed: Parsed) -> None:
    service = CLUSTER["router-0"]
    environment = {
        key: default(value) for key, value in service["environment"].items() if value and key != "DIPTYCH_CONFIG"
    }
    config = parsed(service["command"], environment)
    assert (config.http_port, config.grpc_port) == (8000, 50050)


def test_secrets_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make = load_script("deploy/make_secrets.py")
    assert len(make.make(folder)) == 5
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert make.make(folder) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "redis.acl").chmod(0o644)
    (folder / "redis.acl").write_text("user default off\n")  # the rights of an older version
    assert make.make(folder) == ["redis.acl"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert set(before) == {Path(default(secret["file"])).name for secret in COMPOSE["secrets"].values()}
    load_secret(folder / "cluster_secret")
    for role, cls in (("worker", WorkerConfig), ("router", RouterConfig)):
        url = merge(cls, {}, environ={}, file=read_file(folder / f"{role}.toml")).redis_url
        password = url.partition(":")[2].partition(":")[2].partition("@")[0]
        assert len(password) > 20
        assert password.encode() not in before["redis.acl"], "the server's file holds hashes only"


def test_the_boards_are_what_their_tables_say() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "grafana" / "make_boards.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run deploy/grafana/make_boards.py"
    written = {path.stem for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")}
    assert written == set(load_script("deploy/grafana/panels.py").BOARDS) == {"overview", "pd", "router", "tenants"}


async def _no_events(request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
    for event in ():
        yield event


def _read_nothing(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
    raise AssertionError("no adapter is loaded")


def registries() -> list[Metrics]:
    """Registries of a router with every option, and of a worker of each role."""
    stats = EngineStats(
        tiers=(TierStats("device", 1, 2), TierStats("disk", 1, 2, errors=(("ENOSPC", 1),))),
        claims=ClaimStats(by_rank=((0, 1),)),
    )
    workers = [WorkerMetrics(role, stats=lambda: stats, clock=MonotonicClock()) for role in ("prefill", "decode")]
    for metrics in workers:
        metrics.library = AdapterLibrary(
            "w", [], max_adapters=1, max_rank=1, timeout_s=1.0, read=_read_nothing, send=print, free_bytes=lambda: 0
        )
        metrics.adapter_loaded(0.1)
        metrics.describe_cache(block_size=16)
        metrics.gpu = GpuMonitor(UUID, FakeNvml())
        metrics.gpu.read_once()
    router = RouterMetrics(by_tenant=True)
    router.processes(2)
    Shadows(_no_events, router)
    return [router, *workers]


def series() -> dict[str, set[str]]:
    """Every family that a process registers, and its sample names."""
    found: dict[str, set[str]] = {}
    for metrics in registries():
        for family in metrics.registry.collect():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            found.setdefault(family.name, set()).update(family.name + suffix for suffix in suffixes)
    # from the transfer thread, which does not exist here
    for name in ("kv_transfer_bytes_total", "kv_expired_requests_total", "kv_slabs"):
        found.setdefault("diptych_" + name.removesuffix("_total"), set()).add("diptych_" + name)
    return found


def queries() -> list[tuple[str, str]]:
    boards = load_script("deploy/grafana/panels.py").BOARDS
    return [(title, query) for _, panels in boards.values() for title, _, each in panels for query, _ in each]


def test_every_panel_and_alert_asks_for_metrics_that_exist() -> None:
    known = set().union(*series().values())
    for title, query in queries() + [(rule["alert"], rule["expr"]) for rule in RULES]:
        names = set(re.findall(r"diptych_\w+", query))
        assert names or "up{" in query, title
        assert names <= known, title


VLLM = {
    "gauge": "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits prompt_tokens prompt_tokens_by_source prompt_tokens_cached "
    "generation_tokens request_success num_preemptions",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens "
    "request_generation_tokens iteration_tokens_total kv_block_lifetime_seconds kv_block_idle_before_evict_seconds "
    "kv_block_reuse_gap_seconds",
}
VLLM_BUCKETS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
}


def test_vllms_boards_fit_after_a_rename() -> None:
    """Stems, kinds and buckets are vLLM's."""
    kinds: dict[str, str] = {}
    buckets: dict[str, list[float]] = {}
    for metrics in registries():
        for family in metrics.registry.collect():
            name = family.name.removeprefix("diptych_")
            kinds[name] = family.type
            ends = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            buckets[name] = [end for end in ends if end != float("inf")]
    for kind, names in VLLM.items():
        assert {name: kinds.get(name) for name in names.split()} == dict.fromkeys(names.split(), kind)
    for name, ends in VLLM_BUCKETS.items():
        assert buckets[name] == [float(end) for end in ends.split()], name


def test_every_series_has_a_panel() -> None:
    asked = {name for _, query in queries() for name in re.findall(r"diptych_\w+", query)}
    assert {family for family, samples in series().items() if not samples & asked} == set()


def test_boards_have_variables_and_every_panel_says_how_to_read_it() -> None:
    for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        board = json.loads(path.read_text(encoding="utf-8"))
        names = [variable["name"] for variable in board["templating"]["list"]]
        assert names == ["datasource", "job", "role", "worker"]
        for panel in board["panels"]:
            assert len(panel["description"]) > 20, panel["title"]
            for target in panel["targets"]:
                selectors = re.findall(r"diptych_\w+(\{[^}]*\})?", target["expr"])
                assert selectors or target["expr"].startswith("up{"), panel["title"]
                for selector in selectors:
                    assert 'job=~"$job", role=~"$role", worker=~"$worker"' in selector, (panel["title"], target["expr"])


def test_every_alert_has_its_page() -> None:
    assert len(RULES) >= 6
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        page = ROOT / rule["annotations"]["runbook"]
        text = page.read_text()
        assert rule["alert"] in text, page
        for link in re.findall(r"\]\(([\w-]+\.md)\)", text):
            assert (page.parent / link).exists(), (page, link)
    assert {path.name for path in (ROOT / "docs" / "runbooks").iterdir()} == {
        Path(rule["annotations"]["runbook"]).name for rule in RULES
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")])
def test_prometheus_understands_it_and_alerts_fire_on_what_they_are_for(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=ROOT / "deploy" / "prometheus", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_scrapes_every_part_that_has_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = {target.partition(":")[0] for group in job["static_configs"] for target in group["targets"]}
    assert targets == set(CLUSTER) - {"redis"}


GPU_WORKERS = {name: service for name, service in COMPOSE["services"].items() if service["profiles"] == ["gpu"]}


@pytest.mark.parametrize("name", GPU_WORKERS)
def test_gpu_workers_can_take_the_fast_path(name: str, parsed: Parsed) -> None:
    service = GPU_WORKERS[name]
    assert (service["ipc"], service["pid"]) == ("host", "host")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert len(device["device_ids"]) == 2, "each must see the other's GPU"
    assert service["networks"] == ["kv"]
    assert "ports" not in service
    assert service["build"]["target"] == "serve-gpu"
    assert "FROM python-gpu AS serve-gpu" in (ROOT / "deploy" / "Dockerfile").read_text()
    environment = {
        key: default(value) for key, value in service["environment"].items() if value and key != "DIPTYCH_CONFIG"
    }
    assert sorted(environment.pop("CUDA_VISIBLE_DEVICES").split(",")) == ["0", "1"]
    config = parsed([default(word) for word in service["command"]], environment)
    assert config.device == "cuda"
    assert config.dtype == "auto", "the checkpoint's own"
    assert int(service["stop_grace_period"].removesuffix("s")) > config.drain_s


def test_lookaside_opens_an_endpoint_that_is_not_published() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.lookaside.yaml").read_text())["services"]
    assert set(services) == {name for name in WORKERS if name.startswith("decode")}
    for name, added in services.items():
        assert set(added) == {"environment"}
        secret = WORKERS[name]["environment"]["DIPTYCH_SECRET_FILE"]
        environment = added["environment"] | {"DIPTYCH_SECRET_FILE": secret}
        assert merge(
            WorkerConfig, {"role": "decode", "host": name, "insecure": "true"}, environ=environment
        ).client_port


def test_the_worker_installs_for_cuda_12_and_13() -> None:
    """Two extras by name that differ only in torch and UCXX, both pinned to the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    printed = {
        extra: set(subprocess.check_output([sys.executable, ROOT / "deploy/requirements.py", ROOT / "pyproject.toml", extra],
                                           text=True).splitlines())
        for extra in ("worker", "worker-base", "worker-cu12")
    }  # fmt: skip
    for cuda, extra, torch in (("13", "worker", "torch>=2.11"), ("12", "worker-cu12", "torch>=2.10,<2.11")):
        own = printed[extra] - printed["worker-base"]
        assert own == {torch, f"ucxx-cu{cuda}>=0.52; platform_machine == 'x86_64'"}
        assert printed["worker-base"] < printed[extra]
    assert {line.partition(">")[0] for extra in ("nixl", "nixl-cu13") for line in project[extra]} == {
        "nixl-cu12",
        "nixl-cu13",
    }
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for name in ("ucxx", "libucxx", "libucx", "rmm", "librmm", "nixl"):
        assert pins[f"{name}-cu12"] == pins[f"{name}-cu13"]


def test_5_1_what_is_installed_together_is_for_one_cuda() -> None:
    """Image, wheels and the documented sets of extras: UCXX and NIXL for the CUDA that torch is built for."""
    where = {"Dockerfile": ROOT / "deploy/Dockerfile", "Makefile": ROOT / "Makefile"}
    sets = {
        name: re.search(r"requirements.py \S+ (.*nixl.*) > \S*gpu\S*", file.read_text()) for name, file in where.items()
    }
    for i, documented in enumerate(re.findall(r"^\| `\[(worker.*)\]` \|", (ROOT / "docs/deploy.md").read_text(), re.M)):
        sets[f"docs, row {i}"] = re.fullmatch("(.*)", documented.replace(",", " "))
    assert len(sets) == 4
    for name, extras in sets.items():
        assert extras is not None, name
        command = [sys.executable, ROOT / "deploy/requirements.py", ROOT / "pyproject.toml", *extras[1].split()]
        printed = subprocess.check_output(command, text=True)
        assert len(set(re.findall(r"-cu(\d+)", printed))) == 1, (name, printed)
        assert {"ucxx", "nixl"} == set(re.findall(r"(\w+)-cu", printed)), (name, printed)


def test_the_gpu_images_ucx_has_infiniband_and_roce() -> None:
    """By the files of the pinned package that the image installs."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"requirements.py .* nixl-cu13 .* > /gpu.txt", dockerfile), "the image installs this extra"
    assert "/gpu.txt" in dockerfile[dockerfile.index("AS build-gpu") : dockerfile.index("AS serve-gpu")]
    try:
        installed = metadata.distribution("nixl-cu12")  # the same version and source as that for CUDA 13
    except metadata.PackageNotFoundError:
        pytest.skip("nixl-cu12 is not installed (no x86-64)")
    assert f"nixl-cu12=={installed.version}" in (ROOT / "constraints.txt").read_text()
    names = {Path(str(file)).name.partition(".so")[0] for file in installed.files or () if ".so" in str(file)}
    parts = {name.partition("-")[0] for name in names}
    # verbs and mlx5 (InfiniBand and RoCE), with the libraries that they are linked to; CUDA memory
    assert {"libuct_ib", "libuct_ib_mlx5", "libibverbs", "libmlx5", "libuct_cuda", "libplugin_UCX"} <= parts


def test_the_gpu_profile_is_a_whole_cluster_and_rdma_adds_to_it() -> None:
    parts = {name for name, service in COMPOSE["services"].items() if "gpu" in service["profiles"]}
    assert parts == {"redis", "router-0", "router-1", "prefill-gpu-0", "decode-gpu-0"}
    more = yaml.safe_load((ROOT / "deploy" / "compose.rdma.yaml").read_text())["services"]
    assert set(more) == set(GPU_WORKERS)
    assert all("/dev/infiniband:/dev/infiniband" in service["devices"] for service in more.values())


def test_23_the_gpu_profile_may_have_a_worker_of_ranks(parsed: Parsed) -> None:
    more = yaml.safe_load((ROOT / "deploy" / "compose.ranks.yaml").read_text())["services"]
    assert set(more) == set(GPU_WORKERS)
    degrees = {}
    for name, service in more.items():
        environment = {**GPU_WORKERS[name]["environment"], **service["environment"]}
        given = {key: default(value) for key, value in environment.items() if value and key != "DIPTYCH_CONFIG"}
        config = parsed([default(word) for word in GPU_WORKERS[name]["command"]], given)
        assert config.transport == "ucx", "the same one, through host memory"
        degrees[config.role] = config.tensor_parallel_size
    assert degrees == {"prefill": 1, "decode": 2}


def test_23_a_decode_worker_may_have_ranks_in_two_containers() -> None:
    """With the variables as each container has them, the second one joins the first."""
    more = yaml.safe_load((ROOT / "deploy" / "compose.nodes.yaml").read_text())["services"]
    worker, node = COMPOSE["services"]["decode-0"], more["decode-0-node-1"]

    def settings(cls: type, *environments: Mapping[str, Any], flags: Sequence[str] = ()) -> Any:
        given = {key: default(value) for one in environments for key, value in one.items() if value}
        given.pop("DIPTYCH_CONFIG", None)
        names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
        known = frozenset(field.name for field in dataclasses.fields(WorkerConfig))
        return merge(cls, dict(zip(names, flags[1::2], strict=True)), environ=given, known_elsewhere=known)

    first = settings(
        WorkerConfig, worker["environment"], more["decode-0"]["environment"], flags=["--role", *worker["command"]]
    )
    second = settings(RankConfig, node["environment"])
    assert node["command"] == ["rank"]
    assert (first.nnodes, first.degrees.num_ranks, first.master_addr) == (2, 2, worker["hostname"])
    assert (second.master_addr, second.master_port) == (first.master_addr, first.master_port)
    assert (second.node_rank, second.nnodes) == (1, first.nnodes)
    assert (second.model, second.insecure) == (first.model, True)
    for name in ("image", "networks", "profiles", "restart", "stop_grace_period"):
        assert node[name] == worker[name], name
    assert set(node["secrets"]) < set(worker["secrets"])
