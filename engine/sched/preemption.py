"""Who gives way, and how: when blocks run out, when a more important request waits, when a fork made too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from diptych.engine.messages import KvMode, Preempted
from diptych.engine.sched.beams import give_up_candidates
from diptych.engine.sched.policies import Policy
from diptych.engine.sched.request import Request, State
from diptych.engine.sched.swap_cost import swap_is_cheaper

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler


def choose_victim(needy: Request, running: Iterable[Request], policy: Policy) -> Request:
    """Whom to preempt so that `needy` can grow: the last by rank, which may be `needy` itself. PREFILL requests never grow
    and are left alone: their blocks go when their ranges are packed."""
    victim, worst = needy, policy.rank(needy)
    for request in running:
        rank = policy.rank(request)
        if rank > worst and request.mode is not KvMode.PREFILL:
            victim, worst = request, rank
    return victim


def grow(scheduler: Scheduler, full: list[Request]) -> None:
    """A block of its own for each one's next token, the first by rank first. Those that do not run any more are passed over."""
    policy, kv = scheduler.policy, scheduler.kv
    full.sort(key=policy.rank)
    for request in full:
        while request.attempt in scheduler.decoding and kv.needs_block(request) and not kv.grow(request):
            preempt(scheduler, choose_victim(request, scheduler.running(), policy))


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Its blocks go, and those of its attempt's other beams; KV is kept in the host tier where that is cheaper than computing
    it again."""
    beams = list(request.beams.members.values()) if request.beams is not None else [request]
    for beam in beams:
        if beam.state is State.RUNNING:
            _preempt_one(scheduler, beam)


def waiting_beams(request: Request) -> list[Request]:
    """All preempted beams of its attempt, if it is one: they are admitted together."""
    if request.beams is None or request.state is not State.PREEMPTED:
        return []
    return [beam for beam in request.beams.members.values() if beam.state is State.PREEMPTED]


def _preempt_one(scheduler: Scheduler, request: Request) -> None:
    scheduler.decoding.pop(request.attempt, None)
    scheduler.prefilling.pop(request.attempt, None)
    scheduler.held.pop(request.attempt, None)
    give_up_candidates(request)
    num_tokens = request.num_computed
    if _goes_to_host(scheduler, request):
        scheduler.swaps += 1
        way_back_s = scheduler.rates.restore_s(num_tokens)
    else:
        scheduler.kv.free(request)
        request.num_computed = 0
        way_back_s = scheduler.rates.recompute_s(num_tokens)
    request.move(State.PREEMPTED)
    scheduler.waiting.push_returned(request)
    scheduler.preemptions += 1
    if request.may_be_refetched and scheduler.config.preemption_mode == "auto":
        scheduler.events.append(Preempted(request.public, num_tokens, way_back_s))


def _goes_to_host(scheduler: Scheduler, request: Request) -> bool:
    mode = scheduler.config.preemption_mode
    if mode == "recompute" or not scheduler.config.num_host_blocks:
        return False
    worth = mode == "swap" or swap_is_cheaper(request.num_computed, scheduler.rates)
    return worth and scheduler.kv.swap_out(request)


def preempt_for_priority(scheduler: Scheduler) -> None:
    """Let the next waiting request have what running ones of a worse class hold, if that is enough for it."""
    policy, kv = scheduler.policy, scheduler.kv
    while (request := scheduler.waiting.head(may_compute=True)) is not None:
        if scheduler.fits(request):
            return
        victims = [r for r in scheduler.running() if r.mode is not KvMode.PREFILL and policy.outranks(request, r)]
        held = Counter(block for victim in victims for block in victim.block_ids)
        gain = sum(kv.pool.refs(block) == count for block, count in held.items())
        if not victims or scheduler.blocks_wanted(request) > kv.pool.available + gain:
            return
        preempt(scheduler, max(victims, key=policy.rank))


def enforce_max_num_seqs(scheduler: Scheduler) -> None:
    """After a fork more run than max_num_seqs allows: the last by rank wait."""
    while scheduler.free_slots() < 0:
        running = (r for r in scheduler.running() if r.mode is not KvMode.PREFILL)
        preempt(scheduler, max(running, key=scheduler.policy.rank))
