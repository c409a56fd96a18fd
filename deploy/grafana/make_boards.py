"""Write dashboards/*.json: boards are tables of panels in panels.py, and never edited by hand.

python deploy/grafana/make_boards.py [--check]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TARGETS = FOLDER / "dashboards"
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7
_SOURCE = {"type": "prometheus", "uid": "prometheus"}


def boards() -> dict[str, tuple[str, list[Any]]]:
    """By file name: title and panels (title, unit, [(query, legend), ...])."""
    spec = importlib.util.spec_from_file_location("diptych_deploy_panels", FOLDER / "panels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, tuple[str, list[Any]]] = module.BOARDS
    return found


def _panel(number: int, title: str, unit: str, series: list[tuple[str, str]]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
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
