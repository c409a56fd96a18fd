"""Which service objects a worker has, by name: the one place that knows those of both pools."""

from __future__ import annotations

from typing import NoReturn

from diptych.decode.server import DecodeService
from diptych.prefill.server import PrefillService, Publishing, SourceService
from diptych.worker.config import WorkerConfig
from diptych.worker.process import run_process
from diptych.worker.reads.reading import Reading
from diptych.worker.role import ServiceFactories
from diptych.worker.role_spec import DECODE, PREFILL, SOURCE
from diptych.worker.runtime import WorkerRuntime


def services_of(runtime: WorkerRuntime, publishing: Publishing | None = None) -> ServiceFactories:
    """Called once for a worker. What publishes is one object in every role: slabs of it may be out."""
    reading = Reading(runtime)
    publishing = publishing or Publishing(runtime)
    publishing.sessions.pulls = reading.pulls
    source = SourceService(publishing, reading)
    return {
        PREFILL: lambda: PrefillService(publishing),
        DECODE: lambda: DecodeService(runtime, reading),
        SOURCE: lambda: source,
    }


def run_worker(config: WorkerConfig) -> NoReturn:
    """Run a worker of config.role until a signal, then end the process. Raises: ConfigError."""
    run_process(config, services_of)
