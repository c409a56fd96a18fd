"""Blocks that are packed for another worker, by their keys, from whichever tier has them.

    PublishCached --none are in files--> publish_cached: pinned, those of the host tier copied -> packed
       | plan_source: pinned, those of the host tier copied, room for those in files reserved
       | read, and unpacked as a pull's ranges (RemoteRequests)
       +--> publish_source: as far as they have come -> packed

Copies of lower tiers' blocks do not enter the prefix cache: a source knows neither the tokens nor the tenant of a key.
"""

from __future__ import annotations

from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.common.tiers import DEVICE
from diptych.engine.messages import Admitted, EngineRequest, KvMode, PrefillComplete, PublishCached
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.lifecycle.restores import LEAST_S, Restore
from diptych.engine.sched.lifecycle.swap_cost import Rates, restore_is_cheaper
from diptych.engine.sched.requests.request import Request, State


def publish_cached(live: Lifecycle, command: PublishCached, header: IdentityHeader, arrival: int, now: float) -> None:
    """Pin the leading blocks that are cached, of each KV group what the token behind them sees, and offer those that the
    peer does not have for packing. Those of the host tier that follow are copied, as many as there is room for."""
    kv = live.kv
    cached = kv.num_cached_blocks(command.keys)
    slots = kv.stored_behind(command.keys, cached)
    if (cached + len(slots)) * kv.block_size <= command.cached_tokens:
        live.outbox.add(Admitted(command.attempt, cached * kv.block_size))
        live.outbox.add(PrefillComplete(command.attempt))
        return
    end = cached + len(slots)
    request = _request(live, command, end, header, arrival, now)
    there = kv.adopt(request, command.keys[:end], cached, slots)
    assert there, "there was room"
    if slots:
        request.tier_tokens[kv.host.name] = len(slots) * kv.block_size
    _announce(live, request)
    live.enter_computed(request)


def plan_source(
    live: Lifecycle, command: PublishCached, header: IdentityHeader, arrival: int, now: float, rates: Rates
) -> Restore | None:
    """Blocks in files that another worker asks for. None: there are none behind those of the other tiers, or the reader has them,
    or computing is faster, or there is no room.

    Args: rates: those of the disk."""
    kv, keys, size = live.kv, command.keys, live.block_size
    if not (kv.caches and kv.disk.num_held and rates.copy_bytes_per_s):
        return None
    cached = kv.num_cached_blocks(keys)
    slots = kv.stored_behind(keys, cached)
    first = cached + len(slots)
    blocks = tuple(kv.disk.run(keys[first:]))
    end = first + len(blocks)
    if not blocks or end * size <= command.cached_tokens or not restore_is_cheaper(len(blocks) * size, rates):
        return None
    request = _request(live, command, end, header, arrival, now)
    if not kv.adopt(request, keys[:end], cached, slots):
        return None
    if slots:
        request.tier_tokens[kv.host.name] = len(slots) * size
    live.enter_pull(request)
    limit_s = max(LEAST_S, rates.recompute_s(len(blocks) * size))
    return Restore(command.attempt, blocks, first * size, limit_s, arrival, tuple(request.seq.first_blocks))


def publish_source(live: Lifecycle, command: PublishCached) -> bool:
    """What was planned has been read, or as much of it as will be, and is packed. False: it is not, and the attempt has ended
    here; what is cached may still be published."""
    request, size = live.remote.pull(command.attempt), live.block_size
    if request is None:
        return True  # it was cancelled, or has failed
    first, until = request.num_computed, live.remote.arrived_until(request)
    whole = until == request.kv_target
    if not whole and (until <= command.cached_tokens or live.kv.slides or live.kv.num_groups > 1):
        live.end(request, State.FINISHED_HANDED_OFF)
        return False
    if whole:
        live.remote.set_complete(request)
    live.remote.remove(request)
    live.kv.bind(request)
    request.kv_target = request.num_computed = until
    request.num_published = until // size
    if until > first:
        request.tier_tokens[live.kv.disk.name] = until - first
    _announce(live, request)
    live.offer_computed(request)
    return True


def _request(
    live: Lifecycle, command: PublishCached, num_blocks: int, header: IdentityHeader, arrival: int, now: float
) -> Request:
    # Its tokens are not known here, and not needed: nothing is computed from them, and the blocks have their keys.
    source = EngineRequest(
        command.attempt,
        Prompt((0,) * (num_blocks * live.block_size)),
        SamplingParams(max_tokens=1),
        mode=KvMode.PREFILL,
        decode_cached_tokens=command.cached_tokens,
        peer=command.peer,
        ranks=command.ranks,
    )
    request = Request(source, arrival, header, live.limits.max_model_len, None, now, live.kv.num_groups)
    request.was_admitted = True
    return request


def _announce(live: Lifecycle, request: Request) -> None:
    live.outbox.add(Admitted(request.attempt, request.num_computed, tuple(request.tier_tokens.items())))
    left, served = request.num_computed - request.source.decode_cached_tokens, live.outbox.totals.served
    for tier, count in (
        *reversed(request.tier_tokens.items()),
        (DEVICE, request.num_computed),
    ):  # the farthest has the end
        part = min(left, count)
        left -= part
        served[tier] = served.get(tier, 0) + part
