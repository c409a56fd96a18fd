"""Which worker of a local cluster computes on which GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from diptych.cli.up import command as up
from diptych.cli.up.cluster_plan import ClusterPlan
from diptych.cli.up.config import UpConfig
from diptych.cli.up.gpus import assign_gpus, describe_assignments
from diptych.cli.up.run_folder import RunFolder
from diptych.common.errors import ConfigError
from diptych.worker.visible_gpus import NVLINK, OTHER_NODE, PCIE, Gpu, choose_visible, find_gpus, find_links, worst_link

GIB = 1 << 30
GPUS = [Gpu(str(i), "NVIDIA H200", 140 * GIB, 139 * GIB, f"GPU-{i}abc") for i in range(4)]


def at(assignments):
    return {name: assignment.visible[0] for name, assignment in assignments.items()}


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
    assert [gpu.visible for gpu in choose_visible(GPUS, visible)] == names


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_none_left_is_one_sentence(visible):
    with pytest.raises(ConfigError, match=r"no CUDA GPU here: CUDA_VISIBLE_DEVICES=.* leaves none of 4; --device cpu"):
        choose_visible(GPUS, visible)


def test_workers_get_their_gpu_and_their_share(tmp_path):
    config = UpConfig(device="cuda")
    folder = RunFolder(tmp_path / ".run")
    for gpus, transport, share in ((GPUS[:2], [], "0.9"), (GPUS[:1], ["ipc"], "0.45")):
        assignments = assign_gpus(gpus, prefill=1, decode=1)
        specs = ClusterPlan(config, folder, tmp_path / "model", "m", threads=1, assignments=assignments).worker_specs()
        assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == [
            assignment.visible[0] for assignment in assignments.values()
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
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [Gpu("1", "NVIDIA X", 11, 5, "GPU-1")]
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


def pairs(*sets):
    """Links: NVLink within each of these groups of GPU numbers, PCIe between them."""
    numbers = sorted(number for group in sets for number in group)
    return {
        frozenset((GPUS[one].uuid, GPUS[other].uuid)): NVLINK if any({one, other} <= group for group in sets) else PCIE
        for one in numbers
        for other in numbers
        if one < other
    }


def groups(assignments):
    return {name: ",".join(gpu.visible for gpu in assignment.gpus) for name, assignment in assignments.items()}


@pytest.mark.parametrize(
    ("num", "ranks", "links", "given", "expected"),
    [
        (4, (2, 2), pairs({0, 1}, {2, 3}), {}, {"prefill-0": "0,1", "decode-0": "2,3"}),
        (4, (2, 2), pairs({0, 2}, {1, 3}), {}, {"prefill-0": "0,2", "decode-0": "1,3"}),
        (4, (1, 2), pairs({0, 1}, {2, 3}), {}, {"prefill-0": "0", "decode-0": "2,3"}),
        (2, (2, 2), pairs({0, 1}), {}, {"prefill-0": "0,1", "decode-0": "0,1"}),
        (4, (2, 1), {}, {"decode_gpus": [0]}, {"prefill-0": "1,2", "decode-0": "0"}),
        (1, (2, 2), {}, {"prefill_gpus": [0, 0], "decode_gpus": [0, 0]}, {"prefill-0": "0,0", "decode-0": "0,0"}),
    ],
)
def test_23_a_workers_ranks_get_gpus_with_the_best_connection(num, ranks, links, given, expected):
    prefill, decode = ranks
    assigned = assign_gpus(
        GPUS[:num], prefill=1, decode=1, prefill_ranks=prefill, decode_ranks=decode, links=links, **given
    )
    assert groups(assigned) == expected
    shared = {*expected["prefill-0"].split(",")} & {*expected["decode-0"].split(",")}
    assert {one.share for one in assigned.values()} == {0.45 if shared else 0.9}


def test_23_the_line_of_assignments_says_how_ranks_are_connected():
    assigned = assign_gpus(GPUS, prefill=1, decode=1, prefill_ranks=1, decode_ranks=2, links=pairs({0, 1}, {2}, {3}))
    assert describe_assignments(assigned) == (
        "prefill-0 on GPU 0 (NVIDIA H200, 140 GiB); decode-0 on GPUs 1,2 (NVIDIA H200, 140 GiB each, PCIe between them)"
    )


@pytest.mark.parametrize(
    ("num", "given", "message"),
    [
        (1, {}, r"decode_tensor_parallel_size=2: 2 ranks of a worker need 2 GPUs, and there are 1"),
        (2, {"decode_gpus": [1]}, r"decode_gpus='1': a worker has 2 ranks: name a GPU for each"),
    ],
)
def test_23_too_few_gpus_for_the_ranks_of_a_worker_are_named(num, given, message):
    with pytest.raises(ConfigError, match=message):
        assign_gpus(GPUS[:num], prefill=1, decode=1, decode_ranks=2, **given)


def test_23_a_worker_of_ranks_sees_its_gpus_and_all_kv_goes_through_host_memory(tmp_path):
    config = UpConfig(device="cuda", decode_tensor_parallel_size=2)
    assigned = assign_gpus(GPUS[1:4], prefill=1, decode=1, decode_ranks=2)
    plan = ClusterPlan(config, RunFolder(tmp_path / ".run"), tmp_path / "model", "m", threads=3, assignments=assigned)
    prefill, decode = plan.worker_specs()
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in (prefill, decode)] == ["1", "2,3"]
    flags = dict(zip(command[:-1], command[1:], strict=True)) if (command := list(decode.command())) else {}
    assert {flags[f"--{name}"] for name in ("tensor-parallel-size", "transport", "devices", "threads")} == {
        "2", "ucx", "0,1", "6",
    }  # fmt: skip
    other = list(prefill.command())
    assert other[other.index("--transport") + 1] == "ucx"
    assert "--tensor-parallel-size" not in other


def test_23_nvml_says_how_gpus_are_connected(monkeypatch):
    class NVMLError(Exception):
        pass

    def ancestor(one, other):
        if {one, other} == {0, 3}:
            raise NVMLError
        return 50 if 3 in (one, other) else 30

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_TOPOLOGY_SYSTEM=50,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[4]),
        nvmlDeviceGetP2PStatus=lambda one, other, index: 0 if {one, other} == {0, 1} else 1,
        nvmlDeviceGetTopologyCommonAncestor=ancestor,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    links = find_links(GPUS)
    assert [worst_link([GPUS[i] for i in group], links) for group in ((0, 1), (0, 1, 2), (1, 2, 3), (0, 3), (2,))] == [
        NVLINK, PCIE, OTHER_NODE, "", "",
    ]  # fmt: skip
