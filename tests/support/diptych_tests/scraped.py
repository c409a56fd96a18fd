"""Counters of all parts of a real cluster."""

from __future__ import annotations

from typing import Any

import httpx

from diptych_tests.metric_laws import Figures


class Scraped:
    """What they have grown by since the cluster was idle, when this was made."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._before = self._now()

    def _now(self) -> dict[str, Figures]:
        self._cluster.wait_idle(deadline_s=300.0)
        urls: dict[str, list[str]] = {"router": [self._cluster.http_url], "prefill": [], "decode": []}
        for child in self._cluster.state.children:
            if child.role in ("prefill", "decode"):
                urls[child.role].append(f"http://{child.metrics}")
        return {
            role: Figures.parse(*[httpx.get(f"{url}/metrics", timeout=120.0).text for url in found])
            for role, found in urls.items()
        }

    def grown(self) -> tuple[Figures, Figures, Figures]:
        """Increases of router, decode, prefill."""
        now = self._now()
        router, decode, prefill = (now[role].since(self._before[role]) for role in ("router", "decode", "prefill"))
        return router, decode, prefill
