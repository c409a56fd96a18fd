"""The life of one request at the router. Pure.

    PREPARED --submit--> SUBMITTED --accepted--> ACCEPTED --tokens--> STREAMING --end--> FINISHED
                 ^           |  |                   |                     |
                 |           |  +---end-------------+---------------------+---> FINISHED
                 +--replace--+----------replace-----+                     |
    any but the last three --fail--> FAILED        --cancel--> CANCELLED

A request may be placed again (once, on another worker or another life of the same one) as long as no token of it has been
streamed; from the first token on, losing decode is a typed error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


class State(Enum):
    PREPARED = auto()
    SUBMITTED = auto()
    ACCEPTED = auto()
    STREAMING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class Move(Enum):
    SUBMIT = auto()
    ACCEPT = auto()
    TOKENS = auto()
    END = auto()
    REPLACE = auto()
    FAIL = auto()
    CANCEL = auto()


_MOVES: dict[tuple[State, Move], State] = {
    (State.PREPARED, Move.SUBMIT): State.SUBMITTED,
    (State.SUBMITTED, Move.ACCEPT): State.ACCEPTED,
    (State.ACCEPTED, Move.TOKENS): State.STREAMING,
    (State.STREAMING, Move.TOKENS): State.STREAMING,
    (State.ACCEPTED, Move.END): State.FINISHED,
    (State.STREAMING, Move.END): State.FINISHED,
    (State.SUBMITTED, Move.REPLACE): State.PREPARED,
    (State.ACCEPTED, Move.REPLACE): State.PREPARED,
    **{
        (state, move): end
        for state in (State.PREPARED, State.SUBMITTED, State.ACCEPTED, State.STREAMING)
        for move, end in ((Move.FAIL, State.FAILED), (Move.CANCEL, State.CANCELLED))
    },
}
ENDED = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class IllegalMoveError(Exception):
    """Our bug, or a decode worker that breaks the protocol; tells the story so far."""


@dataclass(slots=True)
class Lifecycle:
    """Args:
    max_replacements: how often the request may be placed again.
    num_tokens: tokens that the client has, of all choices.
    offsets: by choice, the offset that the next tokens must have.
    """

    max_replacements: int = 1
    state: State = State.PREPARED
    story: list[str] = field(default_factory=list)
    num_replacements: int = 0
    num_tokens: int = 0
    offsets: dict[int, int] = field(default_factory=dict)

    def on(self, move: Move) -> None:
        """Raises: IllegalMoveError."""
        after = _MOVES.get((self.state, move))
        if after is None:
            raise IllegalMoveError(f"{move.name} in {self.state.name} after {' -> '.join(self.story) or 'nothing'}")
        if not (move is Move.TOKENS and self.state is State.STREAMING):
            self.story.append(move.name)
        self.state = after
        if move is Move.REPLACE:
            self.num_replacements += 1

    def on_tokens(self, offset: int, count: int, choice: int = 0) -> None:
        """Raises: IllegalMoveError when tokens are missing or repeated."""
        self.on(Move.TOKENS)
        due = self.offsets.get(choice, 0)
        if offset != due or count < 0:
            raise IllegalMoveError(f"{count} tokens of choice {choice} at offset {offset}, expected offset {due}")
        self.offsets[choice] = due + count
        self.num_tokens += count

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def may_replace(self) -> bool:
        return (self.state, Move.REPLACE) in _MOVES and self.num_replacements < self.max_replacements
