"""Series with an adapter's name as label, for the first MAX_NAMED adapters; the others share the name OTHER.

A reader sees the series of the adapters that it may use, and those of OTHER.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from diptych.common.observe.metrics import Metrics
from diptych.common.store.adapters import AdapterEntry, AdapterTable, ChosenAdapter

MAX_NAMED = 64
OTHER = "_other"
"""No adapter's name begins so. Also the name of one that was unloaded while its request ran."""
FINISHED = "finished"
_LABEL = re.compile(rb'[{,]adapter="([^"]*)"')
_COUNTERS = "adapter_"
"""How the names of counters by adapter begin; their first label is the adapter."""
Shows = Callable[[str], bool]
"""Whether the reader may see the adapter of this name."""


def seen_exposition(body: bytes, shows: Shows) -> bytes:
    """The body of /metrics without the series of adapters that the reader may not see."""

    def keeps(line: bytes) -> bool:
        found = _LABEL.search(line)
        return found is None or _is_seen(found[1].decode(), shows)

    return b"".join(line for line in body.splitlines(keepends=True) if line.startswith(b"#") or keeps(line))


def seen_counters(counters: Mapping[str, Mapping[str, float]], shows: Shows) -> dict[str, dict[str, float]]:
    """As `seen_exposition`, of counters by name and label values."""
    return {
        name: {
            labels: value
            for labels, value in values.items()
            if not labels or not name.startswith(_COUNTERS) or _is_seen(labels.partition(",")[0], shows)
        }
        for name, values in counters.items()
    }


def _is_seen(name: str, shows: Shows) -> bool:
    return name == OTHER or shows(name)


class AdapterMetrics:
    """Names come from the registry only. The series of a name end when it is unloaded, and make room for another."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "adapter_requests", "Requests that an adapter answered or should have, by outcome", ["adapter", "outcome"]
        )
        self._prompt = metrics.counter("adapter_prompt_tokens", "Prompt tokens of finished requests", ["adapter"])
        self._generation = metrics.counter(
            "adapter_generation_tokens", "Tokens of finished answers, by adapter", ["adapter"]
        )
        self._canary = metrics.counter(
            "adapter_canary_requests", "Of the requests, those that had the canary", ["adapter"]
        )
        self._registered = metrics.gauge("adapters_registered", "Names in the registry of adapters")
        self.refused = metrics.counter(
            "adapter_turns_refused", "Requests refused because too many adapters wait for room"
        )
        self._entries: Mapping[str, AdapterEntry] = {}
        self._named: set[str] = set()
        self._seen: dict[str, set[str]] = {}
        """Outcomes by name."""

    def on_change(self, table: AdapterTable) -> None:
        """The registry is another one."""
        self._entries = table.entries
        self._registered.set(len(table.entries))
        for name in self._named - table.entries.keys():
            self._forget(name)
        for name in table.entries:
            if len(self._named) < MAX_NAMED:
                self._named.add(name)

    def _forget(self, name: str) -> None:
        self._named.discard(name)
        for outcome in self._seen.pop(name, ()):
            self._requests.remove(name, outcome)
        for series in (self._prompt, self._generation, self._canary):
            series.remove(name)

    def ended(self, chosen: ChosenAdapter | None, outcome: str, prompt_tokens: int = 0, tokens: int = 0) -> None:
        """A request has ended: well (FINISHED), or with the reason of an error. None: it had no adapter."""
        if chosen is None:
            return
        name = chosen.name if chosen.name in self._named else OTHER
        self._seen.setdefault(name, set()).add(outcome)
        self._requests.labels(name, outcome).inc()
        self._prompt.labels(name).inc(prompt_tokens)
        self._generation.labels(name).inc(tokens)
        entry = self._entries.get(chosen.name)
        self._canary.labels(name).inc(entry is not None and chosen.version.number == entry.canary)
