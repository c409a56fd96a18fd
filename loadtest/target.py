"""What the runner drives: anything that turns a request into a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from diptych.loadtest.items import Message
from diptych.loadtest.record import Outcome, ServerFacts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it goes out, history included."""

    max_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    tenant: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Args: ignore_eos: answers have exactly max_tokens (an extension that ours, vLLM and SGLang understand)."""

    temperature: float = 0.0
    ignore_eos: bool = True
    explain: bool = True
    timeout_s: float = 600.0


@dataclass(slots=True)
class Chunk:
    """Something arrived. `num_tokens` None: the chunk does not say how many tokens it holds."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None


@dataclass(slots=True)
class Accepted:
    """The server has taken the request; no token yet."""

    request_id: str = ""


@dataclass(slots=True)
class Ended:
    """The proper end. Counts are None where the server does not tell."""

    finish_reason: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    server: ServerFacts | None = None
    notes: tuple[str, ...] = field(default=())


Event = Chunk | Accepted | Ended


class TargetError(Exception):
    """A request that did not end well, in the words of its report."""

    def __init__(self, outcome: Outcome, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.outcome, self.message, self.status = outcome, message, status


class Target(Protocol):
    """A server under test. Closing the generator early leaves the request, as a client that goes away."""

    label: str
    url: str

    def send(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Raises (while iterating): TargetError."""
        ...

    async def open(self) -> str:
        """Connect and return the model's name. Raises: TargetError when the server cannot be reached."""
        ...

    async def close(self) -> None: ...
