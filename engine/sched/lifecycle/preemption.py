"""Which running request is preempted: when blocks run out, when a more important one waits, after a fork beyond
max_num_seqs."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.messages import KvMode
from diptych.engine.sched.batching.policies import Policy
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import Request, State


def choose_victim(needy: Request, running: Iterable[Request], policy: Policy) -> Request:
    """The request to preempt so that `needy` can grow: the last by rank, which may be `needy` itself. PREFILL requests
    never
    grow and are not preempted: their blocks are freed when their ranges are packed."""
    victim, worst = needy, policy.rank(needy)
    for request in running:
        rank = policy.rank(request)
        if rank > worst and request.mode is not KvMode.PREFILL:
            victim, worst = request, rank
    return victim


def grow(live: Lifecycle) -> None:
    """Give each request that needs one a block for its next token, the first by rank first."""
    policy, kv, running = live.policy, live.kv, live.running
    for request in sorted(running.take_growing(), key=policy.rank):
        while request.attempt in running.decoding and kv.needs_block(request) and not kv.grow(request):
            live.preempt(choose_victim(request, running, policy))


def fits(live: Lifecycle, request: Request) -> bool:
    """Could the request be admitted now? Preempted beams are resumed together."""
    beams = live.beams.preempted_with(request)
    if not beams:
        return live.free_slots() > 0 and live.kv.fits(request)
    return live.free_slots() >= len(beams) and live.kv.has_room(blocks_wanted(live, request))


def blocks_wanted(live: Lifecycle, request: Request) -> list[int]:
    """By KV group, at admission, with all the beams that are resumed with it, without what a cache may save."""
    return live.kv.wanted(live.beams.preempted_with(request) or (request,))


def preempt_for_priority(live: Lifecycle) -> None:
    """Let the next waiting request have what running ones of a worse class hold, if that is enough for it."""
    policy, kv = live.policy, live.kv
    while (request := live.waiting.head(may_compute=True)) is not None:
        if not live.adapters.may_run(request):
            _preempt_for_slot(live, request)  # or `head` leaves it out from now on
            continue
        if fits(live, request):
            return
        victims = [r for r in live.running if r.mode is not KvMode.PREFILL and policy.outranks(request, r)]
        if not victims or not kv.has_room(blocks_wanted(live, request), kv.freed_by(victims)):
            return
        live.preempt(max(victims, key=policy.rank))


def _preempt_for_slot(live: Lifecycle, request: Request) -> None:
    """Free the slot that its adapter has claimed, if all that has it may be preempted for the request."""
    slot = live.adapters.claimed_by(request)
    holders = [other for other in live.requests.values() if slot is not None and live.adapters.slot_of(other) == slot]
    if all(
        other.state is State.RUNNING and other.mode is not KvMode.PREFILL and live.policy.outranks(request, other)
        for other in holders
    ):
        for other in holders:
            if other.state is State.RUNNING:  # not preempted with the other beams of its attempt
                live.preempt(other)


def enforce_max_num_seqs(live: Lifecycle) -> None:
    """After a fork more may run than max_num_seqs allows: preempt the last by rank."""
    while live.free_slots() < 0:
        running = (r for r in live.running if r.mode is not KvMode.PREFILL)
        live.preempt(max(running, key=live.policy.rank))


def make_room_for_chunks(live: Lifecycle) -> bool:
    """No prompt that has begun finds a block for its next chunk: window blocks that it counted on stayed with others.
    Preempt the last by rank, unless it is the only one. Returns: whether one was."""
    holders = [request for request in live.running if request.holds_blocks]
    if len(holders) < 2:
        return False
    live.preempt(max(holders, key=live.policy.rank))
    return True
