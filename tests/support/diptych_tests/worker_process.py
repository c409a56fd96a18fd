"""A worker as a separate process: the shipped one, with a fake model in place of one that computes.

Its argument is JSON: settings of WorkerConfig; under "fake" those of FakeRunner, and

step_s    least seconds of a step
poison    a row that computes this token comes out bad, as NaN logits would
kv_proxy  [FILE, PORT]: peers are told that UCX is at PORT, where a proxy listens; the file gets the port of UCX
held_loads  FILE: while it exists, reads of adapters wait; FILE.ID of this worker says that one does
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from diptych.cli.worker_roles import run_worker
from diptych.common.adapters.peft import AdapterFacts
from diptych.common.compat import identified
from diptych.common.text.detokenizer import RequestDetokenizer
from diptych.common.text.revision import tokenizer_revision
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.messages import LoadedAdapter, ScheduledSeq
from diptych.kvtransfer.api import Transfer
from diptych.worker import process
from diptych.worker.config import WorkerConfig
from diptych.worker.model import LoadedModel, identity_key, make_grammars
from diptych.worker.role_spec import DECODE, ROLES
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import pd, waiting


def load(
    config: WorkerConfig, *, step_s: float = 0.0, poison: int = -1, held_loads: str = "", **fake: Any
) -> LoadedModel:
    """A fake model with the tokenizer of the model folder."""

    def before_execute(seqs: Sequence[ScheduledSeq]) -> None:
        if step_s:
            time.sleep(step_s)  # sleep: how long a step takes
        model.runner.bad_attempts |= {seq.attempt for seq in seqs if poison in seq.token_ids}

    def read_adapter(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        gate, deadline = Path(held_loads), time.monotonic() + waiting.DEADLINE_S
        while gate.exists() and time.monotonic() < deadline:
            Path(f"{gate}.{config.worker_id}").touch()
            time.sleep(0.01)  # sleep: looks again
        return read(folder, facts)

    folder = Path(config.model)
    model = pd.fake_model(
        before_execute=before_execute, block_size=config.block_size, num_blocks=config.num_blocks, **fake
    )
    read = model.runner.read_adapter
    if held_loads:
        model.runner.read_adapter = read_adapter  # type: ignore[method-assign]
    compat = replace(model.compat, tokenizer_revision=tokenizer_revision(folder), model=config.model_name)
    identity, compat = identified(compat, identity_key(config))
    model = replace(model, compat=compat, identity=identity)
    if DECODE not in ROLES[config.role].services:
        return model
    tokenizer = ModelTokenizer(folder)
    return replace(
        model,
        detokenizer_factory=lambda sampling, prompt: RequestDetokenizer(tokenizer, sampling.stop, prompt=prompt),
        grammars=None if config.grammar_backend == "none" else make_grammars(config, tokenizer),
    )


def show_proxy(port_file: str, proxy: int) -> None:
    """The KV address that peers get names the port `proxy`; the one on which UCX listens is in the file."""
    make = process.make_transfer

    async def make_transfer(runtime: WorkerRuntime) -> Transfer:
        transfer = await make(runtime)
        listening = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        blob = transfer.address.blob
        port = max(listening, key=lambda port: blob.rfind(struct.pack("!H", port)))  # it is one of the last fields
        head, there, tail = blob.rpartition(struct.pack("!H", port))
        assert there, "UCX's address does not name its port"
        Path(port_file).write_text(str(port), encoding="ascii")  # noqa: ASYNC240 - a few bytes, once
        transfer.address = replace(transfer.address, blob=head + struct.pack("!H", proxy) + tail)
        return transfer

    process.make_transfer = make_transfer


def main(options: dict[str, Any]) -> None:
    fake = options.pop("fake", {})
    if proxy := fake.pop("kv_proxy", None):
        show_proxy(*proxy)
    process.load_model = lambda config, on_grammars=None: load(config, **fake)  # type: ignore[attr-defined]
    run_worker(WorkerConfig(**options))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
