"""Which worker of a local cluster computes on which GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from diptych.cli.up import command as up
from diptych.cli.up.cluster_plan import ClusterPlan
from diptych.cli.up.config import UpConfig
from diptych.cli.up.gpus import Gpu, assign_gpus, choose_visible, describe_assignments, find_gpus
from diptych.cli.up.run_folder import RunFolder
from diptych.common.errors import ConfigError

GIB = 1 << 30
FOUND = [(Gpu(str(i), "NVIDIA H200", 140 * GIB, 139 * GIB), f"GPU-{i}abc") for i in range(4)]
GPUS = [gpu for gpu, _ in FOUND]


def at(assignments):
    return {name: assignment.gpu.visible for name, assignment in assignments.items()}


def test_15_3_4_two_gpus_are_one_for_each_worker():
    assignments = assign_gpus(GPUS[:2], prefill=1, decode=1)
    assert at(assignments) == {"prefill-0": "0", "decode-0": "1"}
    assert {assignment.share for assignment in assignments.values()} == {0.9}
    assert describe_assignments(assignments) == (
        "prefill-0 on GPU 0 (NVIDIA H200, 140 GiB); decode-0 on GPU 1 (NVIDIA H200, 140 GiB)"
    )


def test_15_3_4_on_one_gpu_both_roles_share_its_memory_and_that_is_printed():
    assignments = assign_gpus(GPUS[:1], prefill=1, decode=1)
    assert at(assignments) == {"prefill-0": "0", "decode-0": "0"}
    assert {assignment.share for assignment in assignments.values()} == {0.45}
    reported = describe_assignments(assignments)
    assert "prefill-0 and decode-0 on GPU 0 (NVIDIA H200, 140 GiB), 45% of its memory each" in reported
    assert "diptych serve --device cuda" in reported


@pytest.mark.parametrize(
    ("num", "prefill", "decode", "given", "expected"),
    [
        (4, 2, 2, {}, {"prefill-0": 0, "prefill-1": 1, "decode-0": 2, "decode-1": 3}),
        (3, 2, 2, {}, {"prefill-0": 0, "prefill-1": 1, "decode-0": 2, "decode-1": 0}),
        (2, 2, 1, {}, {"prefill-0": 0, "prefill-1": 1, "decode-0": 0}),
        (2, 1, 1, {"decode_gpus": [0]}, {"prefill-0": 1, "decode-0": 0}),
        (4, 2, 1, {"prefill_gpus": [3], "decode_gpus": [2]}, {"prefill-0": 3, "prefill-1": 3, "decode-0": 2}),
        (1, 1, 1, {"prefill_gpus": [0]}, {"prefill-0": 0, "decode-0": 0}),
    ],
)
def test_seats(num, prefill, decode, given, expected):
    assignments = assign_gpus(GPUS[:num], prefill=prefill, decode=decode, **given)
    assert at(assignments) == {name: str(number) for name, number in expected.items()}
    for name, assignment in assignments.items():
        assert assignment.share == round(0.9 / list(at(assignments).values()).count(at(assignments)[name]), 3)


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"decode_gpus=2: there are 2 GPUs: 0 to 1"):
        assign_gpus(GPUS[:2], prefill=1, decode=1, decode_gpus=[2])


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        ("GPU-3a, 1", ["GPU-3a", "1"]),
        ("1,nonsense,2", ["1"]),
    ],
)
def test_cuda_visible_devices_is_respected(visible, names):
    assert [gpu.visible for gpu in choose_visible(FOUND, visible)] == names


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_none_left_is_one_sentence(visible):
    with pytest.raises(ConfigError, match=r"no CUDA GPU here: CUDA_VISIBLE_DEVICES=.* leaves none of 4; --device cpu"):
        choose_visible(FOUND, visible)


def test_workers_get_their_gpu_and_their_share(tmp_path):
    config = UpConfig(device="cuda")
    folder = RunFolder(tmp_path / ".run")
    for gpus, transport, share in ((GPUS[:2], [], "0.9"), (GPUS[:1], ["ipc"], "0.45")):
        assignments = assign_gpus(gpus, prefill=1, decode=1)
        specs = ClusterPlan(config, folder, tmp_path / "model", "m", threads=1, assignments=assignments).worker_specs()
        assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == [
            assignment.gpu.visible for assignment in assignments.values()
        ]
        for spec in specs:
            command = list(spec.command())
            assert command[command.index("--gpu-memory-utilization") + 1] == share
            assert [command[i + 1] for i, flag in enumerate(command) if flag == "--transport"] == transport
            assert "--max-step-time-s" not in command


def test_15_3_4_without_a_gpu_nothing_is_started_not_even_redis(tmp_path, monkeypatch):
    class NVMLError(Exception):
        pass

    def init():
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=init))
    monkeypatch.setattr(up, "Supervisor", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(ConfigError, match="no CUDA GPU here: NVML says NVML Shared Library Not Found"):
        up.run_up(UpConfig(device="cuda"), tmp_path / ".run", lambda stages: pytest.fail("a model was fetched"))
    assert not (tmp_path / ".run").exists()


def test_nvml_is_asked(monkeypatch):
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=10 + handle, free=5),
        nvmlDeviceGetName=lambda handle: b"NVIDIA X",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [Gpu("1", "NVIDIA X", 11, 5)]
    assert len(find_gpus({})) == 2


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"device": "gpu"}, "device"),
        ({"transport": "ipc"}, "transport"),
        ({"prefill_gpus": "0"}, "prefill_gpus"),
        ({"device": "cuda", "decode_gpus": "one"}, "decode_gpus"),
    ],
)
def test_bad_values_are_named(values, field):
    with pytest.raises(ConfigError) as caught:
        UpConfig(**values)
    assert caught.value.field == field
