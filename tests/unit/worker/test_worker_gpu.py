"""18.5: the GPU's series: values, sums, errors, and readings that do not come."""

from __future__ import annotations

import threading
from dataclasses import replace

import pynvml
import pytest
import structlog.testing

from diptych.common.clock import MonotonicClock
from diptych.common.store.worker_record import GpuLoad
from diptych.engine.messages import EngineStats
from diptych.worker import gpu as gpu_module
from diptych.worker.fake_nvml import UUID, FakeNvml
from diptych.worker.gpu import FRESH_S, THROTTLE_REASONS, GpuMonitor, GpuNumbers, GpuReading, added, watch_gpu
from diptych.worker.metrics import WorkerMetrics
from diptych.worker.stats import gpu_to_proto


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def watched(nvml: FakeNvml) -> tuple[GpuMonitor, Clock]:
    clock = Clock()
    return GpuMonitor(UUID, nvml, clock), clock


def exposed(monitor: GpuMonitor) -> dict[str, float]:
    """Samples of the worker's registry that begin with gpu_: "name" or "name label-value"."""
    metrics = WorkerMetrics("decode", stats=EngineStats, clock=MonotonicClock())
    metrics.identify({"role": "decode", "worker": "decode-0"})
    metrics.gpu = monitor
    found = {}
    for family in metrics.exposed.collect():
        for sample in family.samples:
            if sample.name.startswith("diptych_gpu_"):
                assert sample.labels["role"] == "decode"
                assert sample.labels["worker"] == "decode-0"
                own = [value for name, value in sample.labels.items() if name not in ("role", "worker")]
                found[" ".join([sample.name.removeprefix("diptych_"), *own])] = sample.value
    return found


def test_18_5_readings_are_series_in_base_units_and_add_up() -> None:
    nvml = FakeNvml()
    monitor, clock = watched(nvml)
    nvml.event_reasons = pynvml.nvmlClocksEventReasonGpuIdle
    monitor.read_once()
    clock.time += 2.0
    nvml.busy_percent, nvml.event_reasons = 80, pynvml.nvmlClocksEventReasonHwThermalSlowdown
    monitor.read_once()
    clock.time += 1.0
    nvml.busy_percent, nvml.event_reasons = 100, 0
    monitor.read_once()
    found = exposed(monitor)
    throttled = {f"gpu_throttled_seconds_total {reason}": 0.0 for reason in THROTTLE_REASONS}
    assert found == pytest.approx(
        throttled
        | {
            "gpu_utilization": 1.0,
            "gpu_busy_seconds_total": 0.8 * 2 + 1.0 * 1,
            "gpu_throttled_seconds_total hw_thermal": 2.0,
            "gpu_memory_used_bytes": float(30 << 30),
            "gpu_memory_total_bytes": float(120 << 30),
            "gpu_power_watts": 350.5,
            "gpu_power_limit_watts": 700.0,
            "gpu_sm_clock_hertz": 1.5e9,
            "gpu_sm_clock_max_hertz": 1.98e9,
            "gpu_memory_clock_hertz": 3.201e9,
            "gpu_temperature_celsius": 61.0,
            "gpu_nvlink_bytes_total sent": 1000 * 1024.0,
            "gpu_nvlink_bytes_total received": 2000 * 1024.0,
        }
    )
    message = gpu_to_proto(monitor.numbers())
    assert message is not None
    assert (message.name, message.uuid, message.observed_s, message.nvlinks) == ("NVIDIA H200", UUID, 3.0, 2)
    assert monitor.load() == GpuLoad(busy=1.0, memory_usage=0.25, power_watts=350.5, sm_clock_hz=1.5e9)


def test_18_5_an_old_reading_is_no_series() -> None:
    monitor, clock = watched(FakeNvml())
    assert exposed(monitor) == {}, "before the first reading"
    monitor.read_once()
    assert "gpu_utilization" in exposed(monitor)
    clock.time += FRESH_S + 0.1
    assert exposed(monitor) == {}
    assert monitor.load() is None
    assert gpu_to_proto(monitor.numbers()) is None


def test_18_5_a_call_that_hangs_blocks_no_other() -> None:
    nvml = FakeNvml()
    nvml.held = threading.Event()
    monitor, _ = watched(nvml)
    monitor.start()
    try:
        assert nvml.entered.wait(60)
        assert monitor.numbers() is None
        assert exposed(monitor) == {}
        monitor.close()  # returns though the call does not
    finally:
        nvml.held.set()


def test_18_5_errors_are_counted_by_function_and_the_rest_is_reported() -> None:
    nvml = FakeNvml()
    monitor, clock = watched(nvml)
    nvml.fails["nvmlDeviceGetPowerUsage"] = pynvml.NVMLError_GpuIsLost()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            monitor.read_once()
            clock.time += 1.0
    found = exposed(monitor)
    assert found["gpu_nvml_errors_total nvmlDeviceGetPowerUsage"] == 3
    assert "gpu_power_watts" not in found
    assert found["gpu_sm_clock_hertz"] == 1.5e9
    assert [entry["call"] for entry in logs] == ["nvmlDeviceGetPowerUsage"], "one line, not one a second"
    nvml.fails.clear()
    monitor.read_once()
    assert exposed(monitor)["gpu_power_watts"] == 350.5


def test_18_5_what_a_gpu_does_not_support_is_no_error() -> None:
    nvml = FakeNvml()
    for name in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetUtilizationRates"):
        nvml.fails[name] = pynvml.NVMLError_NotSupported()
    monitor, clock = watched(nvml)
    monitor.read_once()
    clock.time += 1.0
    monitor.read_once()
    found = exposed(monitor)
    assert monitor.errors == {}
    assert not {"gpu_utilization", "gpu_busy_seconds_total"} & set(found)
    assert not any("nvlink" in name or "errors" in name for name in found)
    numbers = monitor.numbers()
    assert numbers is not None
    assert numbers.observed_s == 0.0, "utilization was not observed"


def test_18_5_a_field_that_is_not_there_leaves_the_other() -> None:
    nvml = FakeNvml()
    monitor, _ = watched(nvml)
    values = nvml.nvmlDeviceGetFieldValues("handle", [(138, 0), (139, 0)])
    values[0].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: values  # type: ignore[method-assign]
    monitor.read_once()
    assert {name for name in exposed(monitor) if "nvlink" in name} == {"gpu_nvlink_bytes_total received"}


def test_18_5_without_nvml_there_is_no_monitor_and_one_line_at_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    nvml.fails["nvmlInit"] = pynvml.NVMLError_LibraryNotFound()
    with structlog.testing.capture_logs() as logs:
        assert watch_gpu("cpu", "") is None
        assert logs == []
        assert watch_gpu("cuda", UUID, nvml) is None

        def missing(name: str) -> None:
            raise ImportError(name)

        monkeypatch.setattr(gpu_module.importlib, "import_module", missing)
        assert watch_gpu("cuda", UUID) is None
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("debug", "no series of the GPU")] * 2


def test_18_5_the_gpu_of_the_worker_is_found_by_the_uuid_that_torch_gives() -> None:
    nvml = FakeNvml()
    monitor = watch_gpu("cuda", UUID.removeprefix("GPU-"), nvml)
    assert monitor is not None
    monitor.close()
    monitor.read_once()
    assert monitor.numbers() is not None
    other = GpuMonitor("GPU-0", nvml)
    other.read_once()
    assert (other.numbers(), other.errors) == (None, {"nvmlDeviceGetHandleByUUID": 1})


def test_18_5_sums_of_readings() -> None:
    reading = GpuReading(busy=0.5, throttled=("sw_power_cap",))
    one = added(GpuNumbers("g", "u", reading), reading, 0.0)
    two = added(one, replace(reading, busy=1.0), 4.0)
    three = added(two, replace(reading, busy=None, throttled=()), 1.0)
    assert (one.observed_s, two.observed_s, three.observed_s) == (0.0, 4.0, 4.0)
    assert (two.busy_s, three.busy_s) == (4.0, 4.0)
    assert three.throttled_s["sw_power_cap"] == 4.0
    assert set(three.throttled_s) == set(THROTTLE_REASONS)
