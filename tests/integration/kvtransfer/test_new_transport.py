"""A transport that is added by one file: it is registered, selected, tested at the start, carries KV, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from diptych.cli.doctor.command import examine
from diptych.cli.doctor.facts import Facts, Host, Worker
from diptych.cli.explain import lines_of
from diptych.cli.up.config import UpConfig
from diptych.common.errors import ConfigError
from diptych.kvtransfer.api import KvAddress
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric import registry
from diptych.kvtransfer.fabric.self_test import SelfTest, run_self_test
from diptych.kvtransfer.transports.inproc import InprocTransport
from diptych.worker.config import WorkerConfig

PLUGIN = """
from diptych.kvtransfer.fabric.registry import TransportSpec
from diptych.kvtransfer.transports.inproc import InprocTransport

SPEC = TransportSpec(name="relay", summary="a plug-in", make=lambda w, i, site: InprocTransport(w, i))
"""


class RelayTransport(InprocTransport):
    path = "relay:test"

    def __init__(self, worker_id: str, incarnation: str) -> None:
        super().__init__(worker_id, incarnation)
        self.address = KvAddress("relay", "", 0, self.address.blob)


tested: list[int] = []


def _self_test(make: registry.Make, site: registry.TransportSite) -> SelfTest:
    tested.append(site.ring.slab_bytes)
    return run_self_test(make, site.ring.slab_bytes)


RELAY = registry.TransportSpec(
    name="relay",
    summary="a transport of this test",
    make=lambda worker_id, incarnation, site: RelayTransport(worker_id, incarnation),
    self_test=_self_test,
)


@pytest.fixture
def relay() -> Iterator[None]:
    registry.transports()
    registry.register(RELAY)
    yield
    registry.unregister(RELAY.name)


async def test_a_registered_transport_carries_kv_and_is_named(pd: ModuleType, relay: None) -> None:
    tested.clear()
    worker = {"transport": "relay"}
    async with (
        pd.cluster(prefill_config=worker, decode_config=worker) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=list(range(40))))
        assert tested == [4096, 4096], "both workers tested it before they served"
        assert answer.explanation.kv_bytes > 0
        assert answer.explanation.transport == "relay:test"
        assert any("over relay:test" in line for line in lines_of(answer.explanation))
        stats = cluster.decode.worker_stats()
        asked = Worker("d0", "decode", path=stats.transport_path, bytes_per_s=1e9, host=Host(hostname="one", cpus=2))
        reported = [v.finding for v in examine(Facts({"ready": True}, [asked], 1.0)) if v.check == "transport"]
        assert reported == ["d0: relay:test at 1.0 GB/s"]


def test_settings_take_registered_transports_only(relay: None) -> None:
    assert TransferConfig(transport="relay").transport == "relay"
    assert UpConfig(transport="relay").transport == "relay"
    registry.unregister("relay")
    for made in (TransferConfig, UpConfig):
        with pytest.raises(ConfigError, match="must be one of auto, ipc, ucx-gpu, nixl, ucx"):
            made(transport="relay")
    with pytest.raises(ConfigError, match="must be one of"):
        UpConfig(transport="inproc")  # its workers are processes
    registry.register(RELAY)


def test_a_name_belongs_to_one_transport(relay: None) -> None:
    for name in ("relay", "ucx", "auto"):
        with pytest.raises(ValueError, match="two transports are called"):
            registry.register(registry.TransportSpec(name=name, summary="", make=RELAY.make))


def test_auto_tries_what_fits_the_device_best_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_GPUS", tmp_path)
    assert [spec.name for spec in registry.candidates("auto", "cpu")] == ["nixl", "ucx"]
    (tmp_path / "0").touch()
    assert [spec.name for spec in registry.candidates("auto", "cuda")] == ["nixl", "ucx"], (
        "the peer has another host's GPU"
    )
    (tmp_path / "1").touch()
    assert [spec.name for spec in registry.candidates("auto", "cuda")] == ["ipc", "ucx-gpu", "nixl", "ucx"]
    assert registry.transport_for_a_shared_gpu() == "ipc"


def _prefill(folder: Path, *flags: str) -> str:
    """Output of `diptych prefill` with a folder that holds no model."""
    model = folder / "nothing"
    model.mkdir(exist_ok=True)
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", "prefill", "--model", str(model), *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode, ended.stdout
    return ended.stdout + ended.stderr


def test_an_installed_plug_in_is_a_transport(tmp_path: Path) -> None:
    (tmp_path / "relay_plugin.py").write_text(PLUGIN)
    reported = _prefill(tmp_path, "--transport", "relay")
    assert "must be one of auto" in reported, "not installed yet"
    package = tmp_path / "relay_plugin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: relay-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[diptych.transports]\nrelay = relay_plugin:SPEC\n")
    reported = _prefill(tmp_path, "--transport", "relay")
    assert "must be one of auto" not in reported
    assert "secret_file" in reported, "the next thing that is missing"


def test_a_worker_process_refuses_an_unknown_transport_before_it_loads(pd: ModuleType) -> None:
    from diptych.worker.process import run_process

    with pytest.raises(ConfigError, match="must be one of"):
        run_process(WorkerConfig(transport="carrier"), pd.services_of)
