"""How many KV blocks a GPU holds: measured with the largest step the scheduler may ask for, before the real pool is made.

    blocks = as many as fit into the least of (total * utilization - our own) and free - the step's peak - graphs - reserve

Our own are weights and context: a worker may share its GPU with another that has a share of its own, and "free" is what
the driver says. A trial runner on a small pool runs one prefill of the
most tokens and captures the largest decode graph and those of chunks; what it took beyond its pool is kept free for the
real one, and what the other decode graphs put out.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_groups import PoolDemand
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import ModelRunner

log = logging.getLogger(__name__)
_SLACK_BYTES = 256 << 20
"""For what fragments, and for kernels that are loaded later."""
_CONTEXT_BYTES = 640 << 20
"""Of a process on a GPU, before it allocates anything: what torch does not count."""


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Args:
    utilization: share of the GPU's memory that this process may have, 0 to 1.
    step_tokens: max_num_batched_tokens.
    reserve_bytes: for GPU memory that is taken later, such as a staging ring.
    Raises: ConfigError.
    """

    utilization: float
    step_tokens: int
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization", self.utilization, "must be above 0 and at most 1")


def blocks_that_fit(
    budget: PoolBudget,
    kv: KvFormat,
    demand: PoolDemand | None,
    own: KvFormat | None = None,
    *,
    total: int,
    free: int,
    used: int,
    step: int,
) -> int:
    """All in bytes. Args: used: by this process. demand: of window groups; None: there are none. own: of `kv` what this rank's
    pool holds; None: all. Raises: ConfigError when not even one block fits."""
    share = int(total * budget.utilization) - used
    room = min(share, free) - step - budget.reserve_bytes - _SLACK_BYTES
    blocks = (demand or PoolDemand()).most_blocks(kv, max(0, room), (own or kv,))
    if not blocks:
        raise ConfigError(
            "gpu_memory_utilization",
            budget.utilization,
            f"of the GPU's {total / 2**30:.1f} GiB {free / 2**30:.1f} are free; this worker has {used / 2**30:.1f} already, "
            f"a step takes {step / 2**30:.1f}, {budget.reserve_bytes / 2**30:.1f} are reserved: no room for KV",
        )
    return blocks


def profile(
    make_runner: Callable[[int], ModelRunner],
    budget: PoolBudget,
    kv: KvFormat,
    demand: PoolDemand | None,
    own: KvFormat | None = None,
) -> int:
    """KV blocks for the pool of the runner that make_runner(num_blocks) makes. The trial runner is gone when this returns.

    Args: demand, own: see blocks_that_fit.
    Raises: ConfigError.
    """
    own = own or kv
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    num_blocks = -(-budget.step_tokens // kv.block_size) + 1
    trial = None
    try:
        trial = make_runner(num_blocks)
        trial.execute(_largest_step(trial, budget.step_tokens, len(own.groups)))
        torch.cuda.synchronize()
        step = torch.cuda.max_memory_reserved() - before - (demand or PoolDemand()).pool_bytes(kv, num_blocks, (own,))
    except torch.OutOfMemoryError as error:
        raise out_of_memory("max_num_batched_tokens", budget.step_tokens, "one step's tensors", error) from None
    finally:
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.memory_reserved() + _CONTEXT_BYTES
    fit = blocks_that_fit(budget, kv, demand, own, total=total, free=free, used=used, step=max(0, step))
    log.info("gpu memory: a step takes %.2f GiB, %d KV blocks fit", step / 2**30, fit)
    return fit


def out_of_memory(field: str, value: object, what: str, error: torch.OutOfMemoryError) -> ConfigError:
    """With the numbers that say what to change. Args: what: did not fit."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    there = f"{free / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are free, this process has {reserved / 2**30:.1f}"
    told = str(error).partition(". ")[0]
    return ConfigError(field, value, f"no GPU memory for {what}: {there} ({told})")


def _largest_step(runner: ModelRunner, tokens: int, num_groups: int) -> list[ScheduledSeq]:
    """Prompts of `tokens` tokens together, each as long as the model allows, drawn with all that a draw may need."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, seed=1)
    seqs: list[ScheduledSeq] = []
    able, block = runner.capabilities, 0
    while tokens > 0 and block < able.num_blocks:
        count = min(tokens, able.max_model_len, (able.num_blocks - block) * able.block_size)
        table = list(range(block, block + -(-count // able.block_size)))
        seq = ScheduledSeq(f"profile-{len(seqs)}", [0] * count, 0, (table,) * num_groups, True, params, 0)
        seq.first_blocks = (0,) * num_groups
        seqs.append(seq)
        block += len(table)
        tokens -= count
    return seqs
