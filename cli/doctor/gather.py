"""Data collection of `diptych doctor`: the router's status over HTTP, and every worker over gRPC, twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc

from diptych.cli.doctor.facts import Facts, Gpu, Host, Worker
from diptych.cli.status_client import StatusClient
from diptych.cli.worker_access import WorkerAccess
from diptych.rpc.fields import same_fields
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2

_TIMEOUT_S = 3.0


def gather(
    client: StatusClient,
    sample_s: float,
    *,
    access: WorkerAccess,
    sleep: Callable[[float], None] = time.sleep,
) -> Facts:
    """Query router and workers, wait `sample_s`, query the workers again. Raises: DiptychError when the router cannot be
    reached."""
    status = client.get()
    # `diptych serve` keeps the secret that calls to its worker need to itself.
    known = [] if status.get("one_process") else (status.get("cluster") or {}).get("workers", [])
    began = time.monotonic()
    before = _query_all(known, access)
    sleep(max(0.0, sample_s))
    after = _query_all(known, access)
    interval_s = max(time.monotonic() - began, 1e-3)
    # Status comes last, so that its stages include requests that ended during the sample.
    return Facts(client.get(), [_joined(one, other) for one, other in zip(before, after, strict=True)], interval_s)


def _joined(before: Worker, after: Worker) -> Worker:
    return after if after.error or before.error else replace(after, before=before.after, gpu_before=before.gpu)


def _query_all(known: list[dict[str, Any]], access: WorkerAccess) -> list[Worker]:
    if not known:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(known)), thread_name_prefix="doctor") as pool:
        return list(pool.map(lambda one: _query(one, access), known))


@dataclass(frozen=True, slots=True)
class _Answers:
    stats: worker_pb2.GetStatsResponse
    audit: worker_pb2.AuditResponse
    host: Host


def _query(known: dict[str, Any], access: WorkerAccess) -> Worker:
    worker = Worker(known["id"], known["role"], known["address"])
    try:
        with access.open(worker.address) as channel:
            answers = _answers(WorkerStub(channel))
    except grpc.RpcError as error:
        return replace(worker, error=f"{error.code().name}: {error.details()}")
    stats, audit, cost = answers.stats, answers.audit, answers.stats.preemption
    return replace(
        worker,
        path=stats.transport_path,
        bytes_per_s=stats.transport_bytes_per_s,
        links=dict(stats.link_bytes_per_s),
        after={**stats.engine, "kv_bytes_received": float(audit.kv_bytes_received)},
        settings=dict(stats.settings),
        host=answers.host,
        violations=tuple(audit.violations),
        slabs_total=audit.slabs.total,
        slabs_quarantined=audit.slabs.quarantined,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        swap_from_tokens=cost.swap_from_tokens if cost.HasField("swap_from_tokens") else None,
        gpu=_gpu(stats.gpu) if stats.HasField("gpu") else None,
    )


def _gpu(reported: worker_pb2.GpuFacts) -> Gpu:
    known = reported.HasField("nvlink_sent_bytes") and reported.HasField("nvlink_received_bytes")
    return Gpu(
        uuid=reported.uuid,
        observed_s=reported.observed_s,
        busy_s=reported.busy_s,
        throttled_s=dict(reported.throttled_s),
        sm_clock_hz=reported.sm_clock_hz if reported.HasField("sm_clock_hz") else None,
        max_sm_clock_hz=reported.max_sm_clock_hz if reported.HasField("max_sm_clock_hz") else None,
        nvlinks=reported.nvlinks if reported.HasField("nvlinks") else None,
        nvlink_bytes=reported.nvlink_sent_bytes + reported.nvlink_received_bytes if known else None,
    )


def _answers(stub: Any) -> _Answers:
    sent_at = time.time()
    stats = stub.GetStats(worker_pb2.GetStatsRequest(), timeout=_TIMEOUT_S)
    took_s = max(0.0, time.time() - sent_at)
    audit = stub.Audit(worker_pb2.AuditRequest(full=False), timeout=_TIMEOUT_S)
    facts = stats.host
    # The clock was read between send and receive: take the middle; half the round trip bounds the error.
    host = Host(
        **same_fields(Host, facts, but=("rdma_devices", "rdma_missing", "clock_ahead_s", "clock_error_s")),
        rdma_devices=tuple(facts.rdma_devices),
        rdma_missing=tuple(facts.rdma_missing),
        clock_ahead_s=facts.wall_clock_s - (sent_at + took_s / 2),
        clock_error_s=took_s / 2,
    )
    return _Answers(stats, audit, host)
