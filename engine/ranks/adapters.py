"""LoRA adapters of an executor over processes: each rank reads its own part, on a thread of its process, while steps run.

engine --READ_ADAPTER {number, folder, facts}--> every rank     begins to read
engine --ADAPTER_READ number--> every rank                      answers at once: not yet, what it read, or why not
engine --INSTALL_ADAPTER slot, number, parts--> every rank      before the step that needs it
engine --FORGET_ADAPTERS numbers--> every rank                  nothing holds them any more
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diptych.common.adapters.peft import AdapterFacts, AdapterModule
from diptych.common.errors import DiptychError, InternalError, from_reason
from diptych.engine.runner import ModelRunner
from diptych.engine.step_messages import LoadedAdapter


class RankAdapter:
    """Implements LoadedAdapter: what all ranks have read under a number. num_bytes: of all of them."""

    def __init__(self, number: int, adapter_id: str, rank: int, num_bytes: int, num_parts: int) -> None:
        self.number, self.id, self.rank, self.num_bytes, self.num_parts = number, adapter_id, rank, num_bytes, num_parts


def encode_read(number: int, folder: Path, facts: AdapterFacts) -> bytes:
    return json.dumps([number, str(folder), asdict(facts)]).encode()


def decode_read(body: bytes) -> tuple[int, Path, AdapterFacts]:
    number, folder, facts = json.loads(body)
    modules = tuple(AdapterModule(**one) for one in facts.pop("modules"))
    return number, Path(folder), AdapterFacts(**facts, modules=modules)


def read_answer(answer: bytes) -> tuple[int, int] | None:
    """(bytes, parts) of what a rank read; None: it is not done. Raises: what it raised."""
    if not answer:
        return None
    found: Mapping[str, Any] = json.loads(answer)
    if "message" in found:
        raise from_reason(found["reason"], found["message"], param=found["param"])
    return found["num_bytes"], found["num_parts"]


class AdaptersOfRank:
    """In the process of a rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._read: dict[int, LoadedAdapter | DiptychError | None] = {}
        """By number; None: it is being read."""

    def begin(self, body: bytes) -> None:
        number, folder, facts = decode_read(body)
        self._read[number] = None

        def read() -> None:
            outcome: LoadedAdapter | DiptychError
            try:
                outcome = self._runner.read_adapter(folder, facts)
            except DiptychError as error:
                outcome = error
            except Exception as error:
                outcome = InternalError(f"reading an adapter failed: {type(error).__name__}: {error}")
            if number in self._read:
                self._read[number] = outcome

        threading.Thread(target=read, name="diptych-read-adapter", daemon=True).start()

    def answer(self, number: int) -> bytes:
        outcome = self._read[number]
        if outcome is None:
            return b""
        if isinstance(outcome, DiptychError):
            return json.dumps({"reason": outcome.reason, "message": outcome.message, "param": outcome.param}).encode()
        return json.dumps({"num_bytes": outcome.num_bytes, "num_parts": outcome.num_parts}).encode()

    def install(self, slot: int, number: int, parts: tuple[int, int] | None) -> None:
        adapter = self._read[number]
        if adapter is None or isinstance(adapter, DiptychError):
            raise ValueError(f"adapter number {number} was not read")
        self._runner.install_adapter(slot, adapter, None if parts is None else range(*parts))

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._read.pop(number, None)
