"""Which GPUs there are, and which worker of a local cluster computes on which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.common.errors import ConfigError

WHOLE_SHARE = 0.9
"""Of a GPU's memory, that the workers on it may take together."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """Args:
    visible: what CUDA_VISIBLE_DEVICES calls it.
    """

    visible: str
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one worker computes, and its share of that GPU's memory."""

    gpu: Gpu
    share: float


def find_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, all without it, in its order. By NVML: nothing is allocated on any of them.

    Raises: ConfigError, in one sentence, when there is none.
    """
    try:
        import pynvml
    except ImportError:
        raise ConfigError(
            "device", "cuda", "finding GPUs needs the package nvidia-ml-py, which is not installed"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError("device", "cuda", f"no CUDA GPU here: NVML says {error}; --device cpu needs none") from None
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpu = Gpu(str(index), _text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free))
            found.append((gpu, _text(pynvml.nvmlDeviceGetUUID(handle))))
    except pynvml.NVMLError as error:
        raise ConfigError("device", "cuda", f"NVML cannot tell of the GPUs here: {error}") from None
    finally:
        pynvml.nvmlShutdown()
    return choose_visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def choose_visible(found: Sequence[tuple[Gpu, str]], visible: str | None) -> list[Gpu]:
    """Args:
        found: GPUs with their UUIDs.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
    Raises: ConfigError when none is left.
    """
    if visible is None:
        chosen = [gpu for gpu, _ in found]
    else:
        chosen = []
        for entry in (part.strip() for part in visible.split(",")):
            match = [
                gpu for gpu, uuid in found if entry == gpu.visible or (entry[:4] == "GPU-" and uuid.startswith(entry))
            ]
            if not match:
                break  # as CUDA does: what comes after an entry that means nothing is not seen
            chosen.append(Gpu(entry, match[0].name, match[0].total_bytes, match[0].free_bytes))
    if not chosen:
        seen = f"CUDA_VISIBLE_DEVICES={visible} leaves none of {len(found)}" if visible is not None else "there is none"
        raise ConfigError("device", "cuda", f"no CUDA GPU here: {seen}; --device cpu needs none")
    return chosen


def seat_workers(
    gpus: Sequence[Gpu], *, prefill: int, decode: int, prefill_gpus: Sequence[int] = (), decode_gpus: Sequence[int] = ()
) -> dict[str, Seat]:
    """One GPU for each worker where there are enough; else they take turns, and share the memory of a GPU.

    Args:
        prefill, decode: how many workers of each.
        prefill_gpus, decode_gpus: positions in `gpus`, in turn; empty: ours to choose, away from the other role's.
    Raises: ConfigError for a GPU that is not there.
    """
    for name, wanted in (("prefill_gpus", prefill_gpus), ("decode_gpus", decode_gpus)):
        for number in wanted:
            if not 0 <= number < len(gpus):
                raise ConfigError(name, number, f"there are {len(gpus)} GPUs: 0 to {len(gpus) - 1}")
    everybody = range(len(gpus))
    if not prefill_gpus and not decode_gpus:
        prefill_gpus, decode_gpus = everybody, [*everybody[prefill % len(gpus) :], *everybody[: prefill % len(gpus)]]
    elif not prefill_gpus:
        prefill_gpus = [number for number in everybody if number not in decode_gpus] or everybody
    elif not decode_gpus:
        decode_gpus = [number for number in everybody if number not in prefill_gpus] or everybody
    at = {f"prefill-{i}": prefill_gpus[i % len(prefill_gpus)] for i in range(prefill)}
    at |= {f"decode-{i}": decode_gpus[i % len(decode_gpus)] for i in range(decode)}
    crowd = list(at.values())
    return {name: Seat(gpus[number], round(WHOLE_SHARE / crowd.count(number), 3)) for name, number in at.items()}


def describe_seats(seats: Mapping[str, Seat]) -> str:
    """One line for the screen."""
    by_gpu: dict[str, list[str]] = {}
    for name, seat in seats.items():
        by_gpu.setdefault(seat.gpu.visible, []).append(name)
    parts = []
    for names in by_gpu.values():
        seat = seats[names[0]]
        gpu = f"GPU {seat.gpu.visible} ({seat.gpu.name}, {seat.gpu.total_bytes / _GIB:.0f} GiB)"
        shared = f", {seat.share:.0%} of its memory each" if len(names) > 1 else ""
        parts.append(f"{' and '.join(names)} on {gpu}{shared}")
    hint = "; on one GPU `diptych serve --device cuda` needs no hand-off" if len(by_gpu) == 1 else ""
    return "; ".join(parts) + hint


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
