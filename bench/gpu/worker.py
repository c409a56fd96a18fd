"""One worker of pair.py: the real process with random weights of Llama-3.1-8B's shape, so that no file is needed.

    python -m diptych.bench.gpu.worker prefill|decode OPTIONS(json)

Prints READY as every worker does; a prefill worker also prints when a first token left its engine, on the host's clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from diptych.bench.gpu.step import LLAMA_8B, random_weights
from diptych.cli.worker_roles import services_of
from diptych.common.compat import Compat, identified
from diptych.common.observe.logging import setup_logging
from diptych.decode import attempt
from diptych.decode import remote_prefill as remote_leg
from diptych.engine import async_unpacks as pulls
from diptych.engine import core
from diptych.engine.exec.attention import attention_version
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.sampler import SAMPLER_VERSION
from diptych.engine.messages import EngineEvent, TokensOut
from diptych.kvtransfer import core as transfer_core
from diptych.kvtransfer.ledgers import publisher as publish_side
from diptych.kvtransfer.ledgers import reader as read_side
from diptych.prefill import sessions as handoff
from diptych.prefill.server import PrefillService, Publishing
from diptych.worker.config import WorkerConfig
from diptych.worker.model import LoadedModel
from diptych.worker.process import make_transfer, switch_interval_s
from diptych.worker.reads import slab_unpacker as unpack_desk
from diptych.worker.role import ServiceFactories
from diptych.worker.role_spec import PREFILL
from diptych.worker.runtime import WorkerRuntime

BLOCK_SIZE = 16


class _TellingService(PrefillService):
    def on_step(self, events: Sequence[EngineEvent]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, TokensOut):
                print("FIRST " + json.dumps([event.attempt, now]), flush=True)
        super().on_step(events)


def random_model(config: WorkerConfig, graph_sizes: list[int] | None) -> LoadedModel:
    """The same weights in every process on the same kind of card."""
    parsed = describe(LLAMA_8B)
    torch.manual_seed(0)
    runner = TorchModelRunner(
        random_weights(parsed),
        eos_token_ids=(),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        graph_sizes=graph_sizes,
    )
    compat = Compat(
        model="random-8b",
        model_revision="random",
        tokenizer_revision="random",
        kv=kv_format_of(parsed, block_size=config.block_size, dtype=config.dtype),
        compute_dtype=config.dtype,
        attention_version=attention_version(config.device),
        sampler_version=SAMPLER_VERSION,
        backend=runner.backend,
    )
    identity, compat = identified(compat, b"k" * 32)
    return LoadedModel(runner, compat, identity, None)


def _services(runtime: WorkerRuntime) -> ServiceFactories:
    publishing = Publishing(runtime)
    return {**services_of(runtime, publishing), PREFILL: lambda: _TellingService(publishing)}


def trace() -> None:
    """Print the time of each stage of an attempt's KV, on the host's clock, to break down a hand-off."""

    def wrap(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = inner(*args, **kwargs)
            what = type(args[1]).__name__ if label == "handle" else ""
            if name != "take_done" or result:
                ended = time.monotonic()
                os.write(1, f"TRACE {began:.6f} {ended - began:.6f} {label}{what}\n".encode())
            return result

        setattr(owner, name, timed)

    wrap(core.EngineCore, "handle", "handle")
    wrap(core.EngineCore, "_execute", "execute")
    wrap(core.EngineCore, "_launch", "launch")
    wrap(core.EngineCore, "_land", "land")
    wrap(core.EngineCore, "_pack", "pack")
    wrap(pulls.AsyncUnpacks, "take_done", "pulls")
    wrap(handoff.PrefillSessions, "on_step", "P events")
    wrap(handoff.PrefillSession, "_publish", "P publish")
    wrap(publish_side.PublishSide, "_on_request", "P asked")
    wrap(read_side.ReadSide, "want", "D want")
    wrap(transfer_core.TransferCore, "_delivered", "D delivered")
    wrap(remote_leg.RemotePrefill, "_handles", "D announced")
    wrap(remote_leg.RemotePrefill, "_first_token", "D first token")
    wrap(unpack_desk.SlabUnpacker, "on_unpacked", "D unpacked")
    wrap(attempt.Attempt, "_on_kv_complete", "D complete")
    wrap(attempt.Attempt, "on_tokens", "D tokens")


async def serve(role: str, options: dict[str, Any]) -> None:
    """Until killed."""
    graph_sizes = options.pop("graph_sizes", None)
    number = options.pop("number", 0)
    sys.setswitchinterval(options.pop("switch_interval_s", switch_interval_s("cuda")))
    if options.pop("trace", False):
        trace()
    config = WorkerConfig(
        role=role, worker_id=f"{role}-{number}", device="cuda", dtype="bfloat16", block_size=BLOCK_SIZE, max_step_time_s=0.0,
        mixed_step_time_s=0.0,
        **options,
    )  # fmt: skip
    setup_logging(worker=config.worker_id, role=role)
    runtime = WorkerRuntime(
        config, random_model(config, graph_sizes), make_transfer=make_transfer, make_services=_services, store=None
    )
    await runtime.start()
    ready = {"worker_id": runtime.worker_id, "incarnation": runtime.incarnation, "address": runtime.address}
    print("READY " + json.dumps(ready), flush=True)
    await runtime.ended.wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(sys.argv[1], json.loads(sys.argv[2])))
