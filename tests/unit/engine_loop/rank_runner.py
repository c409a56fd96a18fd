"""Runners for the processes of test_ranks.py."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from diptych.common.errors import AdapterError, ConfigError
from diptych.common.kv_groups import PoolDemand
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.runner import OutOfDeviceMemory, StepAborted


class RankRunner(FakeRunner):
    """Notes every step; in step number `at` it does `what`. go: a file for which it waits behind its first layer. demand: of a
    PoolDemand."""

    def __init__(
        self, notes: str, at: int = 0, what: str = "", go: str = "", demand: Any = None, **fields: Any
    ) -> None:
        super().__init__(demand=PoolDemand(*demand) if demand else None, **fields)
        if go:
            self.between_layers = lambda num_layers: _wait_for(Path(go)) if num_layers == 2 else None
        self._notes, self._at, self._what = Path(notes), at, what
        self._steps = 0

    def execute(self, seqs: Any, should_abort: Any = None) -> Any:
        self._steps += 1
        if self._steps == self._at:
            self._misbehave(should_abort)
        result = super().execute(seqs, should_abort)
        step = [[seq.attempt, list(seq.token_ids), seq.start, list(seq.block_tables[0])] for seq in seqs]
        with self._notes.open("a") as notes:
            notes.write(json.dumps([step, sum(map(len, result.token_ids))]) + "\n")
        return result

    def read_adapter(self, folder: Any, facts: Any) -> Any:
        adapter = super().read_adapter(folder, facts)
        if not (Path(folder) / "readable").exists():
            raise AdapterError("the folder is gone", param="lora_path")
        if (Path(folder) / "gate").exists():
            os.close(os.open(Path(folder) / "gate", os.O_RDONLY))  # until there is a writer
        return adapter

    def _misbehave(self, should_abort: Any) -> None:
        match self._what:
            case "until it is given up":
                while not should_abort():
                    time.sleep(0.001)
                raise StepAborted
            case "die":
                os._exit(7)
            case "hang":
                threading.Event().wait()
            case "wait and look busy":  # as for a peer, on a machine that is too busy to let it sleep
                while True:
                    pass
            case "raise":
                raise RuntimeError("this rank's kernel failed")
            case "memory":
                raise OutOfDeviceMemory("4 GiB")


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)


class AheadRunner(FakeDeviceRunner):
    """Step number `at` cannot be launched."""

    def __init__(self, notes: str, at: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        self._at = at

    def launch(self, seqs: Any, sources: Any = ()) -> Any:
        self._at -= 1
        if not self._at:
            raise OutOfDeviceMemory("4 GiB")
        return super().launch(seqs, sources)


def refuses(**fields: Any) -> FakeRunner:
    raise ConfigError("tensor_parallel_size", 3, "8 heads cannot be divided among 3 ranks")


def second_refuses(what: str = "", **fields: Any) -> FakeRunner:
    if what:
        raise ConfigError("model", "m", "a tensor of this rank cannot be read")
    threading.Event().wait()  # as for a peer
    raise AssertionError


def broken(**fields: Any) -> FakeRunner:
    raise ValueError("no weights")
