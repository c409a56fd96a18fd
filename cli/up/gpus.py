"""GPUs of this machine, and their assignment to the workers of a local cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.worker.visible_gpus import Gpu

WHOLE_SHARE = 0.9
"""Share of a GPU's memory for all workers on it."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPU of one worker, and its share of that GPU's memory."""

    gpu: Gpu
    share: float


def assign_gpus(
    gpus: Sequence[Gpu], *, prefill: int, decode: int, prefill_gpus: Sequence[int] = (), decode_gpus: Sequence[int] = ()
) -> dict[str, GpuAssignment]:
    """One GPU for each worker if there are enough; else workers share GPUs and their memory.

    Args:
        prefill, decode: number of workers of each role.
        prefill_gpus, decode_gpus: positions in `gpus`, used in turn; empty: automatic, not those of the other role.
    Raises: ConfigError for a GPU that does not exist.
    """
    for name, wanted in (("prefill_gpus", prefill_gpus), ("decode_gpus", decode_gpus)):
        for number in wanted:
            if not 0 <= number < len(gpus):
                raise ConfigError(name, number, f"there are {len(gpus)} GPUs: 0 to {len(gpus) - 1}")
    all_gpus = range(len(gpus))
    if not prefill_gpus and not decode_gpus:
        prefill_gpus, decode_gpus = all_gpus, [*all_gpus[prefill % len(gpus) :], *all_gpus[: prefill % len(gpus)]]
    elif not prefill_gpus:
        prefill_gpus = [number for number in all_gpus if number not in decode_gpus] or all_gpus
    elif not decode_gpus:
        decode_gpus = [number for number in all_gpus if number not in prefill_gpus] or all_gpus
    at = {f"prefill-{i}": prefill_gpus[i % len(prefill_gpus)] for i in range(prefill)}
    at |= {f"decode-{i}": decode_gpus[i % len(decode_gpus)] for i in range(decode)}
    workers_on = list(at.values())
    return {
        name: GpuAssignment(gpus[number], round(WHOLE_SHARE / workers_on.count(number), 3))
        for name, number in at.items()
    }


def describe_assignments(assignments: Mapping[str, GpuAssignment]) -> str:
    """The assignment as one line of text."""
    by_gpu: dict[str, list[str]] = {}
    for name, assignment in assignments.items():
        by_gpu.setdefault(assignment.gpu.visible, []).append(name)
    parts = []
    for names in by_gpu.values():
        assignment = assignments[names[0]]
        gpu = f"GPU {assignment.gpu.visible} ({assignment.gpu.name}, {assignment.gpu.total_bytes / _GIB:.0f} GiB)"
        shared = f", {assignment.share:.0%} of its memory each" if len(names) > 1 else ""
        parts.append(f"{' and '.join(names)} on {gpu}{shared}")
    hint = "; on one GPU `diptych serve --device cuda` needs no hand-off" if len(by_gpu) == 1 else ""
    return "; ".join(parts) + hint
