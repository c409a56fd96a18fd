"""The runner's interface to a server: a request becomes a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from diptych.loadtest.figures.record import Outcome, ServerFacts
from diptych.loadtest.workloads.items import Message


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, including history."""

    max_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    tenant: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`ignore_eos`: answers have exactly max_tokens (an extension of Diptych, vLLM and SGLang)."""

    temperature: float = 0.0
    ignore_eos: bool = True
    explain: bool = True
    timeout_s: float = 600.0


@dataclass(slots=True)
class Chunk:
    """A chunk arrived. `num_tokens` None: the number of its tokens is unknown."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None


@dataclass(slots=True)
class Accepted:
    """The server has accepted the request; no token yet."""

    request_id: str = ""


@dataclass(slots=True)
class Ended:
    """The regular end. Counts are None if the server does not report them."""

    finish_reason: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    server: ServerFacts | None = None
    notes: tuple[str, ...] = field(default=())


Event = Chunk | Accepted | Ended


class TargetError(Exception):
    """A failed request, with the text for its report."""

    def __init__(self, outcome: Outcome, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.outcome, self.message, self.status = outcome, message, status


class Target(Protocol):
    """A server under test. Closing the generator early disconnects the client."""

    label: str
    url: str

    def send(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Raises (while iterating): TargetError."""
        ...

    async def open(self) -> str:
        """Connect and return the model's name. Raises: TargetError when the server cannot be reached."""
        ...

    async def close(self) -> None: ...
