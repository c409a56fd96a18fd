"""The states of one request at the router. Pure.

    PREPARED --submit--> SUBMITTED --accepted--> ACCEPTED --tokens--> STREAMING --end--> FINISHED
                 ^           |                      |                     |
                 +--replace--+----------------------+---------------------+
    ACCEPTED --end--> FINISHED
    any but the last three --fail--> FAILED        --cancel--> CANCELLED

Whether a request is placed again, and on what condition, is decided in migration.py. The offsets outlive an attempt: the
next one goes on where it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto


class State(IntEnum):
    PREPARED = auto()
    SUBMITTED = auto()
    ACCEPTED = auto()
    STREAMING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class Move(IntEnum):
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
    (State.STREAMING, Move.REPLACE): State.PREPARED,
    **{
        (state, move): end
        for state in (State.PREPARED, State.SUBMITTED, State.ACCEPTED, State.STREAMING)
        for move, end in ((Move.FAIL, State.FAILED), (Move.CANCEL, State.CANCELLED))
    },
}
ENDED = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class IllegalMoveError(Exception):
    """A bug, or a protocol violation of a decode worker; the message has the history."""


@dataclass(slots=True)
class Lifecycle:
    """The state machine of one request.

    Args:
        num_tokens: tokens that the client has, of all choices.
        offsets: by choice, the expected offset of the next tokens.
    """

    state: State = State.PREPARED
    history: list[str] = field(default_factory=list)
    num_replacements: int = 0
    num_tokens: int = 0
    offsets: dict[int, int] = field(default_factory=dict)

    def on(self, move: Move) -> None:
        """Raises: IllegalMoveError."""
        after = _MOVES.get((self.state, move))
        if after is None:
            raise IllegalMoveError(f"{move.name} in {self.state.name} after {' -> '.join(self.history) or 'nothing'}")
        self.history.append(move.name)
        self.state = after
        if move is Move.REPLACE:
            self.num_replacements += 1

    def on_tokens(self, offset: int, count: int, choice: int = 0) -> None:
        """Raises: IllegalMoveError when tokens are missing or repeated."""
        if self.state is not State.STREAMING:
            self.on(Move.TOKENS)
        due = self.offsets.get(choice, 0)
        if offset != due or count < 0:
            raise IllegalMoveError(f"{count} tokens of choice {choice} at offset {offset}, expected offset {due}")
        self.offsets[choice] = due + count
        self.num_tokens += count

    @property
    def ended(self) -> bool:
        return self.state in ENDED
