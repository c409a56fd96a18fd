"""The two processes of `diptych bench router`: a decode worker without an engine, and the production router in front of
it.

    python -P -m diptych.bench.router.relay_parts decode [STEP_S]
    python -P -m diptych.bench.router.relay_parts router MODEL_FOLDER DECODE_ADDRESS [SECRET_FILE]

Each prints `serves ADDRESS...` and runs until it is terminated.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from diptych.cli.temporary import temporary_folder
from diptych.common.block_identity import IdentityHeader, identity_facts
from diptych.common.checkpoint.hashing import model_fingerprint
from diptych.common.clock import MonotonicClock
from diptych.common.collector import set_collector
from diptych.common.errors import ConfigError
from diptych.common.observe.logging import setup_logging
from diptych.common.observe.metrics import Metrics
from diptych.common.secret import create_secret, derive_key
from diptych.common.store.memory import MemoryStore
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.text.revision import tokenizer_revision
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.server import ApiServers

BLOCK_SIZE = 16
READY_DEADLINE_S = 30.0


async def run_decode(step_s: float = 0.0) -> None:
    worker = await FakeDecode(step_s=step_s).start()
    print("serves", worker.address, flush=True)
    await asyncio.Event().wait()


async def run_router(folder: Path, decode_address: str, given_secret: Path | None = None) -> None:
    with temporary_folder("diptych-bench-") as root:
        secret_file = given_secret or Path(root) / "secret"
        secret = create_secret(secret_file)
        clock = MonotonicClock()
        store = MemoryStore(clock)
        for record in worker_records(folder, secret, decode_address):
            await store.put_worker(record, ttl_s=86_400.0)
        config = RouterConfig(model=str(folder), secret_file=str(secret_file), local_prefill_max_tokens=0)
        frontend = Frontend(config, store=store, clock=clock)
        servers = ApiServers("127.0.0.1", 0, 0)
        await frontend.start()
        addresses = await servers.start(frontend, getattr(frontend, "metrics", None) or Metrics())
        until = clock.now() + READY_DEADLINE_S
        while not frontend.ready()[0]:
            if clock.now() > until:
                raise ConfigError("router", addresses.http, f"not ready: {'; '.join(frontend.ready()[1])}")
            await asyncio.sleep(0.05)
        set_collector()
        print("serves", addresses.http, addresses.grpc, flush=True)
        await asyncio.Event().wait()


def worker_records(
    folder: Path, secret: bytes, address: str, number: int = 0, model_revision: str = ""
) -> list[WorkerRecord]:
    """The leases of a decode and a prefill worker of the model, both at one address. `model_revision`: "": of the weights
    in the folder."""
    header = IdentityHeader(
        key=derive_key(secret, "block identity"),
        model_revision=model_revision or model_fingerprint(folder),
        tokenizer_revision=tokenizer_revision(folder),
        kv_rule="float32",
        block_size=BLOCK_SIZE,
    )
    return [_record(f"{role[0]}{number}", role, address, header) for role in ("decode", "prefill")]


def _record(worker_id: str, role: str, address: str, header: IdentityHeader) -> WorkerRecord:
    compat = identity_facts(header)
    return WorkerRecord(
        worker_id=worker_id,
        incarnation="i1",
        role=role,
        address=address,
        pid=1,
        model="bench",
        compat=compat,
        kv_bytes_per_token=46_080,
        num_blocks=100_000,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=4096,
        event_epoch=0,
    )


if __name__ == "__main__":
    part = sys.argv[1]
    setup_logging(role=part)
    if part == "decode":
        uvloop.run(run_decode(*map(float, sys.argv[2:])))
    else:
        uvloop.run(run_router(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]) if len(sys.argv) > 4 else None))
