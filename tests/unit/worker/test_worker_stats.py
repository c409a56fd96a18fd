"""Reported numbers of a worker's engine and host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diptych.engine.messages import EngineStats
from diptych.worker.config import WorkerConfig
from diptych.worker.host_facts import RDMA_MODULES, read_host_facts, ucx_parts
from diptych.worker.stats import SETTINGS, engine_numbers, host_to_proto, settings_of


def test_engine_numbers_leave_out_what_is_unknown() -> None:
    numbers = engine_numbers(EngineStats(num_running=3, kv_usage=0.5, steps=7, busy_since=None))
    assert (numbers["num_running"], numbers["kv_usage"], numbers["steps"]) == (3.0, 0.5, 7.0)
    assert "busy_since" not in numbers


def test_settings_are_those_named_and_hold_no_secret() -> None:
    reported = settings_of(WorkerConfig(model="m", redis_url="redis://u:pw@h/0", secret_file="/s", max_num_seqs=9))
    assert set(reported) == {*SETTINGS, "kernels", "kernels_refused", "compiler", "method", "rank_link", "rank_gpus"}
    assert reported["max_num_seqs"] == "9"
    assert "pw" not in str(reported)


def test_a_missing_module_and_a_missing_device_are_named(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "nixl_cu12.libs/ucx").mkdir(parents=True)
    (site / "nixl_cu12.libs/ucx/libuct_ib.so.0").touch()
    facts = read_host_facts(tmp_path, site)
    assert facts.rdma_devices == ()
    assert any("no InfiniBand or RoCE device" in why for why in facts.rdma_missing)
    assert all(any(f"modprobe {module}" in why for why in facts.rdma_missing) for module in RDMA_MODULES)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    for module in RDMA_MODULES:
        (tmp_path / "sys/module" / module).mkdir(parents=True)
    facts = read_host_facts(tmp_path, site)
    assert facts.rdma_devices == ("mlx5_0",)
    assert facts.rdma_missing == ("no /dev/infiniband/uverbs*: give the devices to this container",)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert read_host_facts(tmp_path, site).rdma_missing == ()

    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert "modprobe nvidia_peermem" in str(read_host_facts(tmp_path, site).rdma_missing)
    (tmp_path / "sys/module/nvidia_peermem").mkdir()
    assert read_host_facts(tmp_path, site).rdma_missing == ()


def test_a_ucx_without_infiniband_is_named(tmp_path: Path) -> None:
    root, bare, both = (tmp_path / name for name in ("root", "bare", "both"))
    for site in (bare, both):
        (site / "libucx/lib/ucx").mkdir(parents=True)
        (site / "libucx/lib/ucx/libuct_cma.so.0").touch()
    (both / "nixl_cu12.libs/ucx").mkdir(parents=True)
    (both / "nixl_cu12.libs/ucx/libuct_ib.so.0.0.0").touch()
    assert ucx_parts(tmp_path / "none") == {}
    assert "there is no part for InfiniBand" in read_host_facts(root, tmp_path / "none").rdma_missing[-1]
    assert "the UCX of libucx (of ucxx) has no part" in read_host_facts(root, bare).rdma_missing[-1]
    assert ucx_parts(both) == {"nixl-cu12": True, "libucx (of ucxx)": False}
    assert "libuct_ib" not in str(read_host_facts(root, both).rdma_missing)


def test_facts_of_this_host_fit_the_wire() -> None:
    message = host_to_proto(read_host_facts())
    assert message.cpus >= 1
    assert message.open_files > 0
    assert message.max_open_files > 0
    assert message.wall_clock_s > 1e9


@pytest.mark.parametrize(("cuda", "package"), [("12.8", "nixl-cu12"), ("13.0", "nixl-cu13"), (None, "nixl-cu12")])
def test_5_5_advice_names_the_package_of_the_cuda_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    assert f"install {package}," in read_host_facts(tmp_path, tmp_path).rdma_missing[-1]
