"""What a result file says of the machine, and how it is written."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diptych.loadtest.runs.environment import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"


def surroundings() -> dict[str, Any]:
    """Time, machine, load, commit and versions at the start of a run."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **describe_environment().as_dict()}


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def write(path: Path, body: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)
