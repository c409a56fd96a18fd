"""The record of one request. Times are seconds since the start of the run on one monotonic clock.

    intended -> sent -> accepted -> first token -> ... -> end

`intended` is the send time of the arrival process (or the user's think time); all latencies count from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    OK = "ok"
    CANCELLED = "cancelled"
    """Cancelled by the client on purpose (the workload's cancel rate)."""
    REFUSED = "refused"
    """Shed before any work: 429, 503, 529."""
    CUT = "cut"
    """The stream ended without its end mark, or too early."""
    TIMEOUT = "timeout"
    ERROR = "error"


class CountedBy(Enum):
    """How the tokens of a chunk were counted, best first."""

    TOKEN_IDS = "token_ids"  # noqa: S105
    USAGE = "usage"
    """Only the answer's total is the server's; it was distributed over the chunks by the length of their text."""
    CHUNKS = "chunks"
    """One token a chunk, without other information."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server's own stage times, in seconds since its worker received the request."""

    prefill: str = ""
    decode: str = ""
    transport: str = ""
    kv_bytes: int = 0
    local_prefill: bool = False
    reserved_s: float = 0.0
    first_token_s: float = 0.0
    kv_complete_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class RequestRecord:
    index: int
    target: str
    intended_s: float
    kind: str = ""
    session: str = ""
    tenant: str = ""
    warmup: bool = False
    sent_s: float = 0.0
    accepted_s: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that carried tokens."""
    chunk_tokens: list[int] = field(default_factory=list)
    end_s: float = 0.0
    outcome: Outcome = Outcome.ERROR
    finish_reason: str = ""
    error: str = ""
    status: int = 0
    """HTTP status or gRPC code; 0: none."""
    input_tokens: int = 0
    wanted_output_tokens: int = 0
    cached_tokens: int | None = None
    counted_by: CountedBy = CountedBy.CHUNKS
    request_id: str = ""
    server: ServerFacts | None = None

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def send_lag_s(self) -> float:
        """Delay of the send by the harness or the concurrency limit."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times[0] - self.intended_s if self.chunk_times else None

    @property
    def e2e_s(self) -> float:
        """To the last token; an answer without tokens: to its end."""
        return (self.chunk_times[-1] if self.chunk_times else self.end_s) - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1); the tokens of the first chunk count as one arrival."""
        if not self.chunk_times:
            return None
        later = self.output_tokens - self.chunk_tokens[0]
        return (self.chunk_times[-1] - self.chunk_times[0]) / later if later > 0 else None

    @property
    def first_gap_s(self) -> float | None:
        """From the first token to the second; under P/D it includes the transfer of the last KV. None when they arrived
        together or there is no second."""
        if len(self.chunk_times) < 2 or self.chunk_tokens[0] != 1:
            return None
        return (self.chunk_times[1] - self.chunk_times[0]) / self.chunk_tokens[1]

    @property
    def queue_s(self) -> float | None:
        """Until the server had capacity for the request, if it reports it."""
        return self.server.reserved_s if self.server else None

    @property
    def prefill_s(self) -> float | None:
        return max(0.0, self.server.first_token_s - self.server.reserved_s) if self.server else None

    @property
    def transfer_s(self) -> float | None:
        """From the first token to the last verified KV, if the server reports it and KV was transferred."""
        if self.server is None or self.server.kv_bytes == 0:
            return None
        return max(0.0, self.server.kv_complete_s - self.server.first_token_s)

    def gaps(self) -> list[tuple[float, int]]:
        """(seconds per token, tokens) for each chunk after the first; a k-token chunk counts as k equal intervals."""
        pairs = zip(self.chunk_times, self.chunk_times[1:], self.chunk_tokens[1:], strict=False)
        return [((after - before) / tokens, tokens) for before, after, tokens in pairs if tokens > 0]


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Distribute `total` tokens over chunks in proportion to `weights` (text lengths): whole numbers, largest
    remainders first, at least one each if there are enough.

    >>> share_out(10, [1, 4, 4]) [2, 4, 4]
    """
    if not weights:
        return []
    if total <= len(weights):
        return [1 if i < total else 0 for i in range(len(weights))]
    spare = total - len(weights)
    mass = sum(weights) or len(weights)
    exact = [spare * (weight if sum(weights) else 1) / mass for weight in weights]
    counts = [int(value) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: spare - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]
