"""The Helm chart: linted, rendered, checked against Kubernetes' own schemas, and against what our programs take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.cli.settings.merge import merge, read_file
from diptych.router.config import RouterConfig
from diptych.router.observe.metrics import RouterMetrics
from diptych.worker.config import WorkerConfig
from diptych.worker.rank_config import RankConfig
from diptych_tests.scripts import load_script

Parsed = Callable[[Sequence[str], Mapping[str, str]], Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "diptych"
BESIDE = Path(sys.executable).with_name("helm")
HELM = os.environ.get("DIPTYCH_HELM") or shutil.which("helm") or (str(BESIDE) if BESIDE.exists() else None)
KUBERNETES = "1.31"
OPEN = ("router.insecure=true", "worker.insecure=true")
SCALED = (*OPEN, "prefill.autoscaling.enabled=true", "decode.autoscaling.enabled=true")
GUARDED = (
    "router.keysSecret=keys",
    "router.tlsSecret=tls",
    "worker.tlsSecret=mtls",
    "redis.enabled=false",
    "secrets.existingSecret=mine",
)
GPU = (*OPEN, "decode.gpus=1", "prefill.gpus=2", "worker.hostIPC=true", "worker.ipcLock=true",
       "models.existingClaim=models", "metrics.podMonitor.enabled=true", "tracing.otlpEndpoint=http://o:4317")  # fmt: skip

POOL = ("inferencePool.enabled=true", "inferencePool.pickerService=epp")
GATEWAY = (*OPEN, *POOL)

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm: make charts gets it")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, timeout=300)


@cache
def rendered(*values: str) -> str:
    flags = [flag for value in values for flag in ("--set", value)]
    done = helm("template", "one", str(CHART), "--namespace", "serving", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C takes a tenth of the time."""


def render(*values: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by (kind, name without the release)."""
    objects = [each for each in yaml.load_all(rendered(*values), LOADER) if each]  # noqa: S506
    return {(each["kind"], each["metadata"]["name"].removeprefix("one-diptych").strip("-")): each for each in objects}


def container(objects: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def variables(spec: dict[str, Any]) -> dict[str, str]:
    """The DIPTYCH_* variables of a container, except the file of secrets."""
    return {
        e["name"]: e["value"] for e in spec["env"] if e["name"].startswith("DIPTYCH_") and e["name"] != "DIPTYCH_CONFIG"
    }


def pod(objects: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    return dict(objects["Deployment", name]["spec"]["template"]["spec"])


@pytest.mark.parametrize(
    "values", [SCALED, GUARDED, GPU, GATEWAY, (*OPEN, "decode.nodes=2", "decode.pipelineParallel=2")]
)
def test_it_lints_and_fits_kubernetes(values: tuple[str, ...]) -> None:
    flags = [flag for value in values for flag in ("--set", value)]
    done = helm("lint", "--strict", str(CHART), *flags)
    assert done.returncode == 0, done.stdout
    validate = pytest.importorskip("kubernetes_validate")
    for (kind, _), each in render(*values).items():
        if kind == "LeaderWorkerSet":  # its pods
            for name in ("leaderTemplate", "workerTemplate"):
                template = each["spec"]["leaderWorkerTemplate"][name]
                named = {"metadata": {"name": "one", **template["metadata"]}, "spec": template["spec"]}
                validate.validate({"apiVersion": "v1", "kind": "Pod", **named}, KUBERNETES, strict=True)
        elif kind not in ("PodMonitor", "PrometheusRule", "InferencePool"):  # custom resources
            validate.validate(each, KUBERNETES, strict=True)


def test_an_open_router_must_be_wanted() -> None:
    done = helm("template", "one", str(CHART), "--set", "worker.insecure=true")
    assert done.returncode != 0
    assert "keysSecret and tlsSecret, or insecure" in done.stderr
    done = helm("template", "one", str(CHART), "--set", "router.insecure=true")
    assert done.returncode != 0
    assert "worker: set tlsSecret, or insecure" in done.stderr
    assert helm("template", "one", str(CHART), "--set", "prefill.replicas=-1").returncode != 0


@pytest.mark.parametrize("name", ["prefill", "decode", "router"])
def test_guarded_parts_show_each_other_certificates(name: str) -> None:
    objects = render(*GUARDED)
    spec = container(objects, name)
    folder = "/run/secrets/cluster-tls"
    assert {
        "DIPTYCH_CLUSTER_CA": f"{folder}/ca.crt",
        "DIPTYCH_CLUSTER_CERT": f"{folder}/tls.crt",
        "DIPTYCH_CLUSTER_KEY": f"{folder}/tls.key",
        "DIPTYCH_CLUSTER_TLS_NAME": "diptych",  # one certificate for all pods: it cannot name their addresses
    }.items() <= {entry["name"]: entry.get("value") for entry in spec["env"]}.items()
    assert not [argument for argument in spec["args"] if "insecure" in argument]
    assert {"name": "cluster-tls", "mountPath": folder, "readOnly": True} in spec["volumeMounts"]
    assert {"name": "cluster-tls", "secret": {"secretName": "mtls"}} in pod(objects, name)["volumes"]


def test_guarded_probes_see_more_than_an_open_port() -> None:
    for role in ("prefill", "decode"):
        spec = container(render(*GUARDED), role)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            (*_, line) = spec[probe]["exec"]["command"]
            assert line == 'exec python -m diptych.cli.health "$POD_IP:50051"'  # the shell's: probes expand nothing
        assert "POD_IP" in {entry["name"] for entry in spec["env"]}
    assert "tcpSocket" in container(render(*GUARDED), "router")["readinessProbe"]
    opened = container(render(*GUARDED, "router.openMetrics=true"), "router")
    assert opened["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTPS"}
    assert "--open-metrics" in opened["args"]


def test_a_picker_is_configured_with_gauges_that_routers_have() -> None:
    objects = render(*GATEWAY)
    pool = objects["InferencePool", "router"]["spec"]
    labels = objects["Deployment", "router"]["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert pool["targetPorts"] == [{"number": 8000}]
    assert pool["endpointPickerRef"] == {"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    config = yaml.safe_load(objects["ConfigMap", "picker"]["data"]["picker.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    engine = plugins["core-metrics-extractor"]
    (specs,) = engine["engineConfigs"]
    assert specs.pop("name") == engine["defaultEngine"]
    gauges = {family.name for family in RouterMetrics().registry.collect() if family.type == "gauge"}
    assert set(specs) == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"}
    assert set(specs.values()) <= gauges
    for profile in config["schedulingProfiles"]:
        assert {entry["pluginRef"] for entry in profile["plugins"]} <= set(plugins)
    (source,) = config["dataLayer"]["sources"]
    assert {source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])} <= set(plugins)
    guarded = helm("template", "one", str(CHART), *(f for v in (*GUARDED, *POOL) for f in ("--set", v)))
    assert "set router.openMetrics" in guarded.stderr
    secure = render(*GUARDED, *POOL, "router.openMetrics=true")["ConfigMap", "picker"]["data"]["picker.yaml"]
    assert yaml.safe_load(secure)["plugins"][0]["parameters"]["scheme"] == "https"


def test_pools_scale_by_queue_and_kv_out_soon_and_in_late() -> None:
    objects = render(*SCALED)
    for role, names in (
        ("prefill", {"diptych_num_requests_waiting", "diptych_waiting_prompt_tokens"}),
        ("decode", {"diptych_num_requests_waiting", "diptych_kv_cache_usage_perc"}),
    ):
        scaler = objects["HorizontalPodAutoscaler", role]["spec"]
        assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == names
        assert scaler["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 120
        assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
        assert scaler["scaleTargetRef"]["name"] == f"one-diptych-{role}"
        assert "replicas" not in objects["Deployment", role]["spec"], "an upgrade would undo the scaler's work"
    plain = render(*OPEN, "prefill.replicas=3")
    assert plain["Deployment", "prefill"]["spec"]["replicas"] == 3
    assert not [key for key in plain if key[0] == "HorizontalPodAutoscaler"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_gets_settings_that_exist_and_time_to_drain(role: str, parsed: Parsed) -> None:
    objects = render(*SCALED)
    spec = container(objects, role)
    arguments = [a.replace("$(POD_NAME)", "p-1").replace("$(POD_IP)", "10.0.0.7") for a in spec["args"]]
    config = parsed(arguments, variables(spec))
    guarded = container(render(*GUARDED), role)
    assert not parsed(arguments[:-1], variables(guarded)).insecure, "its certificates are enough"
    assert (config.role, config.worker_id, config.host, config.metrics_port) == (role, "p-1", "10.0.0.7", 9100)
    assert pod(objects, role)["terminationGracePeriodSeconds"] > config.drain_s
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert spec[probe]["grpc"]["port"] == config.port
    assert spec["startupProbe"]["periodSeconds"] * spec["startupProbe"]["failureThreshold"] >= 300
    assert ("PodDisruptionBudget", role) in objects


def test_routers_go_one_by_one_after_their_endpoints_are_gone(parsed: Parsed) -> None:
    objects = render(*SCALED)
    spec = container(objects, "router")
    strategy = objects["Deployment", "router"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert pod(objects, "router")["terminationGracePeriodSeconds"] > 5 + 10
    assert spec["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert spec["livenessProbe"]["httpGet"]["path"] == "/health"
    assert parsed(spec["args"], variables(spec)).http_port == 8000
    opened = container(render(*GUARDED, "router.openMetrics=true"), "router")
    assert parsed(opened["args"], variables(opened)).open_metrics


def test_no_container_runs_as_root_or_has_a_secret_in_its_environment() -> None:
    objects = render(*SCALED)
    for name in ("router", "prefill", "decode", "redis"):
        assert pod(objects, name)["securityContext"]["runAsNonRoot"] is True
        assert pod(objects, name)["automountServiceAccountToken"] is False
        assert container(objects, name)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        for entry in container(objects, name).get("env", ()):
            assert "redis://" not in str(entry.get("value", ""))
    mounted = {
        name: {
            item["key"]
            for volume in pod(objects, name)["volumes"]
            if volume["name"] == "secrets"
            for item in volume["secret"]["items"]
        }
        for name in ("router", "prefill", "redis")
    }
    assert mounted == {
        "router": {"cluster_secret", "router.toml"}, "prefill": {"cluster_secret", "worker.toml"}, "redis": {"redis.acl"},
    }  # fmt: skip
    policy = objects["NetworkPolicy", "inside"]["spec"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode", "redis"]


def test_the_made_secret_is_what_the_programs_read(tmp_path: Path) -> None:
    data = render(*SCALED)["Secret", ""]["stringData"]
    assert len(data["cluster_secret"]) == 64
    for role, cls in (("worker", WorkerConfig), ("router", RouterConfig)):
        (tmp_path / f"{role}.toml").write_text(data[f"{role}.toml"])
        url = merge(cls, {}, environ={}, file=read_file(tmp_path / f"{role}.toml")).redis_url
        assert url.startswith(f"redis://{role}:")
        assert url.endswith("@one-diptych-redis:6379/0")
        password = url.partition(":")[2].partition(":")[2].partition("@")[0]
        assert len(password) == 32
        assert password not in data["redis.acl"]
    made = _acl_of_compose()
    rights = [re.sub(r"#[0-9a-f]{64}", "#", text).splitlines() for text in (data["redis.acl"], made)]
    assert len(rights[0]) == 3
    assert rights[0] == rights[1], "the roles' rights are compose's"


def _acl_of_compose() -> str:
    return str(load_script("deploy/make_secrets.py").acl("w", "r"))


def test_gpus_rdma_and_models() -> None:
    objects = render(*GPU, "worker.extraResources.rdma/hca=1")
    decode = container(objects, "decode")
    assert decode["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert decode["resources"]["limits"]["rdma/hca"] == 1
    assert container(objects, "prefill")["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert decode["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert pod(objects, "decode")["hostIPC"] is True
    assert {"name": "models", "mountPath": "/mnt/models", "readOnly": True} in decode["volumeMounts"]
    assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://o:4317"} in decode["env"]
    assert objects["PodMonitor", ""]["spec"]["podMetricsEndpoints"][1]["port"] == "metrics"


def test_23_a_worker_of_ranks_gets_its_degrees_and_a_gpu_for_each_rank(parsed: Parsed) -> None:
    values = (
        "decode.gpus=4",
        "decode.tensorParallel=2",
        "decode.pipelineParallel=2",
        "decode.extraArgs={--device,cuda,--transport,ucx}",
    )
    objects = render(*OPEN, *values)
    decode = container(objects, "decode")
    config = parsed(
        [a.replace("$(POD_NAME)", "d-1").replace("$(POD_IP)", "10.0.0.7") for a in decode["args"]], variables(decode)
    )
    assert (config.tensor_parallel_size, config.pipeline_parallel_size, config.kv_device) == (2, 2, "cpu")
    assert decode["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert not [a for a in container(objects, "prefill")["args"] if "parallel" in a]
    done = helm("template", "one", str(CHART), "--set", ",".join([*OPEN, "prefill.gpus=2", "prefill.tensorParallel=4"]))
    assert done.returncode != 0
    assert "prefill: tensorParallel times pipelineParallel is 4, and gpus 2" in done.stderr


GROUPED = (
    "decode.nodes=2",
    "decode.gpus=2",
    "decode.tensorParallel=2",
    "decode.pipelineParallel=2",
    "decode.extraArgs={--device,cuda,--transport,ucx}",
)


def pods_of_group(objects: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    template = objects["LeaderWorkerSet", "decode"]["spec"]["leaderWorkerTemplate"]
    return [template[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]


def in_pod(spec: dict[str, Any], **more: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of a pod's container, as Kubernetes and LeaderWorkerSet fill them in."""
    (found,) = spec["containers"]
    known = {"POD_NAME": "d-1", "LWS_LEADER_ADDRESS": "d-1.d.serving", **more}
    words = [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in found["args"]]
    return words, variables(found)


@pytest.mark.parametrize("guard", [OPEN, GUARDED])
def test_23_a_worker_on_several_nodes_is_a_group_whose_pods_meet(guard: tuple[str, ...], parsed: Parsed) -> None:
    objects = render(*guard, *GROUPED)
    assert ("Deployment", "decode") not in objects
    spec = objects["LeaderWorkerSet", "decode"]["spec"]["leaderWorkerTemplate"]
    assert (spec["size"], spec["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, node = pods_of_group(objects)
    worker = parsed(*in_pod(leader, POD_IP="10.0.0.7"))
    words, given = in_pod(node, POD_IP="10.0.0.8")
    config = merge(
        RankConfig,
        {word.partition("=")[0][2:].replace("-", "_"): word.partition("=")[2] or True for word in words[1:]},
        environ=given | {"NODE_RANK": "1"},
        known_elsewhere=frozenset({"cluster", "served_model_name"}),
    )
    assert words[0] == "rank"
    assert (worker.nnodes, worker.master_addr, worker.degrees.num_ranks) == (2, "10.0.0.7", 4)
    assert (config.master_addr, config.master_port) == ("d-1.d.serving", worker.master_port)
    assert (config.nnodes, config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 2, 2)
    assert (config.host, config.node_rank, config.model) == ("10.0.0.8", 1, worker.model)
    assert (config.cluster_cert, config.insecure) == (worker.cluster_cert, worker.insecure)
    (rank,) = node["containers"]
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "readinessProbe" not in rank
    secrets = next(volume["secret"] for volume in node["volumes"] if volume["name"] == "secrets")
    assert [item["key"] for item in secrets["items"]] == ["cluster_secret"], "no password of Redis"
    [index] = [entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in rank["env"] if entry["name"] == "NODE_RANK"]
    assert index == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"


def test_23_a_group_is_scaled_as_a_whole_and_reached_by_its_own_pods() -> None:
    objects = render(*SCALED, *GROUPED)
    scaled = {
        name: objects["HorizontalPodAutoscaler", name]["spec"]["scaleTargetRef"]["kind"]
        for name in ("prefill", "decode")
    }
    assert scaled == {"prefill": "Deployment", "decode": "LeaderWorkerSet"}
    template = objects["LeaderWorkerSet", "decode"]["spec"]["leaderWorkerTemplate"]
    inside = objects["NetworkPolicy", "inside"]["spec"]["podSelector"]
    for name in ("leaderTemplate", "workerTemplate"):
        labels = template[name]["metadata"]["labels"]
        assert inside["matchLabels"].items() <= labels.items()
        assert labels["app.kubernetes.io/component"] in inside["matchExpressions"][0]["values"]
    for values, words in (
        (("decode.gpus=4",), "decode: tensorParallel times pipelineParallel is 4, and gpus 8"),
        (("decode.gpus=0", "decode.nodes=3"), "decode: nodes is 3, and tensorParallel times pipelineParallel 4"),
    ):
        done = helm("template", "one", str(CHART), "--set", ",".join([*OPEN, *GROUPED[:-1], *values]))
        assert done.returncode != 0
        assert words in done.stderr


def test_no_variables_of_services_are_in_the_pods() -> None:
    """A release called diptych has a service diptych-redis: DIPTYCH_REDIS_PORT was in every pod, and no setting of ours."""
    for objects in (render(*OPEN), render(*OPEN, *GROUPED)):
        pods = [
            each["spec"]["template"]["spec"]
            for (kind, _), each in objects.items()
            if kind in ("Deployment", "StatefulSet")
        ]
        if ("LeaderWorkerSet", "decode") in objects:
            pods += pods_of_group(objects)
        assert len(pods) >= 4
        assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_a_misspelt_value_is_refused() -> None:
    """`prefil.replicas=3` was taken without a word, and the pool kept its default size."""
    for wrong in ("prefil.replicas=3", "prefill.replica=3", "metrics.podMonitor.enable=true", "worker.port=1"):
        done = helm("template", "one", str(CHART), "--set", ",".join([*OPEN, wrong]))
        assert done.returncode != 0, wrong
        assert "not allowed" in done.stderr, done.stderr


def test_the_chart_brings_the_alerts_and_the_boards() -> None:
    observed = ("metrics.rules.enabled=true", "metrics.dashboards.enabled=true", "metrics.podMonitor.enabled=true")
    objects = render(*OPEN, *observed)
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    assert objects["PrometheusRule", ""]["spec"] == rules  # templates such as {{ $labels.role }} are Prometheus' own
    for board in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        found = objects["ConfigMap", f"board-{board.stem}"]
        assert found["data"] == {board.name: board.read_text(encoding="utf-8")}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    monitor = objects["PodMonitor", ""]["spec"]["podMetricsEndpoints"]
    assert all(endpoint["honorLabels"] for endpoint in monitor)
    plain = render(*OPEN)
    assert not [kind for kind, name in plain if kind == "PrometheusRule" or name.startswith("board-")]
