"""Blocks that come from another worker's prefix cache into this one's (docs/decisions/kv-pulls.md).

PullBlocks --nothing missing, or no room--> Pulled
   | PullStarted: the cached blocks are pinned, the missing ones reserved
   | ranges are unpacked as those of a REMOTE request (RemoteRequests)
EndPull -> the leading blocks that are there enter the cache, all are released -> Pulled
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.block_identity import IdentityHeader
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import EngineRequest, KvMode, PullBlocks, Pulled, PullStarted
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import Request, State


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """What a pull has brought, for engine.provenance: the sequence's blocks of the first KV group from `first_block` on; those
    from `first_new` on hold new KV."""

    table: tuple[int, ...]
    first_block: int
    first_new: int
    token_ids: tuple[int, ...]


def begin_pull(live: Lifecycle, command: PullBlocks, header: IdentityHeader, arrival: int, now: float) -> None:
    kv, num_tokens = live.kv, len(command.prompt.token_ids)
    source = EngineRequest(
        command.attempt, command.prompt, SamplingParams(max_tokens=1), mode=KvMode.REMOTE, tenant=command.tenant
    )
    request = Request(source, arrival, header, live.limits.max_model_len, None, now, kv.num_groups)
    request.seq.vouch = command.vouch
    keys = request.keys(num_tokens // kv.block_size)
    cached = kv.num_cached_blocks(keys) * kv.block_size
    why = ""
    if not num_tokens or num_tokens % kv.block_size or num_tokens >= live.limits.max_model_len:
        why = f"{num_tokens} tokens are no whole blocks of a context of {live.limits.max_model_len}"
    elif not kv.caches:
        why = "prefix caching is off"
    elif cached < num_tokens and not kv.admit(request, reserve=True, is_use=False):
        why = "no free blocks"
    if why or cached == num_tokens:
        live.outbox.add(Pulled(command.attempt, cached, note=why))
        return
    request.was_admitted = True
    live.enter_pull(request)
    live.outbox.add(PullStarted(command.attempt, request.num_computed, tuple(keys)))


def end_pull(live: Lifecycle, attempt: str) -> NewBlocks | None:
    """Returns: what is new, if what it was computed from is to be recorded."""
    request = live.remote.pull(attempt)
    if request is None:
        return None
    num_new, new = finish_pull(live, request)
    live.outbox.totals.pulled += num_new
    live.outbox.add(Pulled(attempt, request.num_computed, num_new))
    return new


def finish_pull(live: Lifecycle, request: Request) -> tuple[int, NewBlocks | None]:
    """The leading blocks that are there enter the prefix cache, and all are released. Returns: tokens that are new, and what is
    new, if what it was computed from is to be recorded."""
    first, until = request.num_computed, live.remote.arrived_until(request)
    if until == request.kv_target:
        live.remote.set_complete(request)
    live.remote.remove(request)
    live.kv.bind(request)
    new = None
    if until > first and request.seq.vouch:
        size, begin = live.block_size, request.seq.first_blocks[0]
        # Now: what slides behind the window below is in the cache, and a hit of a shorter prompt.
        table = tuple(request.block_ids[: until // size - begin])
        new = NewBlocks(table, begin, first // size, tuple(request.token_ids[:until]))
    request.num_computed = until
    live.kv.advance(request)
    live.end(request, State.FINISHED_HANDED_OFF)
    return until - first, new
