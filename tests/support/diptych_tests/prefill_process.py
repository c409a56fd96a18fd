"""A prefill worker as a separate process: the real worker with a fake model, over real UCX. Its commands:

hold N    the engine stops before the N-th step from now (0: the next); answered at once, and by "held" when it stops
hold-load the next read of an adapter stops, likewise
go        it continues
idle      answered once no request is left
quit
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import uvloop

from diptych.cli.worker_roles import services_of
from diptych.common.adapters.peft import AdapterFacts
from diptych.common.observe.logging import setup_logging
from diptych.engine.messages import LoadedAdapter
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import pd
from diptych_tests.line_process import commands, say


class Brake:
    """Stands between the engine's steps."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._left = -1
        self._load = False

    def hold(self, after: int) -> None:
        self._go.clear()
        self._left = after

    def go(self) -> None:
        self._left, self._load = -1, False
        self._go.set()

    def hold_load(self) -> None:
        self._go.clear()
        self._load = True

    def load(self) -> None:
        if self._load:
            say({"held": True})
            self._go.wait(300)

    def __call__(self, seqs: object) -> None:
        if self._left < 0:
            return
        if self._left > 0:
            self._left -= 1
            return
        say({"held": True})
        self._go.wait(300)


async def main(options: dict[str, object]) -> None:
    brake = Brake()
    config = pd.worker_config("prefill", **options)
    model = pd.fake_model(before_execute=brake, max_loras=config.max_loras if config.enable_lora else 0)
    read = model.runner.read_adapter

    def read_adapter(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        brake.load()
        return read(folder, facts)

    model.runner.read_adapter = read_adapter  # type: ignore[method-assign]
    worker = WorkerRuntime(config, model, make_transfer=make_transfer, make_services=services_of)
    await worker.start()
    await pd.slabs_lent(worker)
    say({"worker_id": worker.worker_id, "incarnation": worker.incarnation, "address": worker.address})
    async for words in commands():
        match words:
            case ["hold", after]:
                brake.hold(int(after))
                say({})
            case ["hold-load"]:
                brake.hold_load()
                say({})
            case ["go"]:
                brake.go()
                say({})
            case ["idle"]:
                await pd.Cluster.settle(worker)
                say({})
            case _:
                break
    brake.go()
    await worker.close()


if __name__ == "__main__":
    setup_logging(worker="prefill", role="prefill")  # to stderr: stdout is for answers
    uvloop.run(main(json.loads(sys.argv[1])))
