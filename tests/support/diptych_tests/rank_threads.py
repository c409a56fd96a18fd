"""Ranks of one model as threads of one process, with a communicator over its memory: no start of processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.communicator import add_in_order
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.runner import RunnerLost

DEADLINE_S = 60.0


class Exchange:
    """Where the ranks' threads put values down and wait for those of others."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._lock = threading.Lock()
        self._values: dict[Any, Any] = {}
        self._waiting: dict[Any, list[threading.Lock]] = {}
        """By key: locks that are released once its value is there. A value wakes only the threads that wait for it."""
        self._deadline_s = deadline_s
        self.closed = False

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            for wake in self._waiting.pop(key, ()):
                wake.release()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key in self._values:
                return self._values[key]
            if self.closed:
                raise RunnerLost("a peer was closed")
            wake = threading.Lock()
            wake.acquire()
            self._waiting.setdefault(key, []).append(wake)
        if not wake.acquire(timeout=self._deadline_s):
            raise RunnerLost(f"nobody put down {key}")
        with self._lock:
            if key not in self._values:
                raise RunnerLost("a peer was closed")
            return self._values[key]

    def take(self, key: Any) -> Any:
        value = self.get(key)
        with self._lock:
            del self._values[key]
        return value

    def close(self) -> None:
        with self._lock:
            self.closed = True
            for wake in (one for waiting in self._waiting.values() for one in waiting):
                wake.release()
            self._waiting.clear()


class ThreadCommunicator:
    """Implements parallel.communicator.Communicator."""

    def __init__(self, place: RankPlace, exchange: Exchange) -> None:
        self.place, self._exchange = place, exchange
        self.on_progress: Callable[[], None] = lambda: None
        self._rounds: dict[Any, int] = {}

    def _round(self, name: Any) -> int:
        self._rounds[name] = self._rounds.get(name, -1) + 1
        return self._rounds[name]

    def _gathered(self, group: Any, rank: int, size: int, value: Any) -> list[Any]:
        self.on_progress()
        number = self._round(group)
        self._exchange.put((group, number, rank), value)
        # One for each reader, so that nothing stays for ever: a value is given up a round later, when all have read it.
        found = [self._exchange.get((group, number, other)) for other in range(size)]
        if number > 1:
            self._exchange.take((group, number - 2, rank))
        return found

    def _of_stage(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._gathered(("stage", self.place.stage), self.place.shard.rank, self.place.shard.degree, x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._of_stage(x)
        return add_in_order([first.clone(), *others])

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._of_stage(x), dim=1)

    def send(self, x: torch.Tensor) -> None:
        target = self.place.rank + self.place.tensor_parallel
        self._exchange.put(("to", target, self._round("sent")), x.clone())

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        self.on_progress()
        x = self._exchange.take(("to", self.place.rank, self._round("received")))
        assert (tuple(x.shape), x.dtype) == ((rows, width), dtype)
        return x

    def agree_min(self, value: int) -> int:
        return min(self._gathered("world", self.place.rank, self.place.num_ranks, value))

    def close(self) -> None:
        self._exchange.close()


def on_all(places: list[RankPlace], work: Callable[[RankPlace, ThreadCommunicator], Any]) -> list[Any]:
    """What `work` returns on each rank; they run at the same time. Raises: the first one's error."""
    exchange = Exchange()

    def one(place: RankPlace) -> Any:
        try:
            return work(place, ThreadCommunicator(place, exchange))
        except BaseException:
            exchange.close()
            raise

    with ThreadPoolExecutor(len(places)) as threads:
        return [result.result() for result in [threads.submit(one, place) for place in places]]


def places(tensor_parallel: int, pipeline: int = 1) -> list[RankPlace]:
    return [RankPlace(rank, tensor_parallel, pipeline) for rank in range(tensor_parallel * pipeline)]


class ThreadedRanks:
    """Implements engine.runner.ModelRunner, but for hand-offs: the runners of all ranks of a folder, at the same time."""

    on_launched: Callable[[], None]
    on_layers: Callable[[int], None]

    def __init__(self, folder: Path, tensor_parallel: int, pipeline: int = 1, **settings: Any) -> None:
        """Args: settings: see TorchModelRunner.load."""

        def load(place: RankPlace, communicator: ThreadCommunicator) -> TorchModelRunner:
            return TorchModelRunner.load(folder, place=place, communicator=communicator, **settings)

        self.places = places(tensor_parallel, pipeline)
        self.runners: list[TorchModelRunner] = on_all(self.places, load)
        [self.sampler] = [runner for runner, place in zip(self.runners, self.places, strict=True) if place.samples]
        demand = settings.get("demand")
        self.kv = kv_format_of(
            describe(json.loads((folder / "config.json").read_text())),
            block_size=settings["block_size"],
            window_groups=demand is not None,
            kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
        )
        self.num_blocks, self.block_size = self.sampler.num_blocks, self.sampler.block_size
        self.vocab_size = self.sampler.vocab_size
        self.capabilities = replace(
            self.sampler.capabilities,
            kv=self.kv,
            kv_bytes_per_token=sum(one.capabilities.kv_bytes_per_token for one in self.runners),
            num_layers=self.kv.num_layers,
            group_blocks=demand.group_blocks(self.kv, self.num_blocks) if demand else (self.num_blocks,),
        )
        self._threads = ThreadPoolExecutor(len(self.places))

    def on_all(self, work: Callable[[TorchModelRunner], Any]) -> list[Any]:
        """What `work` returns for the runner of each rank. Raises: the first one's error."""
        return [result.result(DEADLINE_S) for result in [self._threads.submit(work, one) for one in self.runners]]

    def execute(self, seqs: Any, should_abort: Any = None) -> Any:
        """`should_abort` is not asked: ranks would have to agree."""
        found = []

        def one(runner: TorchModelRunner) -> None:
            if runner is self.sampler:
                found.append(runner.execute(seqs))
            else:
                runner.execute([replace(seq) for seq in seqs])

        self.on_all(one)
        return found[0]

    def copy_blocks(self, copies: Any) -> None:
        self.on_all(lambda runner: runner.copy_blocks(copies))

    def read_adapter(self, folder: Any, facts: Any) -> ThreadedAdapter:
        return ThreadedAdapter([runner.read_adapter(folder, facts) for runner in self.runners])

    def install_adapter(self, slot: int, adapter: Any, parts: range | None = None) -> None:
        for runner, own in zip(self.runners, adapter.of_ranks, strict=True):
            runner.install_adapter(slot, own, parts)

    def expect_compiled(self) -> None:
        self.on_all(lambda runner: runner.expect_compiled())

    def note_pulled(self, *arguments: Any) -> None:
        self.sampler.note_pulled(*arguments)

    def note_overwritten(self, block_ids: Any) -> None:
        self.sampler.note_overwritten(block_ids)

    def close(self) -> None:
        self._threads.shutdown()


class ThreadedAdapter:
    """Implements LoadedAdapter, as engine.ranks.adapters.RankAdapter."""

    def __init__(self, of_ranks: list[Any]) -> None:
        self.of_ranks, self.id, self.rank = of_ranks, of_ranks[0].id, of_ranks[0].rank
        self.num_bytes = sum(one.num_bytes for one in of_ranks)
        [self.num_parts] = {one.num_parts for one in of_ranks}
