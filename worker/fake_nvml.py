"""For tests: NVML of one GPU, through the interface of the library: its constants and errors are the library's own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml

UUID = "GPU-5e1a4c3b-0000-0000-0000-000000000001"


class FakeNvml:
    """`fails`: function -> the error that it raises. `held`: a call waits until the event is set."""

    def __init__(self) -> None:
        self.busy_percent = 50
        self.event_reasons = 0
        self.nvlink_kib = [1000, 2000]
        self.links = [1, 1, 0]
        self.fails: dict[str, Exception] = {}
        self.held: threading.Event | None = None
        self.entered = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _enter(self, name: str) -> None:
        if self.held is not None:
            self.entered.set()
            assert self.held.wait(60)
        if name in self.fails:
            raise self.fails[name]

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._enter("nvmlDeviceGetHandleByUUID")
        if uuid != UUID:
            raise pynvml.NVMLError_NotFound
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._enter("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.busy_percent, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=30 << 30, total=120 << 30, free=90 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._enter("nvmlDeviceGetPowerUsage")
        return 350_500  # milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1500, pynvml.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1980}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.event_reasons

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        self._enter("nvmlDeviceGetNvLinkState")
        if link >= len(self.links):
            raise pynvml.NVMLError_InvalidArgument
        return self.links[link]

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
        self._enter("nvmlDeviceGetFieldValues")
        wanted = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        assert [field for field, _ in fields] == list(wanted)
        good = pynvml.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=good, value=SimpleNamespace(ullVal=kib)) for kib in self.nvlink_kib]
