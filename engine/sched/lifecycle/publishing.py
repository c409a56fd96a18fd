"""Blocks of the prefix cache that are packed for another worker, by their keys."""

from __future__ import annotations

from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import Admitted, EngineRequest, KvMode, PrefillComplete, PublishCached
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import Request


def publish_cached(live: Lifecycle, command: PublishCached, header: IdentityHeader, arrival: int, now: float) -> None:
    """Pin the leading blocks that are cached, of each KV group what the token behind them sees, and offer those that the
    peer does not have for packing. Blocks of the host tier are not looked at."""
    kv = live.kv
    num_blocks = kv.num_cached_blocks(command.keys)
    num_tokens = num_blocks * kv.block_size
    live.outbox.add(Admitted(command.attempt, num_tokens))
    if num_tokens <= command.cached_tokens:
        live.outbox.add(PrefillComplete(command.attempt))
        return
    # Its tokens are not known here, and not needed: nothing is computed from them, and the blocks have their keys.
    source = EngineRequest(
        command.attempt,
        Prompt((0,) * num_tokens),
        SamplingParams(max_tokens=1),
        mode=KvMode.PREFILL,
        decode_cached_tokens=command.cached_tokens,
        peer=command.peer,
        ranks=command.ranks,
    )
    request = Request(source, arrival, header, live.limits.max_model_len, None, now, kv.num_groups)
    kv.adopt(request, command.keys[:num_blocks])
    request.was_admitted = True
    live.enter_computed(request)
