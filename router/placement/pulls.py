"""Whether a worker should take the leading blocks of a prompt that it lacks from the worker that holds most of them, or compute
them. Pure; the simulator uses it, too (docs/decisions/kv-pulls.md).

    pull(reader, holder)  = fixed cost of the link + bytes / rate of the link
    fixed cost            = what was measured, at least the waits for both engines
    computing             = tokens / prefill rate of the reader

A pull must be cheaper by a quarter: its prediction is the less certain one, and it costs the holder something, too.

A worker that drains holds what it has until it exits: it is read from, never reads, and only where the read ends before.

Commands of a pull wait for an engine that is busy: two at the reader, one at the holder. So long as it takes to look for them
again (`WorkerLoad.poll_interval_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.common.compat import CONVERTS, KV_PARTS
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord

FIXED_MS = 10.0
"""Of a pull over a link that was not measured, between two idle engines: a call, the announcement, the acknowledgement."""
READER_WAITS, HOLDER_WAITS = 2, 1
"""Commands of a pull that an engine must handle before the next message is sent: PullBlocks and UnpackRange; PublishCached."""
DEFAULT_BYTES_PER_S = 400e6
MOST_OF_COMPUTE = 0.8
"""A pull is planned if it is expected to take at most this part of the time of computing."""
FIELD = "source"
"""Workers that take part announce it (worker/wire.py: REQUEST_FIELDS)."""
LOWER_FIELD = "source_tiers"
"""Holders that serve their lower tiers, too, announce it."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class PlannedPull:
    """`reader` takes the KV of tokens [first_token, num_tokens) from `holder` (indexes of workers).

    Args:
        pull_ms, compute_ms: predicted for this range.
        pays_from: tokens from which a pull over this link is made at all; infinite: never.
    """

    reader: int
    holder: int
    first_token: int
    num_tokens: int
    pull_ms: float
    compute_ms: float
    pays_from: float


@dataclass(frozen=True, slots=True, eq=False)
class PullLinks:
    """Of all pairs of workers, [reader, holder]: holders are the readers, and behind them the workers that leave.

    Args:
        fixed_ms: infinite where the KV of one is not that of the other, or one of them takes no part.
        byte_ms: to move one byte.
        token_bytes: [reader], of the layers that keep every token.
        windows: (window, [reader]) bytes per token of the layers with that window.
        serves_lower: [holder], whether blocks of its lower tiers are served.
    """

    fixed_ms: Floats
    byte_ms: Floats
    token_bytes: Floats
    windows: tuple[tuple[int, Floats], ...]
    serves_lower: Bools

    @staticmethod
    def of(records: Sequence[WorkerRecord], leaving: Sequence[WorkerRecord] = ()) -> PullLinks:
        count, holders = len(records), (*records, *leaving)
        facts = [tuple(sorted((k, v) for k, v in r.compat.items() if k not in (CONVERTS, KV_PARTS))) for r in holders]
        kinds = {one: i for i, one in enumerate(dict.fromkeys(facts))}
        kind = np.array([kinds[one] for one in facts], np.int64)
        able = np.array([FIELD in r.request_fields and bool(r.compat) for r in holders], np.bool_)
        fits = (kind[:count, None] == kind[None, :]) & able[:count, None] & able[None, :]
        np.fill_diagonal(fits, False)
        at = {r.worker_id: i for i, r in enumerate(holders)}
        rates = [rate for r in records for rate in r.load.link_bytes_per_s.values() if rate > 0]
        mean = sum(rates) / len(rates) if rates else DEFAULT_BYTES_PER_S
        byte_ms = np.full((count, len(holders)), 1000.0 / mean)
        waits = np.array([wait_ms(record.load) for record in holders], np.float64)
        wait = READER_WAITS * waits[:count, None] + HOLDER_WAITS * waits[None, :]
        fixed_ms = np.where(fits, FIXED_MS + wait, np.inf)
        for reader, record in enumerate(records):
            for name, rate in record.load.link_bytes_per_s.items():
                if rate > 0 and (holder := at.get(name)) is not None:
                    byte_ms[reader, holder] = 1000.0 / rate
            for name, seconds in record.load.pull_overhead_s.items():
                if (holder := at.get(name)) is not None and fits[reader, holder]:
                    fixed_ms[reader, holder] = max(1000.0 * seconds, float(wait[reader, holder]))
        windows = sorted({window for record in records for window, _ in record.kv_windows})
        return PullLinks(
            fixed_ms,
            byte_ms,
            np.array([record.kv_bytes_per_token for record in records], np.float64),
            tuple((w, np.array([dict(r.kv_windows).get(w, 0) for r in records], np.float64)) for w in windows),
            np.array([LOWER_FIELD in record.request_fields for record in holders], np.bool_),
        )

    def pull_ms(self, holder: int, num_tokens: Ints) -> Floats:
        """[reader]: to take so many tokens each from `holder`."""
        size = self.token_bytes * num_tokens
        for window, token_bytes in self.windows:
            size += token_bytes * np.minimum(num_tokens, window)
        out: Floats = self.fixed_ms[:, holder] + self.byte_ms[:, holder] * size
        return out

    def pays_from(self, reader: int, holder: int, token_ms: float) -> float:
        """Tokens from which `reader` takes KV from `holder` instead of computing it; infinite: never. Args: token_ms: to compute
        one; what the holder takes to copy one to its first tier counts 1 / MOST_OF_COMPUTE against it."""
        windows = sum(window * float(size[reader]) for window, size in self.windows)
        return _pays_from(
            float(self.fixed_ms[reader, holder]), float(self.byte_ms[reader, holder]), float(self.token_bytes[reader]),
            windows, token_ms,
        )  # fmt: skip


def wait_ms(load: WorkerLoad) -> float:
    """That a command of a pull may wait for the engine; 0.0: it is idle."""
    if not load.num_running and not load.num_waiting:
        return 0.0
    # An older version handles it between two steps only.
    step_s = load.prompt_step_s if load.waiting_prompt_tokens else load.decode_step_s
    return 1000.0 * (load.poll_interval_s or step_s)


def _pays_from(fixed_ms: float, byte_ms: float, token_bytes: float, window_bytes: float, token_ms: float) -> float:
    gain = MOST_OF_COMPUTE * token_ms - byte_ms * token_bytes
    return (fixed_ms + byte_ms * window_bytes) / gain if gain > 0.0 else float("inf")


def break_evens(reader: WorkerRecord, loads: Mapping[str, WorkerLoad]) -> dict[str, int]:
    """By holder, the tokens from which this worker takes KV from it instead of computing it, for the links that it has measured;
    0: never. Args: loads: of the holders, by id, where known."""
    load, found = reader.load, {}
    windows = sum(window * size for window, size in reader.kv_windows)
    for holder, seconds in load.pull_overhead_s.items():
        if (rate := load.link_bytes_per_s.get(holder, 0.0)) and load.prefill_tokens_per_s:
            token_ms = 1000.0 / load.prefill_tokens_per_s
            fixed_ms = READER_WAITS * wait_ms(load) + HOLDER_WAITS * wait_ms(loads.get(holder, WorkerLoad()))
            fixed_ms = max(1000.0 * seconds, fixed_ms)
            least = _pays_from(fixed_ms, 1000.0 / rate, reader.kv_bytes_per_token, windows, token_ms)
            found[holder] = 0 if np.isinf(least) else max(reader.block_size, int(np.ceil(least)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Pulls:
    """What each worker would take from one holder that has much of a prompt.

    Args:
        saved_ms: [worker], of the time to compute its uncached tokens; 0.0: it would compute them all.
        hit_tokens: [worker], leading tokens that need no compute after the pull.
    """

    holder: int
    saved_ms: Floats
    hit_tokens: Ints
    _links: PullLinks
    _before: Ints
    _token_ms: Floats
    _copied_token_ms: float = 0.0
    """At the holder, of a token in its lower tiers."""

    def of(self, reader: int) -> PlannedPull | None:
        """None: it takes nothing."""
        if not self.saved_ms[reader]:
            return None
        first, end, token_ms = int(self._before[reader]), int(self.hit_tokens[reader]), float(self._token_ms[reader])
        compute_ms = (end - first) * token_ms
        return PlannedPull(
            reader, self.holder, first, end, compute_ms - float(self.saved_ms[reader]), compute_ms,
            self._links.pays_from(reader, self.holder, token_ms - self._copied_token_ms / MOST_OF_COMPUTE),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LeavingHolders:
    """Workers that drain, behind the others.

    Args:
        hits, lower, copy_token_ms: as in plan_pulls.
        left_ms: for how long each still serves what it has.
    """

    hits: Ints
    lower: Ints | None
    copy_token_ms: Floats
    left_ms: Floats


def plan_pulls(
    links: PullLinks,
    token_ms: Floats,
    hits: Ints,
    lower: Ints | None,
    copy_token_ms: Floats | None = None,
    leaving: LeavingHolders | None = None,
) -> Pulls | None:
    """What each worker saves by a pull from the holder that has most in its first tier, from the one that has most in any, or
    from one that leaves, where that saves more; None: nothing, anywhere.

    Args:
        token_ms: [worker], to compute a token.
        hits: [worker], leading tokens that it has.
        lower: [tier, worker], those of them in lower tiers, which follow those in the first one.
        copy_token_ms: [tier, worker], to copy a token of a lower tier to the first one.
    """
    if not len(hits):
        return None
    plan = _from_usable(links, token_ms, hits, lower, copy_token_ms)
    if leaving is not None:
        for one in range(len(leaving.hits)):
            plan = _better(plan, _from_leaving(links, token_ms, hits, leaving, one))
    return plan


def _better(plan: Pulls | None, other: Pulls | None) -> Pulls | None:
    if plan is None or (other is not None and other.saved_ms.max() > plan.saved_ms.max()):
        return other
    return plan


def _from_leaving(links: PullLinks, token_ms: Floats, hits: Ints, leaving: LeavingHolders, one: int) -> Pulls | None:
    holder, has, deep, copied_ms = len(hits) + one, int(leaving.hits[one]), 0, 0.0
    if leaving.lower is not None and (deep := int(leaving.lower[:, one].sum())):
        if links.serves_lower[holder]:
            copied_ms = float((leaving.lower[:, one] * leaving.copy_token_ms[:, one]).sum()) / deep
        else:
            has, deep = has - deep, 0
    return _plan(links, token_ms, hits, has, holder, deep, copied_ms, float(leaving.left_ms[one]))


def _from_usable(
    links: PullLinks, token_ms: Floats, hits: Ints, lower: Ints | None, copy_token_ms: Floats | None
) -> Pulls | None:
    if lower is None:
        holder = int(hits.argmax())
        return _plan(links, token_ms, hits, int(hits[holder]), holder)
    deep: Ints = np.add.reduce(lower)
    first = hits - deep
    holder = int(first.argmax())
    plan = _plan(links, token_ms, hits, int(first[holder]), holder)
    if copy_token_ms is None:
        return plan
    served = np.where(links.serves_lower[: len(hits)], hits, first)
    other = int(served.argmax())
    if served[other] <= first[holder]:
        return plan
    copied_ms = float((lower[:, other] * copy_token_ms[:, other]).sum()) / int(deep[other])
    return _better(plan, _plan(links, token_ms, hits, int(served[other]), other, int(deep[other]), copied_ms))


def _plan(
    links: PullLinks,
    token_ms: Floats,
    hits: Ints,
    has: int,
    holder: int,
    deep: int = 0,
    copied_ms: float = 0.0,
    left_ms: float = np.inf,
) -> Pulls | None:
    """Args: has: tokens that the holder serves. deep: of these, the last ones that it copies first. copied_ms: for each of
    these. left_ms: until the holder exits."""
    gain = has - hits
    np.maximum(gain, 0, out=gain)
    if not gain.any():
        return None
    compute_ms = gain * token_ms
    saved = compute_ms - links.pull_ms(holder, gain)
    if deep:
        saved -= copied_ms * np.minimum(gain, deep)
    saved[saved < (1.0 - MOST_OF_COMPUTE) * compute_ms] = 0.0
    saved[compute_ms - saved > left_ms] = 0.0
    saved[gain == 0] = 0.0
    if not saved.any():
        return None
    hit_tokens = np.where(saved > 0.0, has, hits)
    return Pulls(holder, saved, hit_tokens, links, hits, token_ms, copied_ms)
