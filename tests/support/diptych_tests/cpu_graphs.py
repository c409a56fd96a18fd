"""CUDA graphs on a CPU: replaying one computes its step again, from the same buffers into the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class _Graph:
    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        for call in self.calls:
            call()


class CpuGraphs:
    """A decoder whose steps are captured by torch.cuda.graph. replays: forward passes that replaying computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decoder: Any) -> None:
        self._decoder, self._capturing, self.replays = decoder, list[_Graph](), 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @contextmanager
    def _capture(self, graph: _Graph, pool: object) -> Iterator[None]:
        self._capturing.append(graph)
        yield
        self._capturing.pop()

    def captured(self, call: Callable[..., None]) -> Callable[..., None]:
        """`call`, which a graph that captures it repeats with the same arguments."""

        def both(*args: Any) -> None:
            call(*args)
            for graph in self._capturing:
                graph.calls.append(lambda: call(*args))

        return both

    def forward(self, step: Any, hooks: Any, **how: Any) -> Any:
        logits = self._decoder.forward(step, hooks, **how)

        def again() -> None:
            self.replays += 1
            logits.copy_(self._decoder.forward(step, hooks, **how))

        for graph in self._capturing:
            graph.calls.append(again)
        return logits
