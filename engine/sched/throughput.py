"""How many prompt tokens fit into a step's time: measured rates of this worker, learned online."""

from __future__ import annotations

_WEIGHT = 0.25
"""Of a new measurement: settles in about ten steps, and one slow step does not overturn it."""
_PATIENCE_S = 2.0
"""Prompts that take longer than this, all together, stretch a mixed step in proportion: with more sequences than the machine can
serve, first tokens would else come ever later, and steps would be too small to be worth their fixed cost."""
MIN_MEASURED_TOKENS = 16
"""A chunk below this is all overhead: its rate says nothing about a larger one."""


class ThroughputEstimator:
    """Durations come in by `observe` and `observe_copy`; no clock inside.

    Args:
        max_step_time_s: the time budget of a step; None: no cap.
        mixed_step_time_s: that of a step with decoding sequences in it, which wait for its prompts; None: as any other's.
        first_guess: prefill tokens per second until the first measurement.
        min_chunk: prompt tokens that are always granted, so that a slow step never stops all progress; at least
            MIN_MEASURED_TOKENS, so that a rate that fell is measured again.
    """

    def __init__(
        self,
        max_step_time_s: float | None,
        first_guess: float,
        min_chunk: int,
        copy_first_guess: float = 4e9,
        *,
        mixed_step_time_s: float | None = None,
    ) -> None:
        self._max_step_time_s = max_step_time_s
        self._mixed_step_time_s = mixed_step_time_s
        self._min_chunk = min_chunk
        self.rate = first_guess
        """Prefill tokens per second, measured or guessed."""
        self.copy_bytes_per_s = copy_first_guess
        self.prefill_tokens_per_s = 0.0
        """0.0: nothing measured yet."""
        self.decode_step_s = 0.0
        """Of the last decode steps, whatever their size."""
        self._decode_steps: dict[int, float] = {}
        """By the number of sequences, in powers of two."""
        self.prompt_step_s = 0.0
        """Of a step that computes prompts: what comes in the midst of one waits for its end."""

    def decode_s(self, num_decode: int) -> float:
        """What a step of so many decoding sequences takes without prompts: measured, or as the nearest size that was; 0.0: none
        was."""
        if not num_decode or not self._decode_steps:
            return 0.0
        size = num_decode.bit_length()
        return self._decode_steps[min(self._decode_steps, key=lambda known: (abs(known - size), -known))]

    def prefill_cap(self, num_decode: int, backlog: int = 0) -> int | None:
        """Prompt tokens that the next step may compute beside `num_decode` decode tokens; None: as many as it likes.

        Beside decoding sequences prompts have what their own step leaves of mixed_step_time_s, and at least as long as that step
        takes: else many sequences would stop all prompts. And the more prompts there are, the longer.

        Args: backlog: prompt tokens that are to be computed.
        """
        decode_s = self.decode_s(num_decode)
        limits = [] if self._max_step_time_s is None else [self._max_step_time_s - decode_s]
        if num_decode and self._mixed_step_time_s is not None:
            stretch = max(1.0, backlog / self.rate / _PATIENCE_S)
            limits.append(max(stretch * self._mixed_step_time_s - decode_s, decode_s))
        return max(self._min_chunk, int(min(limits) * self.rate)) if limits else None

    def observe(self, duration_s: float, num_prefill: int, num_decode: int) -> None:
        if duration_s <= 0.0:
            return
        if not num_prefill:
            self.decode_step_s = self._mix(self.decode_step_s, duration_s)
            size = num_decode.bit_length()
            self._decode_steps[size] = self._mix(self._decode_steps.get(size, 0.0), duration_s)
            return
        if num_prefill < MIN_MEASURED_TOKENS:
            return
        self.prompt_step_s = self._mix(self.prompt_step_s, duration_s)
        # A mixed step's decode part is known from pure decode steps; at least half of the time is charged to the chunk, so
        # that a decode figure gone stale cannot make the rate explode.
        prefill_s = max(duration_s - self.decode_s(num_decode), duration_s / 2)
        self.prefill_tokens_per_s = self._mix(self.prefill_tokens_per_s, num_prefill / prefill_s)
        self.rate = self.prefill_tokens_per_s

    def observe_copy(self, duration_s: float, size_bytes: int) -> None:
        """Blocks went to or came from the host tier."""
        if duration_s > 0.0 and size_bytes:
            self.copy_bytes_per_s = self._mix(self.copy_bytes_per_s, size_bytes / duration_s)

    @staticmethod
    def _mix(old: float, new: float) -> float:
        return new if old == 0.0 else old + _WEIGHT * (new - old)
