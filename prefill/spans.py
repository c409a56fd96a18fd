"""A call's span on prefill, derived from its events. See common/observe/tracing.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from diptych.common.errors import DiptychError
from diptych.common.observe.tracing import tracing
from diptych.rpc.v1 import prefill_pb2

Events = AsyncGenerator[prefill_pb2.PrefillEvent, None]


def traced(events: Events, request: prefill_pb2.PrefillRequest, parent: str) -> Events:
    """The same events, within a span if tracing is on. `parent`: the caller's trace context."""
    return _traced(events, request, parent) if tracing.on else events


async def _traced(events: Events, request: prefill_pb2.PrefillRequest, parent: str) -> Events:
    span = tracing.start(
        "prefill",
        kind="server",
        parent=parent,
        attributes={
            "diptych.request_id": request.request_id,
            "diptych.attempt": request.attempt,
            "diptych.worker": request.prefill.worker_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        },
    )
    try:
        async with aclosing(events) as inner:
            async for event in inner:
                match event.WhichOneof("event"):
                    case "started":
                        span.event("started")
                        span.set(diptych__cached_tokens=event.started.cached_tokens)
                    case "first_tokens":
                        span.event("first token")
                        span.set(diptych__compute_s=event.first_tokens.compute_s)
                    case "finished":
                        span.set(diptych__kv_ranges=event.finished.num_ranges)
                yield event
    except DiptychError as error:
        span.fail(error.reason, error.message)
        raise
    finally:
        span.end()
