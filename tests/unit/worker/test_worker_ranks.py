"""The ranks of a worker: degrees, GPUs, threads and what each rank's process is started with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import split
from diptych.worker import device_start
from diptych.worker.config import WorkerConfig
from diptych.worker.defaults import DeviceFacts, settled
from diptych.worker.model import choose_num_blocks
from diptych.worker.ranks import check_transport, gpus_of_ranks, meeting_point, rank_specs, threads_of_a_rank
from diptych.worker.visible_gpus import Gpu

GPUS = [Gpu(name, "NVIDIA H200", 100, 90, f"GPU-{name}") for name in ("4", "5", "6")]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 8}, "tensor_parallel_size"),
        ({"devices": "0"}, "devices"),
        ({"device": "cuda", "tensor_parallel_size": 2, "devices": "0"}, "devices"),
        ({"device": "cuda", "tensor_parallel_size": 2, "devices": "0,one"}, "devices"),
        ({"device": "cuda", "devices": "-1"}, "devices"),
        ({"rank_silence_s": 0.0}, "rank_silence_s"),
    ],
)
def test_23_degrees_and_devices_that_make_no_sense_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**settings)
    assert caught.value.field == field


def test_23_the_first_rank_of_the_last_stage_samples() -> None:
    assert [(Degrees(t, p).num_ranks, Degrees(t, p).sampler) for t, p in ((1, 1), (2, 1), (1, 3), (2, 2))] == [
        (1, 0), (2, 0), (3, 2), (4, 2),
    ]  # fmt: skip


def test_23_each_rank_gets_the_gpu_that_is_named_for_it() -> None:
    assert [gpu.visible for gpu in gpus_of_ranks(GPUS, "2,0", 2)] == ["6", "4"]
    assert [gpu.visible for gpu in gpus_of_ranks(GPUS, "", 2)] == ["4", "5"]
    with pytest.raises(ConfigError, match=r"devices='0,3': there are 3 GPUs: 0 to 2"):
        gpus_of_ranks(GPUS, "0,3", 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: 4 ranks need 4 GPUs, and there are 3"):
        gpus_of_ranks(GPUS, "", 4)


def test_23_ranks_see_the_workers_gpus_and_share_one_in_equal_parts() -> None:
    gpus = gpus_of_ranks(GPUS, "1,2,1", 3)
    specs = rank_specs(Degrees(3), {"model": "m"}, 2, gpus, 0.8)
    assert [spec.arguments["device_index"] for spec in specs] == [0, 1, 0]
    assert [spec.arguments["gpu_memory_utilization"] for spec in specs] == [0.4, 0.8, 0.4]
    for spec in specs:
        assert spec.env is not None
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_23_ranks_on_a_cpu_divide_the_threads() -> None:
    assert [threads_of_a_rank(threads, 2) for threads in (1, 2, 5)] == [1, 1, 2]
    specs = rank_specs(Degrees(2, 2), {"model": "m"}, 3)
    assert [spec.arguments["rank"] for spec in specs] == [0, 1, 2, 3]
    for spec in specs:
        assert spec.env is not None
        assert spec.env["OMP_NUM_THREADS"] == "3"
        assert spec.arguments == {"model": "m", "rank": spec.arguments["rank"], "tensor_parallel": 2, "pipeline": 2,
                                  "num_threads": 3}  # fmt: skip


def test_23_ranks_meet_in_the_memory_of_their_worker_which_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of temporary files stayed when the worker was killed while it loaded."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with meeting_point() as where:
        file = Path(urlsplit(where).path)
        assert urlsplit(where).scheme == "file"
        assert file.resolve().name.startswith("memfd:diptych-ranks")
        assert file.parent.stat().st_mode & 0o077 == 0, "other users cannot open it"
        file.write_text("x")
        assert list(tmp_path.iterdir()) == []
    assert file.read_text() == "x", "the ranks' libraries still look into it"
    os.close(int(file.name))
    with pytest.raises(ZeroDivisionError), meeting_point() as where:
        raise ZeroDivisionError
    assert not Path(urlsplit(where).path).exists()


def test_23_kv_of_ranks_counts_replicated_heads_in_memory() -> None:
    """Two KV heads on four ranks are eight halves of the memory: each rank has one."""
    kv = full_format(2, 2, 32, block_size=16, dtype="int8")
    parts = split(kv, tensor_parallel=4)

    def blocks(**settings: Any) -> int:
        config = WorkerConfig(tensor_parallel_size=4, **settings)
        return choose_num_blocks(
            config, kv, PoolDemand(), max_model_len=160, available_bytes=10 * kv.block_bytes, parts=parts
        )

    assert blocks(kv_memory_bytes=8 * kv.block_bytes) == 4
    assert blocks(num_blocks=5) == 5
    with pytest.raises(ConfigError, match="num_blocks=6: takes"):
        blocks(num_blocks=6)


def test_23_each_rank_has_slabs_for_what_is_under_way() -> None:
    numbers = [settled(WorkerConfig(tensor_parallel_size=n), DeviceFacts(), None)[0].num_slabs for n in (1, 2, 4)]
    assert numbers == [8, 8, 16]


def test_23_kv_of_ranks_goes_through_host_memory() -> None:
    config = WorkerConfig(device="cuda", tensor_parallel_size=2)
    assert (config.kv_device, WorkerConfig(device="cuda").kv_device) == ("cpu", "cuda")
    check_transport("ucx", "cuda", 2)
    check_transport("ipc", "cuda", 1)
    with pytest.raises(ConfigError, match=r"transport='ipc': KV of several ranks goes through host memory"):
        check_transport("ipc", "cuda", 2)


def test_23_a_worker_of_ranks_makes_no_context_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(device_start, "begin_context", made.append)
    device_start.begin_device("cuda", "", Degrees(2))
    device_start.begin_device("cpu", "", Degrees())
    assert made == []
    device_start.begin_device("cuda", "", Degrees())
    assert made == ["cuda"]


def test_23_one_rank_sees_only_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.worker.visible_gpus.find_gpus", lambda environ: GPUS)
    environ: dict[str, str] = {}
    device_start.show_only("2", environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
