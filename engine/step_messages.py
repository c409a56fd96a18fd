"""What crosses between the scheduler and the model runner: plain structs. `engine.messages` exports them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from diptych.common.sampling import SamplingParams, TokenLogprobs
from diptych.engine.grammar.program import Program

UNKNOWN_TOKEN = -1
"""In ScheduledSeq.token_ids: the token is being drawn by the step before, see engine.runner.ModelRunner.launch."""


class LoadedAdapter(Protocol):
    """A LoRA adapter in host memory, in the form of the runner that read it. Immutable."""

    @property
    def id(self) -> str:
        """See common/adapters."""
        ...

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        ...

    @property
    def num_parts(self) -> int:
        """Into which its installation may be divided, of about the same size each."""
        ...


@dataclass(frozen=True, slots=True)
class Install:
    """Copy some parts of an adapter into a slot."""

    slot: int
    adapter: LoadedAdapter
    parts: range

    @property
    def num_bytes(self) -> int:
        return self.adapter.num_bytes * len(self.parts) // self.adapter.num_parts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that a beam may go on with. `score`: what it adds to the beam's; `logprobs`: only if they were requested."""

    token_id: int
    score: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ComputedFrom:
    """What a sequence's KV, and so what was drawn behind it, was computed from.

    Args:
        num_tokens: from the sequence's first token on.
        digest: common.text.prompt_digest of them, by blocks of `block_size`.
    """

    num_tokens: int
    digest: bytes
    block_size: int


class CopyKind(Enum):
    FORK = "fork"
    """Block to block of the pool."""
    TO_HOST = "to_host"
    FROM_HOST = "from_host"

    @property
    def tiers(self) -> tuple[str, str]:
        """Of the source and of the target. A kind that is not listed copies nothing: KeyError, never pool to pool."""
        return _TIERS_OF_COPY[self.value]


_TIERS_OF_COPY = {"fork": ("device", "device"), "to_host": ("device", "host"), "from_host": ("host", "device")}


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block of KV group `group`. src, dst: a block of its pool or a slot of the host tier, as `kind`
    says."""

    kind: CopyKind
    src: int
    dst: int
    group: int = 0


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's share of a step. The same object comes again in the sequence's later steps.

    With drafts the row verifies guesses. After its last known token, at `start`, come `num_drafts` guesses of the
    tokens that follow; the token drawn at each position is compared with the guess behind it:

        token_ids    known   guess 1   guess 2   guess 3
        drawn          a        b         c
        accepted: a; b if a == guess 1; c if also b == guess 2; and so on. Each with the counter that plain decoding
        uses.

    Args:
        token_ids: the tokens to compute, at positions start, start + 1, ...; the last num_drafts are guesses.
        block_tables: by KV group, as in KvFormat.groups, block ids of this sequence. Index i of group g's table holds
            tokens [(first_blocks[g] + i) * block_size, ...); each table reaches to start + len(token_ids) at least.
        first_blocks: by group, blocks in front of its table: they are behind the window, and may belong to others. So
            may leading ones of the table that the token at `start` does not see, once the step in front has landed:
            a runner reads from KvGroup.first_needed(start) on.
        sample: draw a token from the last position's logits; with drafts also from those in front of each guess.
        output_index: index of the first drawn token among the outputs (the counter of the draw).
        num_drafts: len(token_ids) - 1 in a row with drafts; 0: no token is a guess. With drafts num_draws is 1, and
            num_candidates 0.
        choice: number of the choice; enters the draw.
        num_draws: tokens to draw, for choices choice, choice + 1, ...
        num_candidates: of a beam: instead of drawing, find so many of the likeliest tokens; 0: draw.
        top_logprobs: with the drawn token its logprobs and so many of the likeliest; None: none.
        history: prompt and outputs so far, only if the draw depends on them; the first num_prompt are the prompt.
        prompt_targets: row i's logits yield the logprob of prompt_targets[i], a prompt token.
        grammar: what may be drawn, by `history`; None: anything.
        adapter: slot of its adapter, see ModelRunner.install_adapter; -1: none. Linear layers read it, see StepRows.
        vouch: the result says what all its tokens so far were computed from.
        memo: state of the sampler, kept between steps; None: it is rebuilt from `history`. Does not leave the process.
    """

    attempt: str
    token_ids: list[int]
    start: int
    block_tables: tuple[list[int], ...]
    sample: bool
    sampling: SamplingParams
    output_index: int
    first_blocks: tuple[int, ...] = (0,)
    num_drafts: int = 0
    choice: int = 0
    num_draws: int = 1
    num_candidates: int = 0
    top_logprobs: int | None = None
    history: Sequence[int] | None = None
    num_prompt: int = 0
    prompt_targets: Sequence[int] = ()
    grammar: Program | None = None
    adapter: int = -1
    vouch: bool = False
    memo: object | None = None


@dataclass(slots=True)
class StepResult:
    """Aligned with the step's sequences.

    Args:
        token_ids: the accepted tokens: one without drafts, 1 to 1 + num_drafts with them; empty where none was requested
            or the row is bad or refused. A draw behind the first one that is bad or refused ends the row in front
            of it: the next step finds the same at its first position.
        logprobs: index of a sequence with top_logprobs -> an entry for each of its accepted tokens.
    """

    token_ids: list[tuple[int, ...]]
    bad_rows: dict[int, str] = field(default_factory=dict)
    """Index of the sequence -> why its logits cannot be used (NaN, Inf). Neighbours are untouched."""
    refused_rows: dict[int, str] = field(default_factory=dict)
    """Index of the sequence -> why its parameters leave no token to draw."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    more_draws: dict[int, list[tuple[int, TokenLogprobs | None]]] = field(default_factory=dict)
    """Index of a sequence with num_draws > 1 -> the draws of its other choices."""
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    """Index of a sequence with num_candidates -> the likeliest tokens that nothing forbids, best first; maybe none."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    computed_from: dict[int, ComputedFrom] = field(default_factory=dict)
    """Index of a sequence with `vouch` -> the tokens of the rows that its KV was computed in; missing: not known."""
