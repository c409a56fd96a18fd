"""Leases of workers, and workers as the placement sees them."""

from __future__ import annotations

from typing import Any

from diptych.common.store.adapters import AdapterEntry, AdapterVersion
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.router.placement.types import WorkerView


def worker_record(worker_id: str = "p0", **changes: Any) -> WorkerRecord:
    """The lease of an idle worker; p...: of prefill."""
    plain: dict[str, Any] = {
        "worker_id": worker_id, "incarnation": "a", "role": "prefill" if worker_id.startswith("p") else "decode",
        "address": "127.0.0.1:1", "pid": 1, "model": "m", "compat": {}, "kv_bytes_per_token": 50_000, "num_blocks": 100,
        "block_size": 16, "max_model_len": 2048, "max_num_seqs": 8, "event_epoch": 0,
    }  # fmt: skip
    return WorkerRecord(**(plain | changes))


def worker_view(
    worker_id: str, hit: int = 0, pending: int = 0, requests: int = 0, reported_at: float = 0.0, **load: Any
) -> WorkerView:
    """Pending prompts of prefill are many and short: little of a long one is computed before a short one."""
    if worker_id.startswith("p"):
        requests = requests or pending // 20
        load.setdefault("num_waiting", load.get("waiting_prompt_tokens", 0) // 20)
    rates = {"prefill_tokens_per_s": 100.0, "decode_step_s": 0.03}
    record = worker_record(worker_id, incarnation=f"i-{worker_id}", load=WorkerLoad(**(rates | load)))
    return WorkerView(record, hit, (), pending, requests, reported_at)


def adapter_version(number: int = 1, content: str = "", **changes: Any) -> AdapterVersion:
    """`content`: what its id is made of; default: its number."""
    made = f"{int((content or str(number)).encode().hex(), 16):032x}"[-32:]
    plain: dict[str, Any] = {
        "adapter_id": made,
        "folder": f"/adapters/{content or number}",
        "rank": 8,
        "num_bytes": 4096,
    }
    return AdapterVersion(**({"number": number, "created": 1} | plain | changes))


def adapter_entry(name: str = "poems", *contents: str, model: str = "tiny", **changes: Any) -> AdapterEntry:
    """A name with a version for each content; the last is stable."""
    versions = tuple(adapter_version(i, content) for i, content in enumerate(contents or (name,), 1))
    return AdapterEntry(**({"name": name, "model": model, "versions": versions, "stable": len(versions)} | changes))
