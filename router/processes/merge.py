"""What the processes of one router show as one: /metrics and /status.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_PLACEMENTS = 40
_ADDED = ("tokens", "prompt_tokens", "cached_tokens", "finished", "failed")
_MEDIANS = {"ttft_p50": "finished", "itl_p50": "tokens"}
"""Of a second: a median, and what weighs it."""
_WORST = ("ttft_p95", "itl_p95")


def merged_exposition(parts: Sequence[bytes]) -> bytes:
    """One body of /metrics from those of several processes, each family once. Their series differ by `worker`."""
    families: dict[str, list[str]] = {}
    for part in parts:
        for block in part.decode().split("# HELP ")[1:]:
            help_line, type_line, *samples = block.rstrip("\n").split("\n")
            family = families.setdefault(help_line.partition(" ")[0], [f"# HELP {help_line}", type_line])
            family += samples
    return "".join("\n".join(lines) + "\n" for lines in families.values()).encode()


def merged_status(own: dict[str, Any], others: Sequence[Mapping[str, Any]], num_processes: int) -> dict[str, Any]:
    """/status.json: the cluster in the view of the process that answers, with what all of them placed and served.

    Sums are exact. The p95 of a second or a stage is the greatest of the processes', a p50 the mean of theirs, weighted by
    what they served.

    Args:
        own: its status.
        others: those of the other processes that answered.
    """
    every = [own, *others]
    missing = num_processes - len(every)
    reasons = [f"{missing} of {num_processes} router processes do not answer"] if missing else []
    models = [_merged_model(own, others)]
    for number, model in enumerate(own["more_models"]):
        models.append(_merged_model(model, [one["more_models"][number] for one in others]))
    return {
        **models[0],
        "more_models": models[1:],
        "reasons": [*own["reasons"], *reasons],
        "running": sum(one["running"] for one in every),
        "waiting": sum(one["waiting"] for one in every),
        "adapters_waiting": sum(one.get("adapters_waiting", 0) for one in every),
        "stages": {name: _merged_stage([one["stages"][name] for one in every]) for name in own["stages"]},
        "series": _merged_series([one["series"] for one in every]),
        "counters": _merged_counters([one["counters"] for one in every]),
        "processes": {"number": num_processes, "answering": len(every)},
    }


def _merged_model(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    clusters = [one["cluster"] for one in (own, *others) if one["cluster"] is not None]
    if own["cluster"] is None:
        return dict(own)
    pending = [{worker["id"]: worker for worker in cluster["workers"]} for cluster in clusters]
    workers = [
        {
            **worker,
            **{
                name: sum(one[worker["id"]][name] for one in pending if worker["id"] in one)
                for name in ("pending_tokens", "pending_requests")
            },
        }
        for worker in own["cluster"]["workers"]
    ]
    placements = sorted((one for cluster in clusters for one in cluster["placements"]), key=lambda one: one["age_s"])
    return {**own, "cluster": {**own["cluster"], "workers": workers, "placements": placements[:_MOST_PLACEMENTS]}}


def _merged_stage(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "count": sum(part["count"] for part in parts),
        "p50": _mean([(part["p50"], part["count"]) for part in parts]),
        "p95": _greatest([part["p95"] for part in parts]),
    }


def _merged_series(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    seconds: dict[int, list[Mapping[str, Any]]] = {}
    for part in parts:
        for point in part:
            seconds.setdefault(point["age_s"], []).append(point)
    return [
        {
            "age_s": age_s,
            **{name: sum(point[name] for point in points) for name in _ADDED},
            **{
                name: _mean([(point[name], max(1, point[weight])) for point in points])
                for name, weight in _MEDIANS.items()
            },
            **{name: _greatest([point[name] for point in points]) for name in _WORST},
        }
        for age_s, points in sorted(seconds.items(), reverse=True)
    ]


def _merged_counters(parts: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    merged: dict[str, dict[str, float]] = {}
    for part in parts:
        for name, values in part.items():
            total = merged.setdefault(name, {})
            for label, value in values.items():
                total[label] = total.get(label, 0.0) + value
    return merged


def _mean(values: Sequence[tuple[float | None, float]]) -> float | None:
    """Of (value, weight); None without values."""
    known = [(value, weight) for value, weight in values if value is not None]
    weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weights if weights else None


def _greatest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
