"""Reports of alternating runs: median and range, machine, versions, a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens per second of one side: median, minimum and maximum over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario at one number of threads.

    Args:
        our_rounds, their_rounds: tokens per second of each round, aligned.
        ratio: median of the rounds' ratios (ours / theirs), each from two consecutive runs.
        floor: tokens per second allowed by the machine's bandwidth and matmul rate.
        share, their_share: medians / floor.
        same_ids: requests whose token ids were equal on both sides, of `requests`.
    """

    scenario: str
    threads: int
    our_rounds: list[float]
    their_rounds: list[float]
    ours: Timing
    theirs: Timing
    ratio: float
    floor: float
    share: float
    their_share: float
    same_ids: int
    requests: int


@dataclass(frozen=True, slots=True)
class Best:
    """One scenario with each side at its better number of threads."""

    scenario: str
    our_threads: int
    their_threads: int
    ours: float
    theirs: float
    ratio: float


def timing(rates: Sequence[float]) -> Timing:
    return Timing(statistics.median(rates), min(rates), max(rates))


def make_row(
    scenario: str,
    threads: int,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    floor: float,
    same_ids: int,
    requests: int,
) -> Row:
    """`ours`, `theirs`: tokens per second of each round, aligned."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    a, b = timing(ours), timing(theirs)
    shares = a.median / floor, b.median / floor
    return Row(scenario, threads, list(ours), list(theirs), a, b, ratio, floor, *shares, same_ids, requests)


def merge(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Rows of two runs; the rounds of common scenarios are joined, with the higher floor."""
    merged = {(row.scenario, row.threads): row for row in rows}
    for row in more:
        key = (row.scenario, row.threads)
        known = merged.get(key)
        if known is not None:
            row = make_row(
                *key,
                known.our_rounds + row.our_rounds,
                known.their_rounds + row.their_rounds,
                floor=max(known.floor, row.floor),
                same_ids=min(known.same_ids, row.same_ids),
                requests=row.requests,
            )
        merged[key] = row
    return list(merged.values())


def best_of(rows: Sequence[Row]) -> list[Best]:
    """In the order of the scenarios."""
    best = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        some = [row for row in rows if row.scenario == scenario]
        ours, theirs = max(some, key=lambda r: r.ours.median), max(some, key=lambda r: r.theirs.median)
        a, b = ours.ours.median, theirs.theirs.median
        best.append(Best(scenario, ours.threads, theirs.threads, a, b, a / b))
    return best


def read_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of a result file."""
    return [Row(**{**row, "ours": Timing(**row["ours"]), "theirs": Timing(**row["theirs"])}) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """tokens/s as median (low - high), and the share of the floor."""

    def cell(t: Timing, share: float) -> str:
        return f"{t.median:.1f} ({t.low:.1f} - {t.high:.1f}) {share:.0%}"

    lines = [
        f"{'scenario':<22}{'threads':>8}{'diptych tok/s, of floor':>32}{'transformers, of floor':>32}{'ratio':>8}"
        f"{'floor':>8}{'same ids':>10}"
    ]
    lines += [
        f"{r.scenario:<22}{r.threads:>8}{cell(r.ours, r.share):>32}{cell(r.theirs, r.their_share):>32}{r.ratio:>7.2f}x"
        f"{r.floor:>8.0f}{f'{r.same_ids}/{r.requests}':>10}"
        for r in rows
    ]
    lines += [
        f"{b.scenario:<22} each at its better number of threads: {b.ours:.1f} ({b.our_threads}) against {b.theirs:.1f} "
        f"({b.their_threads}), {b.ratio:.2f}x"
        for b in best_of(rows)
    ]
    return "\n".join(lines)
