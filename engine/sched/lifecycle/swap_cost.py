"""Recompute or swap: which is cheaper for a preempted request, by measured rates. Pure.

recompute   tokens / prefill rate
swap        2 * bytes / copy rate + overhead        out now, in again later
restore         bytes / copy rate + overhead        an evicted block is copied back from the host tier
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COPY_OVERHEAD_S = 50e-6
"""Of one batch of copies: launch and wait for it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured on this worker."""

    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    kv_bytes_per_token: int

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def restore_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / self.copy_bytes_per_s + COPY_OVERHEAD_S

    def swap_s(self, num_tokens: int) -> float:
        return 2 * self.restore_s(num_tokens)


def swap_is_cheaper(num_tokens: int, rates: Rates) -> bool:
    return rates.swap_s(num_tokens) < rates.recompute_s(num_tokens)


def restore_is_cheaper(num_tokens: int, rates: Rates) -> bool:
    return rates.restore_s(num_tokens) < rates.recompute_s(num_tokens)


def break_even_tokens(rates: Rates) -> float:
    """From so many computed tokens on a swap is cheaper; inf: never, the link is too slow."""
    gain_s = 1.0 / rates.prefill_tokens_per_s - 2.0 * rates.kv_bytes_per_token / rates.copy_bytes_per_s
    return 2.0 * COPY_OVERHEAD_S / gain_s if gain_s > 0 else math.inf


def break_even_copy_bytes_per_s(rates: Rates) -> float:
    """Below this copy rate recomputing is cheaper at any length."""
    return 2.0 * rates.kv_bytes_per_token * rates.prefill_tokens_per_s


def describe(rates: Rates, *, mode: str = "auto") -> str:
    """One line for the log: what happens to preempted requests, by which rates.

    Args:
        rates: a copy rate of 0.0: there is no host tier; a prefill rate of 0.0: nothing was measured yet.
        mode: the engine's preemption_mode.
    """
    if mode == "recompute" or not rates.copy_bytes_per_s:
        why = "preemption_mode=recompute" if mode == "recompute" else "no host tier"
        return f"preempted requests are computed again ({why})"
    if not rates.prefill_tokens_per_s:
        return "preempted requests: no prefill rate was measured yet"
    tokens = break_even_tokens(rates)
    basis = (
        f"prefill {rates.prefill_tokens_per_s:,.0f} tokens/s, {rates.kv_bytes_per_token:,} bytes a token, "
        f"copies {rates.copy_bytes_per_s / 1e9:.2f} GB/s"
    )
    if mode == "swap":
        return f"preempted requests are swapped out (preemption_mode=swap; {basis})"
    if math.isinf(tokens):
        least = break_even_copy_bytes_per_s(rates) / 1e9
        return f"preempted requests are computed again: a swap would pay above {least:.2f} GB/s ({basis})"
    return f"preempted requests are swapped out from {math.ceil(tokens):,} computed tokens on ({basis})"
