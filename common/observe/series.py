"""Counters and histograms written by one thread, at a tenth of the cost of prometheus_client's: no locks, no checks per
call.

A request updates about thirty of them. Any thread may read them (a scrape): each number is read atomically.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_Cell = TypeVar("_Cell")


class CounterCell:
    """The value of one label set of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Args: amount: not negative."""
        self.value += amount


class HistogramCell:
    """The distribution of one label set of a histogram. `bounds`: upper bounds, ascending; a value belongs to the first
    that is not below it."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Args: count: number of observations of this value."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count


class _Series(Collector, ABC, Generic[_Cell]):
    """Cells by label values. A series without labels has one cell, made at the start."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._cells: dict[tuple[str, ...], _Cell] = {}
        if not labels:
            self._cells[()] = self._new()
        registry.register(self)

    @abstractmethod
    def _new(self) -> _Cell: ...

    def labels(self, *values: str) -> _Cell:
        """The cell of these values, in the order of the labels. Raises: ValueError for a wrong number of values."""
        cell = self._cells.get(values)
        if cell is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            cell = self._cells[values] = self._new()
        return cell

    def remove(self, *values: str) -> None:
        """End the series of these values; without effect if there is none."""
        self._cells.pop(values, None)

    def _all(self) -> list[tuple[tuple[str, ...], _Cell]]:
        return list(self._cells.items())


class Counter(_Series[CounterCell]):
    def _new(self) -> CounterCell:
        return CounterCell()

    def inc(self, amount: float = 1.0) -> None:
        """Only for a series without labels."""
        self._cells[()].value += amount

    @property
    def value(self) -> float:
        """Only for a series without labels."""
        return self._cells[()].value

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, cell in self._all():
            family.add_metric(values, cell.value)
        yield family


class Histogram(_Series[HistogramCell]):
    """A histogram. `buckets`: upper bounds, ascending, without +Inf."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._bounds = tuple(buckets)
        super().__init__(name, text, labels, registry)
        self.observe = self._cells[()].observe if not labels else self._needs_labels
        """Only for a series without labels."""

    def _new(self) -> HistogramCell:
        return HistogramCell(self._bounds)

    def _needs_labels(self, value: float, count: int = 1) -> None:
        raise ValueError(f"{self._name} has the labels {self._labels}")

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, cell in self._all():
            family.add_metric(values, list(zip(names, accumulate(cell.counts), strict=True)), cell.total)
        yield family
