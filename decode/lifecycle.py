"""The states of an attempt on decode.

Submit --checks fail--> (no attempt: End with the typed failure)
   | a grammar is compiled first; before that neither Accepted is sent nor the engine has the request
ADMITTING   Accepted is sent, the engine queues it and reserves blocks
   | Admitted -> choose_route
   |----------------------> COMPUTING   the prompt is computed here
   v                            ^
FETCHING    remote prefill runs | it failed and the policy says recompute (or the next candidate: FETCHING again)
   | every range unpacked       |
   v                            |
DECODING    KvComplete was sent |
   |  from DECODING and COMPUTING: preempted, and a prefill worker recovers the KV faster -> FETCHING prompt and outputs
   |                            |
   +------------+---------------+
                v
ENDED       Finished, Failed, Cancel, deadline or router lost: End is sent, remote prefill and timer are stopped. The
            attempt is forgotten after the engine's last event of it.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    ADMITTING = "admitting"
    FETCHING = "fetching"
    COMPUTING = "computing"
    DECODING = "decoding"
    ENDED = "ended"


_MOVES: dict[State, frozenset[State]] = {
    State.ADMITTING: frozenset({State.FETCHING, State.COMPUTING, State.ENDED}),
    State.FETCHING: frozenset({State.FETCHING, State.COMPUTING, State.DECODING, State.ENDED}),
    State.COMPUTING: frozenset({State.FETCHING, State.DECODING, State.ENDED}),
    State.DECODING: frozenset({State.FETCHING, State.COMPUTING, State.ENDED}),
    State.ENDED: frozenset(),
}


class AttemptLifecycle:
    """The state of one attempt and its history."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self.state = State.ADMITTING
        self._history = [State.ADMITTING.value]

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    def move(self, to: State) -> None:
        """Raises: RuntimeError on an illegal move, with the history (a bug)."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"{self._attempt}: {' -> '.join(self._history)} cannot go to {to.value}")
        self.state = to
        self._history.append(to.value)
