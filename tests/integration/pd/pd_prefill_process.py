"""A prefill worker as a separate process: the real worker with a fake model, over real UCX. Driven by lines on stdin.

hold N    the engine stops before the N-th step from now (0: the next); answered at once, and by "held" when it stops go
it continues idle      answered once no request is left quit
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import uvloop

from diptych.common.observe.logging import setup_logging
from diptych.prefill.server import PrefillRole
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_harness() -> ModuleType:
    here = Path(__file__).resolve()
    load("diptych_test_waiting", here.parents[2] / "waiting.py")
    return load("pd_harness", here.parents[1] / "pd_harness.py")


class Brake:
    """Stands between the engine's steps."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._left = -1

    def hold(self, after: int) -> None:
        self._go.clear()
        self._left = after

    def go(self) -> None:
        self._left = -1
        self._go.set()

    def __call__(self, seqs: object) -> None:
        if self._left < 0:
            return
        if self._left > 0:
            self._left -= 1
            return
        say({"held": True})
        self._go.wait(300)


async def main(pd: ModuleType, options: dict[str, object]) -> None:
    brake = Brake()
    config = pd.worker_config("prefill", **options)
    worker = WorkerRuntime(
        config, pd.fake_model(before_execute=brake), make_transfer=make_transfer, make_role=PrefillRole
    )
    await worker.start()
    say({"worker_id": worker.worker_id, "incarnation": worker.incarnation, "address": worker.address})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        match line:
            case ["hold", after]:
                brake.hold(int(after))
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


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    setup_logging(worker="prefill", role="prefill")  # to stderr: stdout is for answers
    uvloop.run(main(load_harness(), json.loads(sys.argv[1])))
