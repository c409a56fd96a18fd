"""Device -> back ends, in the order in which they are asked. A new back end is one file beside this one and one line here."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat
from diptych.engine.exec.backends.base import EVERY_BLOCK, Backend, Plan, Refusal, make_plan
from diptych.engine.exec.backends.native import NativeBackend
from diptych.engine.exec.backends.torch import TorchBackend
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.lora import NO_LORAS, LoraSizes
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.library import load_library
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace, local_description
from diptych.kernels.dispatch import NATIVE, TORCH, TRITON, choose_backend
from diptych.kernels.native.build import NativeError

_log = logging.getLogger(__name__)
_INVARIANT_MAJOR = 9
"""Of the compute capability whose matrix instructions and shared memory the batch-invariant kernels were written for."""


def _native(description: ModelDescription, dtype: torch.dtype, batch_invariant: bool) -> Backend | Refusal:
    try:
        return NativeBackend(load_library(dtype), description, dtype)
    except NativeError as error:
        return Refusal(NATIVE, EVERY_BLOCK, str(error))


def _triton(description: ModelDescription, dtype: torch.dtype, batch_invariant: bool) -> Backend | Refusal:
    if batch_invariant and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major != _INVARIANT_MAJOR:
            needs = f"its batch-invariant kernels are for compute capability {_INVARIANT_MAJOR}.x, this GPU has {major}.{minor}"
            return Refusal(TRITON, EVERY_BLOCK, needs)
    # Here and not above: nothing on the CPU's path imports Triton.
    from diptych.engine.exec.backends.triton import TritonBackend

    return TritonBackend(batch_invariant=batch_invariant)


def _torch(description: ModelDescription, dtype: torch.dtype, batch_invariant: bool) -> Backend | Refusal:
    return TorchBackend()


_MAKERS: dict[str, Callable[[ModelDescription, torch.dtype, bool], Backend | Refusal]] = {
    NATIVE: _native,
    TRITON: _triton,
    TORCH: _torch,
}
_UNUSABLE = {
    NATIVE: "the compiled CPU kernels cannot be used",
    TRITON: "the Triton kernels cannot be used",
}
_CONSEQUENCES = {
    NATIVE: "plain torch is about half as fast",
    TRITON: "plain torch without CUDA graphs is many times slower",
}
_QUANTIZED_CONSEQUENCE = "torch unpacks quantized weights in every step and is many times slower"


def plan_for(
    description: ModelDescription,
    kv: KvFormat,
    *,
    device_type: str,
    dtype: torch.dtype,
    wanted: str | None = None,
    batch_invariant: bool = False,
    loras: LoraSizes = NO_LORAS,
    place: RankPlace = WHOLE_PLACE,
) -> Plan:
    """Which back end runs which block. What the fastest one refuses is logged as a warning, with its reasons.

    Args:
        description: of the whole model. place: which part of it is computed here.
        kv: of the pool, which is this rank's.
        wanted: "native", "torch" or "triton": this one or none; None: the device's own, and torch for what that refuses.
        batch_invariant: only back ends that are.
        loras: slots for adapters in every layer.
    Raises: ConfigError when the one that is wanted cannot be used or refuses a block, and for a block that no back end
        computes batch-invariantly.
    """
    try:
        first = choose_backend(device_type, wanted)
    except ValueError as error:
        raise ConfigError("backend", wanted, str(error)) from None
    backends: list[Backend] = []
    unusable: list[Refusal] = []
    for name in dict.fromkeys((first, TORCH)):
        made = _MAKERS[name](local_description(description, place), dtype, batch_invariant)
        if not isinstance(made, Refusal) and (reason := made.place_refusal(place)):
            made = Refusal(name, EVERY_BLOCK, reason)
        if isinstance(made, Refusal):
            unusable.append(made)
        else:
            backends.append(made)
    plan = make_plan(description, kv, backends, unusable, loras, place)
    if wanted is not None and plan.refusals:
        raise ConfigError("backend", wanted, f"{_UNUSABLE[wanted]}: {plan.reasons()[0][1]}")
    if batch_invariant:
        _check_invariant(plan)
    for name, line in plan.reasons():
        consequence = _CONSEQUENCES[name] if description.method == PLAIN else _QUANTIZED_CONSEQUENCE
        _log.warning("%s, %s: %s", _UNUSABLE[name], consequence, line)
    return plan


def _check_invariant(plan: Plan) -> None:
    owners = (*plan.block_owners, plan.embedding_owner, plan.head_owner)
    varying = sorted({owner.name for owner in owners if not owner.batch_invariant})
    if varying:
        reasons = "".join(f"; {line}" for _, line in plan.reasons())
        rule = f"the back end {varying[0]} is not: its results depend on the other rows of a step{reasons}"
        raise ConfigError("batch_invariant", True, rule)
