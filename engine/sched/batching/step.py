"""One step's share of the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.engine.messages import ScheduledSeq
from diptych.engine.sched.requests.request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `seqs` goes to the runner; `requests` is aligned with it; the first `num_decode` of both are decoding.

    Args:
        num_draft_tokens: guesses in the decoding rows.
        num_prefill_tokens: tokens of the other rows.
        sources: of a step that was planned ahead, see ModelRunner.launch; empty: every token is known.
        ends_prompt: the step computes the last token of a prompt.
        num_filled: tokens scheduled after that one, of prompts that it does not end.
    """

    seqs: list[ScheduledSeq] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_decode: int = 0
    num_draft_tokens: int = 0
    num_prefill_tokens: int = 0
    sources: list[int] = field(default_factory=list)
    ends_prompt: bool = False
    num_filled: int = 0
