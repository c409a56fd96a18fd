"""An attempt's life on decode.

Submit --checks fail--> (never an attempt: End with the typed failure)
   | a grammar is compiled first; until then neither Accepted is out nor the engine knows of the attempt
ADMITTING   Accepted is out, the engine queues it, blocks are being reserved
   | Admitted -> choose_route
   |----------------------> COMPUTING   the prompt is computed here
   v                            ^
FETCHING    a prefill leg runs  | a leg failed and the policy says recompute (or the next leg: FETCHING again)
   | every range unpacked       |
   v                            |
DECODING    KvComplete was sent |
   |  from DECODING and COMPUTING: preempted, and a prefill worker is the faster way back -> FETCHING, of prompt and outputs
   |                            |
   +------------+---------------+
                v
ENDED       Finished, Failed, Cancel, deadline or router lost: End is out, legs and timer are stopped. The attempt is
            forgotten once the engine said its last word about it.
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
    """The state of one attempt and how it came there."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self.state = State.ADMITTING
        self._story = [State.ADMITTING.value]

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    def move(self, to: State) -> None:
        """Raises: RuntimeError on an illegal move, with the story so far (a bug of ours)."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"{self._attempt}: {' -> '.join(self._story)} cannot go to {to.value}")
        self.state = to
        self._story.append(to.value)
