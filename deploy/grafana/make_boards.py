"""Write dashboards/*.json from the tables of panels in panels.py; do not edit dashboards by hand.

python deploy/grafana/make_boards.py [--check]
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TARGETS = FOLDER / "dashboards"
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_ALL = {"text": "All", "value": "$__all"}
# A metric's name with its selector, if any.
_SELECTOR = re.compile(r"\b(diptych_\w+|up)(\{([^}]*)\}|(?![\w(]))")
_FILTER = 'job=~"$job", role=~"$role", worker=~"$worker"'
_TARGET_FILTER = 'job=~"$job", role=~"$role"'  # `up` is the scraper's series and has no worker label


def filtered(query: str) -> str:
    """The query, restricted to the values of the dashboard's variables."""

    def add(match: re.Match[str]) -> str:
        name, own = match.group(1), match.group(3)
        selected = _TARGET_FILTER if name == "up" else _FILTER
        return f"{name}{{{own}, {selected}}}" if own else f"{name}{{{selected}}}"

    return _SELECTOR.sub(add, query)


def _variable(name: str, label: str, within: str) -> dict[str, Any]:
    """A drop-down of the values of `label` in the series `within`; initially all of them."""
    query = f"label_values({within}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes, since workers join and leave
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": _ALL,
        "sort": 1,
    }


def variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "prometheus", "value": "prometheus"},
        },
        _variable("job", "job", "diptych_num_requests_running"),
        _variable("role", "role", 'diptych_num_requests_running{job=~"$job"}'),
        _variable("worker", "worker", 'diptych_num_requests_running{job=~"$job", role=~"$role"}'),
    ]


def _tables() -> Any:
    """The module panels.py."""
    spec = importlib.util.spec_from_file_location("diptych_deploy_panels", FOLDER / "panels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def boards() -> dict[str, tuple[str, list[Any]]]:
    """By file name: title and panels (title, unit, [(query, legend), ...])."""
    found: dict[str, tuple[str, list[Any]]] = _tables().BOARDS
    return found


def _panel(number: int, title: str, unit: str, series: list[tuple[str, str]]) -> dict[str, Any]:
    """Raises: KeyError where the panel has no description."""
    targets = [
        {"refId": chr(ord("A") + i), "expr": filtered(query), "legendFormat": legend, "datasource": _SOURCE}
        for i, (query, legend) in enumerate(series)
    ]
    place = {
        "x": _WIDTH * (number % _COLUMNS),
        "y": _HEIGHT * (number // _COLUMNS),
        "w": _WIDTH,
        "h": _HEIGHT,
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": _tables().DESCRIPTIONS[title],
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def board(name: str, title: str, panels: list[Any]) -> dict[str, Any]:
    others = [
        {"title": other, "type": "link", "url": f"/d/diptych-{file}", "keepTime": True}
        for file, (other, _) in boards().items()
        if file != name
    ]
    return {
        "uid": f"diptych-{name}",
        "title": title,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": others,
        "templating": {"list": variables()},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def main() -> int:
    stale = 0
    for name, (title, panels) in boards().items():
        text = json.dumps(board(name, title, panels), indent=1) + "\n"
        target = TARGETS / f"{name}.json"
        if "--check" in sys.argv:
            stale |= not target.exists() or target.read_text(encoding="utf-8") != text
            continue
        TARGETS.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
