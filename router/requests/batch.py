"""Several prompts in one request: each is a separate request, and their events are one stream in which choice j of
prompt i has the number i * n + j.

    accept every one (nothing is sent before) --> events of all, as they arrive --> one end, with the usage of all
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from diptych.router.api.interface import RouterApi, accepted
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)

MAX_PROMPTS = 64
_MAX_AHEAD = 256
"""Most events waiting for the client; beyond it, reading of all answers pauses."""


@asynccontextmanager
async def all_accepted(
    router_api: RouterApi, requests: Sequence[ValidatedRequest]
) -> AsyncIterator[tuple[None, AsyncIterator[GenerateEvent]]]:
    """(None, the events after all starts), as `accepted` has them for one request; leaving the block cancels the rest.
    Raises: the DiptychError with which the first of them failed before a decode worker had accepted it."""
    starts: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in requests]
    events: asyncio.Queue[tuple[int, GenerateEvent | BaseException]] = asyncio.Queue(_MAX_AHEAD)

    async def run(number: int, request: ValidatedRequest) -> None:
        try:
            async with accepted(router_api, request) as (_, answer):
                starts[number].set_result(None)
                async for event in answer:
                    await events.put((number, event))
        except Exception as error:
            if starts[number].done():
                await events.put((number, error))
            else:
                starts[number].set_exception(error)

    tasks = [asyncio.create_task(run(i, request)) for i, request in enumerate(requests)]
    try:
        await asyncio.gather(*starts)
        yield None, _merged(requests, events)
    finally:
        for waiting in (*tasks, *starts):
            waiting.cancel()
        await asyncio.gather(*tasks, *starts, return_exceptions=True)


async def _merged(
    requests: Sequence[ValidatedRequest], events: asyncio.Queue[tuple[int, GenerateEvent | BaseException]]
) -> AsyncIterator[GenerateEvent]:
    ends: dict[int, FinishedEvent] = {}
    ended: set[int] = set()
    while len(ends) < len(requests):
        number, event = await events.get()
        first = number * requests[number].sampling.n
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, TokenEvent):
            yield replace(event, choice=first + event.choice)
        elif isinstance(event, ChoiceFinishedEvent):
            ended.add(first + event.choice)
            yield replace(event, choice=first + event.choice)
        elif isinstance(event, PromptLogprobsEvent):
            yield replace(event, prompt=number)
        elif isinstance(event, FinishedEvent):
            ends[number] = event
            for choice in range(first, first + requests[number].sampling.n):
                if choice not in ended:
                    yield ChoiceFinishedEvent(choice, event.reason, event.stop_string, event.stop_token_id)
    usages = [ends[i].usage for i in sorted(ends)]
    total = UsageInfo(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
    yield replace(ends[0], usage=total)
