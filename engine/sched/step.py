"""One step's share of the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.engine.messages import ScheduledSeq
from diptych.engine.sched.request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `seqs` goes to the runner; `requests` is aligned with it; the first `num_decode` of both are decoding.

    `sources`: of a step that was planned ahead, see AsyncModelRunner.launch; empty: every token is known.
    `ends_prompt`: some prompt is computed after it; `num_filled`: tokens behind that of prompts which are not."""

    seqs: list[ScheduledSeq] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_decode: int = 0
    num_prefill_tokens: int = 0
    sources: list[int] = field(default_factory=list)
    ends_prompt: bool = False
    num_filled: int = 0
