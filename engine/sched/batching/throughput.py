"""How many prompt tokens fit into a step's time, by the measured rates of this worker."""

from __future__ import annotations

_WEIGHT = 0.25
"""Weight of a new measurement: the rate settles in about ten steps, and one slow step changes it little."""
_PATIENCE_S = 2.0
"""If all prompts together take longer than this, a mixed step is stretched in proportion. On an overloaded worker first
tokens would otherwise come ever later, and steps would be too small for their fixed cost."""
_POLLS_S = 1.0
"""The mean interval between polls is that of about so much time."""
_INSTALL_SHARE = 0.1
"""Of the time of a decode step: what is copied into slots of adapters before it."""
_LEAST_INSTALL_S = 0.001
MIN_MEASURED_TOKENS = 16
"""The time of a smaller chunk is overhead: its rate says nothing about a larger one."""


class ThroughputEstimator:
    """Learns from the durations that `observe` and `observe_copy` are given; reads no clock.

    Args:
        max_step_time_s: the time budget of a step; None: no cap.
        mixed_step_time_s: that of a step with decoding sequences, which wait for its prompts; None: as any other
        step's.
        max_mixed_tokens: prompt tokens of such a step; 0: no bound but that of its time.
        first_guess: prefill tokens per second until the first measurement.
        min_chunk: prompt tokens that are always allowed, so that a slow step does not stop all progress; at least
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
        max_mixed_tokens: int = 0,
    ) -> None:
        self._max_step_time_s = max_step_time_s
        self._mixed_step_time_s = mixed_step_time_s
        self._max_mixed_tokens = max_mixed_tokens
        self._min_chunk = min_chunk
        self.rate = first_guess
        """Prefill tokens per second, measured or guessed."""
        self.copy_bytes_per_s = copy_first_guess
        self.disk_bytes_per_s = 0.0
        """From files into blocks; 0.0: not measured."""
        self.install_bytes_per_s = 1e9
        """Into slots of adapters, measured or guessed."""
        self.prefill_tokens_per_s = 0.0
        """0.0: nothing measured yet."""
        self.decode_step_s = 0.0
        """Of the last decode steps of any size."""
        self._decode_steps: dict[int, float] = {}
        """By the number of sequences, in powers of two."""
        self.prompt_step_s = 0.0
        """Of a step that computes prompts: a request that arrives meanwhile waits for its end."""
        self.poll_interval_s = 0.0
        """See EngineStats."""

    def decode_s(self, num_decode: int) -> float:
        """Time of a step of so many decoding sequences without prompts, as measured for this or the nearest size; 0.0:
        nothing was measured."""
        if not num_decode or not self._decode_steps:
            return 0.0
        size = num_decode.bit_length()
        return self._decode_steps[min(self._decode_steps, key=lambda known: (abs(known - size), -known))]

    def prefill_cap(self, num_decode: int, backlog: int = 0) -> int | None:
        """Prompt tokens that the next step may compute beside `num_decode` decode tokens; None: no limit.

        Beside decoding sequences, prompts get what a decode step leaves of mixed_step_time_s, and at least as much time
        as that step takes, so that many sequences do not stop them. The time grows with the backlog.

        Args: backlog: prompt tokens that are to be computed.
        """
        decode_s = self.decode_s(num_decode)
        limits = [] if self._max_step_time_s is None else [self._max_step_time_s - decode_s]
        if num_decode and self._mixed_step_time_s is not None:
            stretch = max(1.0, backlog / self.rate / _PATIENCE_S)
            limits.append(max(stretch * self._mixed_step_time_s - decode_s, decode_s))
        most = self._max_mixed_tokens if num_decode and self._max_mixed_tokens else None
        if not limits:
            return most
        cap = max(self._min_chunk, int(min(limits) * self.rate))
        return cap if most is None else min(cap, most)

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
        # The decode part of a mixed step is known from pure decode steps. At least half of the time counts for the
        # chunk, so that an outdated decode figure does not inflate the rate.
        prefill_s = max(duration_s - self.decode_s(num_decode), duration_s / 2)
        self.prefill_tokens_per_s = self._mix(self.prefill_tokens_per_s, num_prefill / prefill_s)
        self.rate = self.prefill_tokens_per_s

    def observe_poll(self, interval_s: float) -> None:
        """The step thread looked for commands of pulls, so long after the last time. An interval counts by its length: a command
        comes in the midst of a long one more often than of a short one."""
        weight = interval_s / (interval_s + _POLLS_S)
        self.poll_interval_s += weight * (interval_s - self.poll_interval_s)

    def observe_copy(self, duration_s: float, size_bytes: int) -> None:
        """Blocks were copied to or from the host tier."""
        if duration_s > 0.0 and size_bytes:
            self.copy_bytes_per_s = self._mix(self.copy_bytes_per_s, size_bytes / duration_s)

    def install_budget(self) -> int:
        """Bytes of adapters that may be copied before a step for which sequences wait."""
        return int(max(_LEAST_INSTALL_S, _INSTALL_SHARE * self.decode_step_s) * self.install_bytes_per_s)

    def observe_install(self, duration_s: float, size_bytes: int) -> None:
        """Parts of adapters were copied into slots."""
        if duration_s > 0.0 and size_bytes:
            self.install_bytes_per_s = self._mix(self.install_bytes_per_s, size_bytes / duration_s)

    def observe_disk(self, duration_s: float, size_bytes: int) -> None:
        """Blocks came from files: read, checked and copied into the pool."""
        if duration_s > 0.0 and size_bytes:
            self.disk_bytes_per_s = self._mix(self.disk_bytes_per_s, size_bytes / duration_s)

    @staticmethod
    def _mix(old: float, new: float) -> float:
        return new if old == 0.0 else old + _WEIGHT * (new - old)
