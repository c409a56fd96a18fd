"""Blocks that come back from files before their request is queued: which, and whether that is faster than computing them.

    EngineRequest --blocks in files, room for them--> plan_restore: the cached blocks are pinned, the missing ones reserved
       |             read, and unpacked as a pull's ranges (RemoteRequests)
       |             end_restore: the leading blocks that are there enter the prefix cache, all are released
       +--> Scheduler.add: the request finds a hit, or none

As with a pull, what happens to a restore changes no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.block_identity import BlockHasher, IdentityHeader
from diptych.common.kv_groups import hit_end
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.disk_messages import DiskBlock
from diptych.engine.messages import EngineRequest, KvMode
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.lifecycle.pulls import NewBlocks, finish_pull
from diptych.engine.sched.lifecycle.swap_cost import Rates, restore_is_cheaper
from diptych.engine.sched.requests.request import Request

LEAST_S = 0.05
"""No restore is given up before."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The attempt `name` waits for `blocks`, which hold its tokens from `first_token` on.

    Args:
        limit_s: to compute them.
        use: number of the request.
        needed_from: by KV group, the first block that is wanted: not what is behind the window at the end of the blocks.
    """

    name: str
    blocks: tuple[DiskBlock, ...]
    first_token: int
    limit_s: float
    use: int
    needed_from: tuple[int, ...]


def plan_restore(
    live: Lifecycle, wanted: EngineRequest, header: IdentityHeader, arrival: int, now: float, rates: Rates
) -> Restore | None:
    """None: nothing that the request needs is in files alone, or computing it is faster, or there is no room. In a shared store
    anything may be: what is not there shows when it is read.

    Args: rates: those of the disk."""
    kv, size = live.kv, live.block_size
    tokens = (*wanted.prompt.token_ids, *wanted.output_token_ids)
    limit = hit_end(size, len(tokens)) // size
    if (
        not (limit and kv.caches and rates.copy_bytes_per_s)
        or not (kv.disk.num_held or kv.disk.is_shared)
        or wanted.sampling.prompt_logprobs is not None
    ):
        return None
    if len(tokens) > live.limits.max_model_len:
        return None  # it will be refused
    hasher = BlockHasher(header)
    hasher.update(tokens[:size])
    # What others may have written is asked for where it is computed: it would delay the first token that prefill sends.
    computes_it = wanted.mode is not KvMode.REMOTE or len(tokens) <= wanted.own_tokens
    looks = kv.disk.is_shared and computes_it
    known = kv.disk.run(hasher.keys) or kv.pool.cached_block(hasher.keys[0]) is not None or kv.host.find(hasher.keys)
    if not known and not looks:
        return None  # most prompts that are new end here
    hasher.update(tokens[size : limit * size])
    keys = hasher.keys
    first = kv.num_cached_blocks(keys)
    first += len(kv.host.find(keys[first:]))

    def there(begin: int, end: int) -> list[DiskBlock]:
        return kv.disk.may_have(keys[begin:end], begin, wanted.tenant) if looks else kv.disk.run(keys[begin:end])

    end = first + len(there(first, limit))
    if end == first or not restore_is_cheaper((end - first) * size, rates):
        return None
    if wanted.mode is KvMode.REMOTE and len(tokens) - end * size > wanted.own_tokens:
        return None  # what a prefill worker sends does not delay the first token
    source = EngineRequest(
        f"{wanted.attempt}\0disk",
        Prompt(tokens[: end * size], wanted.prompt.cache_salt, wanted.prompt.adapter),
        SamplingParams(max_tokens=1),
        mode=KvMode.REMOTE,
        tenant=wanted.tenant,
    )
    request = Request(source, arrival, header, live.limits.max_model_len, None, now, kv.num_groups)
    request.seq.vouch = wanted.mode is KvMode.PREFILL
    if not kv.admit(request, reserve=True, is_use=False):
        return None
    request.was_admitted = True
    kv.disk.used(keys[:end], arrival)  # they are not evicted while they are read
    live.enter_pull(request)
    start = request.num_computed // size  # earlier than `first` where the host tier's blocks are not worth their copy
    blocks = tuple(there(start, end))
    limit_s = max(LEAST_S, rates.recompute_s(len(blocks) * size))
    return Restore(request.attempt, blocks, start * size, limit_s, arrival, tuple(request.seq.first_blocks))


def end_restore(live: Lifecycle, name: str) -> tuple[int, NewBlocks | None]:
    """Returns: tokens whose KV has come back, and what is to be recorded of it."""
    request = live.remote.pull(name)
    if request is None:
        return 0, None
    return finish_pull(live, request)
