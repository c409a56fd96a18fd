"""Runners for the processes of test_ranks.py."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from diptych.common.errors import AdapterError
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.runner import OutOfDeviceMemory


class RankRunner(FakeRunner):
    """Notes every step; in step number `at` it does `what`."""

    def __init__(self, notes: str, at: int = 0, what: str = "", **fields: Any) -> None:
        super().__init__(**fields)
        self._notes, self._at, self._what = Path(notes), at, what
        self._steps = 0

    def execute(self, seqs: Any, should_abort: Any = None) -> Any:
        self._steps += 1
        if self._steps == self._at:
            self._misbehave()
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

    def _misbehave(self) -> None:
        match self._what:
            case "die":
                os._exit(7)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise RuntimeError("this rank's kernel failed")
            case "memory":
                raise OutOfDeviceMemory("4 GiB")


def broken(**fields: Any) -> FakeRunner:
    raise ValueError("no weights")
