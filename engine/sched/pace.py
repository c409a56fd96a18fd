"""How many prompt tokens fit into a step's time: measured rates of this worker, learned online."""

from __future__ import annotations

_WEIGHT = 0.25
"""Of a new measurement: settles in about ten steps, and one slow step does not overturn it."""
MIN_MEASURED_TOKENS = 16
"""A chunk below this is all overhead: its rate says nothing about a larger one."""


class Pace:
    """Durations come in by `observe` and `observe_copy`; no clock inside.

    Args:
        max_step_time_s: the time budget of a step; None: no cap.
        first_guess: prefill tokens per second until the first measurement.
        min_chunk: prompt tokens that are always granted, so that a slow step never stops all progress; at least
            MIN_MEASURED_TOKENS, so that a rate that fell is measured again.
    """

    def __init__(
        self, max_step_time_s: float | None, first_guess: float, min_chunk: int, copy_first_guess: float = 4e9
    ) -> None:
        self._max_step_time_s = max_step_time_s
        self._min_chunk = min_chunk
        self.rate = first_guess
        """Prefill tokens per second, measured or guessed."""
        self.copy_bytes_per_s = copy_first_guess
        self.prefill_tokens_per_s = 0.0
        """0.0: nothing measured yet."""
        self.decode_step_s = 0.0
        self.prompt_step_s = 0.0
        """Of a step that computes prompts: what comes in the midst of one waits for its end."""

    def prefill_cap(self, num_decode: int) -> int | None:
        """Prompt tokens that the next step may compute beside `num_decode` decode tokens."""
        if self._max_step_time_s is None:
            return None
        left = self._max_step_time_s - (self.decode_step_s if num_decode else 0.0)
        return max(self._min_chunk, int(left * self.rate))

    def observe(self, duration_s: float, num_prefill: int, num_decode: int) -> None:
        if duration_s <= 0.0:
            return
        if not num_prefill:
            self.decode_step_s = self._mix(self.decode_step_s, duration_s)
            return
        if num_prefill < MIN_MEASURED_TOKENS:
            return
        self.prompt_step_s = self._mix(self.prompt_step_s, duration_s)
        # A mixed step's decode part is known from pure decode steps; at least half of the time is charged to the chunk, so
        # that a decode figure gone stale cannot make the rate explode.
        prefill_s = max(duration_s - (self.decode_step_s if num_decode else 0.0), duration_s / 2)
        self.prefill_tokens_per_s = self._mix(self.prefill_tokens_per_s, num_prefill / prefill_s)
        self.rate = self.prefill_tokens_per_s

    def observe_copy(self, duration_s: float, size_bytes: int) -> None:
        """Blocks went to or came from the host tier."""
        if duration_s > 0.0 and size_bytes:
            self.copy_bytes_per_s = self._mix(self.copy_bytes_per_s, size_bytes / duration_s)

    @staticmethod
    def _mix(old: float, new: float) -> float:
        return new if old == 0.0 else old + _WEIGHT * (new - old)
