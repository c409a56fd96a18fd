"""GPUs of this machine, and their assignment to the workers of a local cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from types import MappingProxyType

from diptych.common.errors import ConfigError
from diptych.worker.visible_gpus import LINKS, Gpu, Links, worst_link

WHOLE_SHARE = 0.9
"""Share of a GPU's memory for all workers on it."""
_GIB = 1 << 30
_MOST_GPUS, _MOST_GROUPS = 16, 20_000
"""Among which groups are compared; of more GPUs those that the fewest workers use."""


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPUs of one worker, one for each rank, and its share of their memory. `link`: see worst_link."""

    gpus: tuple[Gpu, ...]
    share: float
    link: str = ""

    @property
    def visible(self) -> tuple[str, ...]:
        """Each GPU once."""
        return tuple(dict.fromkeys(gpu.visible for gpu in self.gpus))

    @property
    def devices(self) -> str:
        """For --devices, of a worker that sees these GPUs only."""
        return ",".join(str(self.visible.index(gpu.visible)) for gpu in self.gpus)


def assign_gpus(
    gpus: Sequence[Gpu],
    *,
    prefill: int,
    decode: int,
    prefill_gpus: Sequence[int] = (),
    decode_gpus: Sequence[int] = (),
    prefill_ranks: int = 1,
    decode_ranks: int = 1,
    links: Links = MappingProxyType({}),
) -> dict[str, GpuAssignment]:
    """One GPU for each rank if there are enough; else workers share GPUs and their memory. A worker's GPUs are those with the
    best connection between each two of them.

    Args:
        prefill, decode: number of workers of each role.
        prefill_gpus, decode_gpus: positions in `gpus`, used in turn; empty: automatic, not those of the other role.
        prefill_ranks, decode_ranks: of each worker of the role.
        links: how each two GPUs are connected.
    Raises: ConfigError for a GPU that does not exist, and for fewer GPUs than a worker has ranks.
    """
    roles = (("prefill", prefill, prefill_ranks, prefill_gpus), ("decode", decode, decode_ranks, decode_gpus))
    for role, _, ranks, given in roles:
        for number in given:
            if not 0 <= number < len(gpus):
                raise ConfigError(f"{role}_gpus", number, f"there are {len(gpus)} GPUs: 0 to {len(gpus) - 1}")
        if 0 < len(given) < ranks:
            rule = f"a worker has {ranks} ranks: name a GPU for each; one may be named twice"
            raise ConfigError(f"{role}_gpus", ",".join(map(str, given)), rule)
        if len(gpus) < ranks and not given:
            rule = f"{ranks} ranks of a worker need {ranks} GPUs, and there are {len(gpus)}; --{role}-gpus may name one twice"
            raise ConfigError(f"{role}_tensor_parallel_size", ranks, rule)
    used: Counter[int] = Counter()
    at: dict[str, tuple[int, ...]] = {}
    for role, count, ranks, given in roles:
        others = decode_gpus if role == "prefill" else prefill_gpus
        free = [number for number in range(len(gpus)) if number not in others]
        for index in range(count):
            if given:
                group = tuple(given[(index * ranks + rank) % len(given)] for rank in range(ranks))
            else:
                group = _best_group(gpus, free if len(free) >= ranks else range(len(gpus)), ranks, used, links)
            used.update(set(group))
            at[f"{role}-{index}"] = group
    return {
        name: GpuAssignment(
            tuple(gpus[number] for number in group),
            round(WHOLE_SHARE / max(used[number] for number in group), 3),
            worst_link([gpus[number] for number in group], links),
        )
        for name, group in at.items()
    }


def _best_group(
    gpus: Sequence[Gpu], numbers: Sequence[int], ranks: int, used: Mapping[int, int], links: Links
) -> tuple[int, ...]:
    """Of these GPUs those that the fewest workers use, then those that are best connected, then the first ones."""

    def cost(group: tuple[int, ...]) -> tuple[int, int, int]:
        load = [used.get(number, 0) for number in group]
        link = worst_link([gpus[number] for number in group], links)
        return max(load), sum(load), LINKS.index(link) or len(LINKS)

    if comb(len(numbers), ranks) > _MOST_GROUPS:
        numbers = sorted(numbers, key=lambda number: used.get(number, 0))[:_MOST_GPUS]
        numbers = sorted(numbers) if len(numbers) > ranks else numbers
        if comb(len(numbers), ranks) > _MOST_GROUPS:
            return tuple(numbers[:ranks])
    return min(combinations(numbers, ranks), key=cost)


def describe_assignments(assignments: Mapping[str, GpuAssignment]) -> str:
    """The assignment as one line of text."""
    by_gpus: dict[tuple[Gpu, ...], list[str]] = {}
    for name, assignment in assignments.items():
        by_gpus.setdefault(assignment.gpus, []).append(name)
    shared = Counter(gpu for assignment in assignments.values() for gpu in set(assignment.gpus))
    parts = []
    for gpus, names in by_gpus.items():
        assignment, first = assignments[names[0]], gpus[0]
        memory = f"{first.total_bytes / _GIB:.0f} GiB"
        if len(gpus) == 1:
            where = f"GPU {first.visible} ({first.name}, {memory})"
        else:
            link = f", {assignment.link} between them" if assignment.link else ""
            where = f"GPUs {','.join(gpu.visible for gpu in gpus)} ({first.name}, {memory} each{link})"
        several = max(shared[gpu] for gpu in gpus) > 1
        parts.append(
            f"{' and '.join(names)} on {where}" + (f", {assignment.share:.0%} of its memory each" if several else "")
        )
    alone = len(by_gpus) == 1 and len(assignments) > 1
    hint = "; on one GPU `diptych serve --device cuda` needs no hand-off" if alone else ""
    return "; ".join(parts) + hint
