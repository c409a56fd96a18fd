"""Buckets and a registry for the metrics of one process: vLLM's names with the prefix `diptych_`.

A process registers and exposes only metrics that can change in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric

from diptych.common.observe.series import Counter, Histogram

PREFIX = "diptych_"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
STAGE_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds of one stage of a request, from a local copy to a long prompt."""
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class LabelledRegistry:
    """A registry view that adds the process's labels, such as its role, to each sample of `registry`.

    The labels are on the series and not only in the scraper's configuration. A plain scrape, a federation or a foreign
    dashboard can then distinguish a prefill worker from a decode worker.
    """

    def __init__(self, registry: CollectorRegistry, names: Iterable[str] | None = None) -> None:
        self._registry = registry
        self._names = None if names is None else frozenset(names)
        self.labels: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            samples = family.samples if self._names is None else [s for s in family.samples if s.name in self._names]
            if samples or self._names is None:
                labelled = Metric(family.name, family.documentation, family.type, family.unit)
                # Labels of the sample take precedence, for a series about another process.
                labelled.samples = [sample._replace(labels=self.labels | sample.labels) for sample in samples]
                yield labelled

    def restricted_registry(self, names: Iterable[str]) -> LabelledRegistry:
        """Only samples of these names (`/metrics?name[]=...`)."""
        restricted = LabelledRegistry(self._registry, names)
        restricted.labels = self.labels
        return restricted


class Metrics:
    """Metrics in a separate registry, so that tests and several servers in one process are independent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.exposed = LabelledRegistry(self.registry)

    def identify(self, labels: Mapping[str, str]) -> None:
        """Set the labels that every exposed series carries from now on, such as role and worker."""
        self.exposed.labels = dict(labels)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """`name` without prefix and without `_total` (the exposition appends it)."""
        return Counter(PREFIX + name, text, labels, self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(PREFIX + name, text, labels, self.registry, buckets)

    def value(self, name: str) -> float:
        """Value of a series without labels; `name` without prefix."""
        return self.registry.get_sample_value(PREFIX + name) or 0.0

    def totals(self) -> dict[str, dict[str, float]]:
        """Every counter by name (without prefix and `_total`) and label value; "" where there is no label."""
        found: dict[str, dict[str, float]] = {}
        for family in self.registry.collect():
            if family.type == "counter":
                found[family.name.removeprefix(PREFIX)] = {
                    ",".join(sample.labels.values()): sample.value
                    for sample in family.samples
                    if sample.name.endswith("_total")
                }
        return found

    def expose(self) -> bytes:
        """The body of /metrics, of type CONTENT_TYPE."""
        return generate_latest(self.exposed)
