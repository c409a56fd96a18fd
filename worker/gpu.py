"""The worker's GPU as NVML sees it: utilization, memory, power, clocks, throttling, NVLink.

One thread reads once a second. A scrape and a heartbeat take the last reading, and none when it is old: a call of NVML
that hangs costs a series, never a step. Without NVML there are no series.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.common.observe.metrics import PREFIX
from diptych.common.store.worker_record import GpuLoad

log = structlog.get_logger(__name__)

EVERY_S = 1.0
FRESH_S = 5.0
"""A reading older than this is not reported."""
_JOIN_S = 1.0
_NO_SCOPE = 0xFFFFFFFF  # all links of the GPU together

THROTTLE_REASONS: Mapping[str, str] = {
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}
"""Reasons for lower clocks that are not a setting and not idleness -> NVML's name of the bit."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading; None: this GPU does not report it.

    Args:
        busy: share of the last sample period in which a kernel ran, 0 to 1.
        throttled: of THROTTLE_REASONS, those that hold the clocks down now.
        nvlinks: active NVLink links. nvlink_sent_bytes, nvlink_received_bytes: payload, since the driver was loaded.
    """

    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_celsius: float | None = None
    throttled: tuple[str, ...] = ()
    nvlinks: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuNumbers:
    """The last reading and what the readings add up to.

    Args:
        observed_s, busy_s: seconds covered by readings, and those in which a kernel ran.
        throttled_s: seconds by reason; every reason has one.
    """

    name: str
    uuid: str
    reading: GpuReading
    observed_s: float = 0.0
    busy_s: float = 0.0
    throttled_s: Mapping[str, float] = field(default_factory=dict)


def added(before: GpuNumbers, reading: GpuReading, elapsed_s: float) -> GpuNumbers:
    """The numbers after one more reading, which stands for the `elapsed_s` before it. Pure."""
    throttled = dict.fromkeys(THROTTLE_REASONS, 0.0) | dict(before.throttled_s)
    for reason in reading.throttled:
        throttled[reason] += elapsed_s
    known = reading.busy is not None
    return GpuNumbers(
        before.name,
        before.uuid,
        reading,
        before.observed_s + (elapsed_s if known else 0.0),
        before.busy_s + (reading.busy or 0.0) * elapsed_s,
        throttled,
    )


class GpuMonitor:
    """Reads one GPU on a thread of its own.

    Args:
        uuid: NVML's name of the GPU.
        nvml: the module pynvml, or one with its functions and constants.
    """

    def __init__(self, uuid: str, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._uuid = uuid
        self._nvml = nvml
        self._clock = clock
        self._handle: Any = None
        self._last: tuple[float, GpuNumbers] | None = None
        self._unsupported: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self.errors: dict[str, int] = {}
        """NVML's errors, by the function that failed."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread a second at most: it may be inside a call that hangs."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def numbers(self) -> GpuNumbers | None:
        """From any thread, without waiting. None: there is no reading, or the last one is old."""
        last = self._last
        return last[1] if last is not None and self._clock() - last[0] <= FRESH_S else None

    def load(self) -> GpuLoad | None:
        """For the worker's record."""
        numbers = self.numbers()
        if numbers is None:
            return None
        reading = numbers.reading
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        return GpuLoad(
            busy=reading.busy or 0.0,
            memory_usage=used / total if used is not None and total else 0.0,
            power_watts=reading.power_watts or 0.0,
            sm_clock_hz=reading.sm_clock_hz or 0.0,
            throttled=reading.throttled,
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            self.read_once()
            self._stop.wait(EVERY_S)

    def read_once(self) -> None:
        """One reading. The first that succeeds begins the sums."""
        if self._handle is None:
            self._handle = self._call("nvmlDeviceGetHandleByUUID", self._uuid)
            if self._handle is None:
                return
        reading = self._read(self._handle)
        now, last = self._clock(), self._last
        if last is None:
            name = self._call("nvmlDeviceGetName", self._handle) or "GPU"
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._last = now, added(GpuNumbers(name, self._uuid, reading), reading, 0.0)
        else:
            self._last = now, added(last[1], reading, now - last[0])

    def _read(self, gpu: Any) -> GpuReading:
        nvml = self._nvml
        rates, memory = self._call("nvmlDeviceGetUtilizationRates", gpu), self._call("nvmlDeviceGetMemoryInfo", gpu)
        power = self._call("nvmlDeviceGetPowerUsage", gpu)
        limit = self._call("nvmlDeviceGetEnforcedPowerLimit", gpu)
        sm = self._call("nvmlDeviceGetClockInfo", gpu, nvml.NVML_CLOCK_SM)
        most = self._call("nvmlDeviceGetMaxClockInfo", gpu, nvml.NVML_CLOCK_SM)
        mem = self._call("nvmlDeviceGetClockInfo", gpu, nvml.NVML_CLOCK_MEM)
        heat = self._call("nvmlDeviceGetTemperature", gpu, nvml.NVML_TEMPERATURE_GPU)
        bits = self._call("nvmlDeviceGetCurrentClocksEventReasons", gpu) or 0
        sent, received = self._nvlink_bytes(gpu)
        return GpuReading(
            busy=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1e3,
            power_limit_watts=None if limit is None else limit / 1e3,
            sm_clock_hz=None if sm is None else sm * 1e6,
            max_sm_clock_hz=None if most is None else most * 1e6,
            memory_clock_hz=None if mem is None else mem * 1e6,
            temperature_celsius=None if heat is None else float(heat),
            throttled=tuple(reason for reason, bit in THROTTLE_REASONS.items() if bits & getattr(nvml, bit)),
            nvlinks=self._nvlinks(gpu),
            nvlink_sent_bytes=sent,
            nvlink_received_bytes=received,
        )

    def _nvlinks(self, gpu: Any) -> int | None:
        active, known = 0, False
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = self._call("nvmlDeviceGetNvLinkState", gpu, link)
            if state is None:
                break  # past the last link, or there are none
            known, active = True, active + int(state == self._nvml.NVML_FEATURE_ENABLED)
        return active if known else None

    def _nvlink_bytes(self, gpu: Any) -> tuple[int | None, int | None]:
        nvml = self._nvml
        fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        found = self._call("nvmlDeviceGetFieldValues", gpu, [(name, _NO_SCOPE) for name in fields])
        if found is None:
            return None, None
        kib = [int(one.value.ullVal) if one.nvmlReturn == nvml.NVML_SUCCESS else None for one in found]
        sent, received = (None if value is None else 1024 * value for value in kib)
        return sent, received

    def _call(self, name: str, *arguments: Any) -> Any:
        """None when it fails. What the GPU does not support is asked once; another failure is counted."""
        key = f"{name}{arguments[1:]}"
        if key in self._unsupported:
            return None
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            self._unsupported.add(key)
        except self._nvml.NVMLError_InvalidArgument as error:
            if name != "nvmlDeviceGetNvLinkState":  # a link past the last
                self._count(name, error)
            self._unsupported.add(key)
        except self._nvml.NVMLError as error:
            self._count(name, error)
        return None

    def _count(self, name: str, error: Exception) -> None:
        if name not in self.errors:
            log.warning("NVML failed", call=name, error=str(error))
        self.errors[name] = self.errors.get(name, 0) + 1


def watch_gpu(device: str, uuid: str, nvml: Any = None) -> GpuMonitor | None:
    """A running monitor of a worker's GPU. None: it computes on a CPU, or NVML is not usable here.

    Args:
        device: the worker's, "cpu" or "cuda". uuid: its GPU's, as torch gives it.
        nvml: see GpuMonitor; None: pynvml.
    """
    if device == "cpu":
        return None
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        log.debug("no series of the GPU", why="the package nvidia-ml-py is not installed")
        return None
    except nvml.NVMLError as error:
        log.debug("no series of the GPU", why=str(error))
        return None
    monitor = GpuMonitor(uuid if uuid[:4] in ("GPU-", "MIG-") else f"GPU-{uuid}", nvml)
    monitor.start()
    return monitor


_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("gpu_utilization", "Share of the last sample in which a kernel ran on the GPU, 0 to 1", "busy"),
    ("gpu_memory_used_bytes", "Memory of the GPU in use, by all processes", "memory_used_bytes"),
    ("gpu_memory_total_bytes", "Memory of the GPU", "memory_total_bytes"),
    ("gpu_power_watts", "Power that the GPU draws", "power_watts"),
    ("gpu_power_limit_watts", "Power that the GPU may draw", "power_limit_watts"),
    ("gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors", "sm_clock_hz"),
    ("gpu_sm_clock_max_hertz", "Highest clock of the GPU's multiprocessors", "max_sm_clock_hz"),
    ("gpu_memory_clock_hertz", "Clock of the GPU's memory", "memory_clock_hz"),
    ("gpu_temperature_celsius", "Temperature of the GPU", "temperature_celsius"),
)
_COUNTERS = (("sent", "nvlink_sent_bytes"), ("received", "nvlink_received_bytes"))


def gpu_families(monitor: GpuMonitor) -> Iterator[Metric]:
    """The series of /metrics. Errors are always there, the rest while readings are fresh."""
    errors = CounterMetricFamily(PREFIX + "gpu_nvml_errors", "Calls of NVML that failed, by function", labels=["call"])
    for call, count in list(monitor.errors.items()):
        errors.add_metric([call], count)
    yield errors
    numbers = monitor.numbers()
    if numbers is None:
        return
    reading = numbers.reading
    for name, text, attribute in _GAUGES:
        value = getattr(reading, attribute)
        if value is not None:
            yield GaugeMetricFamily(PREFIX + name, text, value)
    if reading.busy is not None:
        yield CounterMetricFamily(PREFIX + "gpu_busy_seconds", "Seconds in which a kernel ran", numbers.busy_s)
    throttled = CounterMetricFamily(
        PREFIX + "gpu_throttled_seconds", "Seconds in which the GPU's clocks were held down", labels=["reason"]
    )
    for reason, seconds in numbers.throttled_s.items():
        throttled.add_metric([reason], seconds)
    yield throttled
    links = CounterMetricFamily(
        PREFIX + "gpu_nvlink_bytes", "Payload over the GPU's NVLink links", labels=["direction"]
    )
    for direction, attribute in _COUNTERS:
        value = getattr(reading, attribute)
        if value is not None:
            links.add_metric([direction], value)
    if links.samples:
        yield links
