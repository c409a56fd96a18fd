"""Names of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One incarnation of a worker; `address` is host:port of its gRPC server."""

    worker_id: str
    incarnation: str
    address: str
