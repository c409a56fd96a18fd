"""Command lines of the children, and the cluster's name of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.cli import main
from diptych.cli.serve.config import ServeConfig
from diptych.cli.up.cluster_plan import ClusterPlan, own_name
from diptych.cli.up.config import UpConfig
from diptych.cli.up.run_folder import RunFolder
from diptych.cli.up.startup_message import has_chat_template, startup_message
from diptych.common.errors import ConfigError
from diptych.common.store.redis_url import connect
from diptych.worker.config import WorkerConfig


def make_plan(tmp_path: Path, **settings: object) -> ClusterPlan:
    return ClusterPlan(UpConfig(**settings), RunFolder(tmp_path / ".run"), tmp_path / "model", "m", threads=1)


def test_a_hub_model_is_served_under_its_id_not_its_snapshots_hash(tmp_path: Path):
    assert own_name("Acme/Tiny-Qwen3", tmp_path / "0123abcd") == "Acme/Tiny-Qwen3"
    assert own_name("", tmp_path / "SmolLM2") == "SmolLM2"
    (tmp_path / "some").mkdir()
    assert own_name(str(tmp_path / "some"), tmp_path / "some") == "some"


def test_a_relative_secret_file_is_found_by_children_that_run_elsewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("ab" * 32)
    plan = make_plan(tmp_path, secret_file=Path("mine.txt"))
    plan.make_secret()
    assert plan.secret_file == tmp_path / "mine.txt"
    command = plan.router_spec().command()
    assert command[command.index("--secret-file") + 1] == str(tmp_path / "mine.txt")


def test_a_secret_file_that_is_missing_is_written_and_kept(tmp_path: Path) -> None:
    first, second = (make_plan(tmp_path, secret_file=tmp_path / "mine") for _ in range(2))
    first.make_secret()
    text = (tmp_path / "mine").read_text()
    second.make_secret()
    assert (tmp_path / "mine").read_text() == text
    assert len(bytes.fromhex(text)) == 32
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    (tmp_path / "mine").write_text("short")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        second.make_secret()


def test_files_of_kv_are_found_by_workers_that_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(tmp_path, secret_file=Path("mine"), disk_kv_dir=Path("kv"))
    for spec in plan.worker_specs():
        command = spec.command()
        assert command[command.index("--disk-kv-dir") + 1] == str(tmp_path / "kv")
    with pytest.raises(ConfigError, match="secret_file"):
        make_plan(tmp_path, disk_kv_dir=Path("kv"))


def test_a_store_of_kv_is_the_workers_and_replaces_the_folder(tmp_path: Path) -> None:
    url = "mooncake://h:1"
    plan = make_plan(tmp_path, secret_file=tmp_path / "mine", kv_store=url)
    for spec in plan.worker_specs():
        command = spec.command()
        assert command[command.index("--kv-store") + 1] == url
    with pytest.raises(ConfigError, match="secret_file.*kv_store"):
        make_plan(tmp_path, kv_store=url)
    with pytest.raises(ConfigError, match="kv_store.*disk_kv_dir"):
        make_plan(tmp_path, secret_file=tmp_path / "mine", kv_store=url, disk_kv_dir=Path("kv"))
    with pytest.raises(ConfigError, match="kv_store.*HOST:PORT"):
        make_plan(tmp_path, secret_file=tmp_path / "mine", kv_store="mooncake://h")


def test_other_users_of_the_machine_see_no_password_of_redis(tmp_path: Path) -> None:
    url = "redis://me:hush@h:6379/0"
    plan = make_plan(tmp_path, redis_url=url)
    for spec in (*plan.worker_specs(), plan.router_spec()):
        assert "hush" not in " ".join(spec.command())
        assert spec.env["DIPTYCH_REDIS_URL"] == url


def test_redis_is_in_the_run_folder(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    socket = tmp_path / ".run" / "redis.sock"
    command = plan.redis_spec().command()
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--unixsocket") + 1] == str(socket)
    assert connect(plan.redis_url, timeout_s=1.0).client.connection_pool.connection_kwargs["path"] == str(socket)
    with pytest.raises(ConfigError, match="run_dir.*108 bytes of at most 107.*DIPTYCH_RUN_DIR"):
        make_plan(tmp_path / ("x" * (107 - len(str(socket)))))
    assert make_plan(tmp_path / ("x" * (106 - len(str(socket))))).redis_url


def test_further_flags_reach_router_and_workers(tmp_path: Path):
    plan = make_plan(tmp_path, router_args="--placement-policy random", worker_args="--scheduling-policy sjf")
    assert plan.router_spec().command()[-2:] == ["--placement-policy", "random"]
    assert all(spec.command()[-2:] == ["--scheduling-policy", "sjf"] for spec in plan.worker_specs())


def test_the_router_gets_its_processes(tmp_path: Path):
    command = make_plan(tmp_path, router_processes=2).router_spec().command()
    assert command[command.index("--router-processes") + 1] == "2"


def test_a_model_without_a_chat_template_is_greeted_with_completions(tmp_path: Path):
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert has_chat_template(tmp_path)
    shown = startup_message(http_url="http://h:1", grpc_address="h:2", model="m", logs="l", chat=False)
    assert "messages" not in shown
    assert "/v1/completions" in shown
    assert "diptych chat" not in shown


def test_the_printed_curl_sends_json_that_crosses_both_pools():
    shown = startup_message(http_url="http://h:1", grpc_address="h:2", model="m", logs="l", chat=True)
    body = json.loads(shown.split("-d '")[1].split("'")[0])
    assert body["local_prefill_max_tokens"] == 0
    assert body["temperature"] == 0


def test_with_keys_what_is_printed_has_one():
    """It was refused with 401."""
    asks = {"http_url": "http://h:1", "grpc_address": "h:2", "model": "m", "logs": "l", "chat": True}
    shown, without = startup_message(**asks, keys=True), startup_message(**asks)
    assert '-H "authorization: Bearer $DIPTYCH_API_KEY"' in shown
    assert 'api_key=os.environ["DIPTYCH_API_KEY"]' in shown
    assert "DIPTYCH_API_KEY" not in without


def test_keys_and_certificates_reach_those_that_use_them(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("keys_file", "tls_cert", "tls_key", "cluster_ca", "cluster_cert", "cluster_key")
    plan = make_plan(tmp_path, **{name: Path(f"{name}.pem") for name in names})
    router = plan.router_spec().command()
    for name in names:
        assert router[router.index("--" + name.replace("_", "-")) + 1] == str(tmp_path / f"{name}.pem")
    for spec in plan.worker_specs():
        flags = [flag for flag in spec.command() if flag.startswith(("--cluster-", "--tls", "--keys"))]
        assert flags == ["--cluster-ca", "--cluster-cert", "--cluster-key"]
    assert plan.http_url.startswith("https://")


def test_workers_verify_weights_as_up_is_configured(tmp_path: Path) -> None:
    for settings, mode in (({}, "changed"), ({"verify_weights": "always"}, "always")):
        for spec in make_plan(tmp_path, **settings).worker_specs():
            command = spec.command()
            assert command[command.index("--verify-weights") + 1] == mode
    with pytest.raises(ConfigError, match="verify_weights"):
        UpConfig(verify_weights="never")
    assert ServeConfig(verify_weights="always").parts(model="", name="", secret_file="")[1].verify_weights == "always"


@pytest.mark.parametrize("wanted", [True, False])
def test_every_worker_gets_batch_invariance(tmp_path: Path, wanted: bool) -> None:
    for spec in make_plan(tmp_path, batch_invariant=wanted).worker_specs():
        assert ("--batch-invariant" in spec.command()) == wanted
    assert ServeConfig(batch_invariant=wanted).parts(model="", name="", secret_file="")[1].batch_invariant == wanted


def test_files_of_redis_reach_all_parts_and_the_cipher_of_kv_the_workers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("redis_ca", "redis_cert", "redis_key")
    files = {name: Path(f"{name}.pem") for name in names}
    plan = make_plan(tmp_path, redis_url="rediss://h:1/0", kv_encryption="aes-gcm", **files)
    for spec in (*plan.worker_specs(), plan.router_spec()):
        command = spec.command()
        for name in names:
            assert command[command.index(f"--{name.replace('_', '-')}") + 1] == str(tmp_path / f"{name}.pem")
        assert ("aes-gcm" in command) == (spec.role != "router")


@pytest.mark.parametrize("name", ["redis_ca", "redis_cert", "redis_key"])
def test_files_of_redis_beside_an_address_without_tls_are_refused(name: str) -> None:
    for url in ("", "redis://h:1/0"):
        with pytest.raises(ConfigError, match="needs a redis_url of rediss://") as caught:
            UpConfig(redis_url=url, **{name: Path("x.pem")})
        assert caught.value.field == name


def test_adapters_are_the_workers_and_their_folders_are_found_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(tmp_path, enable_lora=True, max_lora_rank=32, lora_dir=("mine", str(tmp_path / "other")))
    for spec in plan.worker_specs():
        command = spec.command()
        assert "--enable-lora" in command
        assert command[command.index("--max-lora-rank") + 1] == "32"
        folders = [flag for flag in command if flag.startswith("--lora-dir")]
        assert folders == [f"--lora-dir={tmp_path / name}" for name in ("mine", "other")]
    assert not any("lora" in flag for spec in make_plan(tmp_path).worker_specs() for flag in spec.command())
    with pytest.raises(ConfigError, match=r"lora_dir.*enable_lora"):
        make_plan(tmp_path, enable_lora=True)
    with pytest.raises(ConfigError, match=r"max_cpu_loras=4.*max_loras=8"):
        make_plan(tmp_path, enable_lora=True, lora_dir=("mine",), max_cpu_loras=4)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        make_plan(tmp_path, max_lora_rank=65)


@pytest.mark.parametrize(
    "start",
    [
        lambda **lora: main._up(UpConfig(**lora)),
        lambda **lora: main._up(UpConfig(**lora), detach=True),
        lambda **lora: main._serve(ServeConfig(http_port=0, grpc_port=0, **lora)),
        lambda **lora: main._worker(WorkerConfig(**lora)),
    ],
    ids=["up", "up --detach", "serve", "worker"],
)
def test_a_folder_of_adapters_that_is_none_is_refused_before_anything_starts(start: Any, tmp_path: Path) -> None:
    missing = tmp_path / "nosuch"
    with pytest.raises(ConfigError, match=r"lora_dir.*nosuch.*is no folder"):
        start(enable_lora=True, lora_dir=(str(tmp_path), str(missing)))


@pytest.mark.parametrize("flag", ["--lora-modules", "--lora-dir"])
def test_several_values_after_one_flag_are_refused_with_a_hint(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diptych", "serve", flag, "a=/x", "b=/y"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert f"several values of {flag}: repeat the flag, or put commas between them" in capsys.readouterr().err


def test_serve_gives_its_worker_the_settings_of_adapters(tmp_path: Path) -> None:
    config = ServeConfig(enable_lora=True, max_loras=3, lora_dir=(str(tmp_path),), lora_load_timeout_s=2.0)
    _, worker = config.parts(model="", name="", secret_file="")
    assert (worker.enable_lora, worker.max_loras, worker.lora_dir) == (True, 3, (str(tmp_path),))
    assert worker.lora_load_timeout_s == 2.0
    assert worker.metrics_port is None
    _, worker = ServeConfig(metrics_port=9100).parts(model="", name="", secret_file="")
    assert (worker.metrics_host, worker.metrics_port) == ("127.0.0.1", 9100), "series of adapters are the worker's"
    with pytest.raises(ConfigError, match="metrics_port"):
        ServeConfig(metrics_port=8000)
    with pytest.raises(ConfigError, match="lora_dir"):
        ServeConfig(enable_lora=True)


def test_23_a_server_on_several_hosts_shows_them_the_secret_and_certificates_that_are_named() -> None:
    """Variables that are there for the parts of a cluster change nothing where there is one host."""
    files = {"cluster_ca": "ca", "cluster_cert": "cert", "cluster_key": "key", "cluster_tls_name": "name"}
    hosts = {"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "10.0.0.7", "secret_file": "secret"}
    for part in ServeConfig(**hosts, **files).parts(model="", name="", secret_file="secret"):
        assert {name: getattr(part, name) for name in files} == files
    for part in ServeConfig(secret_file="other", **files).parts(model="", name="", secret_file="own"):
        assert not any(getattr(part, name) for name in files)
        assert part.secret_file == "own"
    with pytest.raises(ConfigError, match="secret_file"):
        ServeConfig(**hosts | {"secret_file": ""}, insecure=True)
    with pytest.raises(ConfigError, match="master_addr"):
        ServeConfig(**hosts)
