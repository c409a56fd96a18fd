"""One step's share of the requests, and who gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.engine.messages import KvMode, ScheduledSeq
from diptych.engine.sched.request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `seqs` goes to the runner; `requests` is aligned with it; the first `num_decode` of both are decoding."""

    seqs: list[ScheduledSeq] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_decode: int = 0
    num_prefill_tokens: int = 0


def choose_victim(needy: Request, running: Iterable[Request]) -> Request:
    """Whom to preempt so that `needy` can grow: the youngest, which may be `needy` itself.

    So the oldest request always goes on, and everybody is the oldest one day. PREFILL requests never grow and are left alone:
    their blocks go when their ranges are packed.
    """
    victim = needy
    for request in running:
        if request.arrival > victim.arrival and request.mode is not KvMode.PREFILL:
            victim = request
    return victim
