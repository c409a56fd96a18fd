"""Ranks of one model as threads of one process, with a communicator over its memory: no start of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.parallel.communicator import add_in_order
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.runner import RunnerLost

DEADLINE_S = 60.0


class Exchange:
    """Where the ranks' threads put values down and wait for those of others."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._changed = threading.Condition()
        self._values: dict[Any, Any] = {}
        self._deadline_s = deadline_s
        self.closed = False

    def put(self, key: Any, value: Any) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: Any) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self.closed or key in self._values, self._deadline_s):
                raise RunnerLost(f"nobody put down {key}")
            if key not in self._values:
                raise RunnerLost("a peer was closed")
            return self._values[key]

    def take(self, key: Any) -> Any:
        value = self.get(key)
        with self._changed:
            del self._values[key]
        return value

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()


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
    """The runners of all ranks of a folder as one: every call goes to each of them at the same time."""

    def __init__(self, folder: Any, tensor_parallel: int, pipeline: int = 1, **settings: Any) -> None:
        def load(place: RankPlace, communicator: ThreadCommunicator) -> TorchModelRunner:
            return TorchModelRunner.load(folder, place=place, communicator=communicator, **settings)

        self.places = places(tensor_parallel, pipeline)
        self.runners: list[TorchModelRunner] = on_all(self.places, load)
        self.sampler = next(runner for runner, place in zip(self.runners, self.places, strict=True) if place.samples)
        self.num_blocks, self.block_size = self.sampler.num_blocks, self.sampler.block_size
        self.vocab_size = self.sampler.vocab_size
        self._threads = ThreadPoolExecutor(len(self.places))

    def _on_all(self, work: Callable[[TorchModelRunner], Any]) -> list[Any]:
        return [result.result(DEADLINE_S) for result in [self._threads.submit(work, one) for one in self.runners]]

    def execute(self, seqs: Any, should_abort: Any = None) -> Any:
        own = [[replace(seq) for seq in seqs] for _ in self.runners[1:]]
        steps = {id(self.sampler): seqs}
        steps |= {
            id(one): copy for one, copy in zip([r for r in self.runners if r is not self.sampler], own, strict=True)
        }
        results = self._on_all(lambda runner: runner.execute(steps[id(runner)]))
        return results[self.runners.index(self.sampler)]

    def copy_blocks(self, copies: Any) -> None:
        self._on_all(lambda runner: runner.copy_blocks(copies))

    def close(self) -> None:
        self._threads.shutdown()
