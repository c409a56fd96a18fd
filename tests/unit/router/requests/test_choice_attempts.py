"""Attempts of an answer's choices, read as one."""

import asyncio

import pytest

from diptych.common.errors import InternalError, WorkerLostError
from diptych.router.requests.choice_attempts import ChoiceAttempts
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


class Part:
    """An attempt whose events a test puts."""

    def __init__(self, name):
        self.id = name
        self.cancelled = False
        self._events = asyncio.Queue()

    def put(self, **event):
        self._events.put_nowait(decode_pb2.Event(attempt=self.id, **event))

    def tokens(self, choice, offset, *ids):
        self.put(tokens=router_pb2.TokenDelta(choice=choice, offset=offset, token_ids=ids), cached_tokens=16)

    def finish(self, reason, count, **more):
        usage = types_pb2.Usage(prompt_tokens=9, completion_tokens=count)
        self.put(end=decode_pb2.End(finished=router_pb2.Finished(finish_reason=reason, usage=usage, **more)))

    def lose(self):
        self._events.put_nowait(WorkerLostError("gone"))

    async def next(self):
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def interrupt(self, error):
        self._events.put_nowait(error)

    def cancel(self):
        self.cancelled = True


class Group:
    def __init__(self, *choices, num_ended_tokens=0):
        self.parts = {choice: Part(f"a{choice}") for choice in choices}
        self.released, self.computed = [], []
        self.whole = ChoiceAttempts(
            self.parts, num_ended_tokens, release=self.released.append, first_tokens=self.computed.append
        )

    async def kinds(self, count):
        return [(await self.whole.next()).WhichOneof("event") for _ in range(count)]


async def test_one_start_the_tokens_of_each_and_one_end():
    group = Group(0, 2, num_ended_tokens=4)
    first, second = group.parts[0], group.parts[2]
    for part in (first, second):
        part.put(accepted=decode_pb2.Accepted())
    assert await group.kinds(1) == ["accepted"]
    second.tokens(2, 3, 7, 8)
    event = await group.whole.next()
    assert (event.tokens.choice, event.tokens.offset, list(event.tokens.token_ids)) == (2, 3, [7, 8])
    assert event.cached_tokens == 0
    assert group.computed == ["a2"]
    second.finish(STOP, 5, stop_token_id=0)
    ended = (await group.whole.next()).choice_finished
    assert (ended.choice, ended.finish_reason, ended.stop_token_id, ended.completion_tokens) == (2, STOP, 0, 5)
    first.tokens(0, 3, 9)
    first.finish(LENGTH, 4)
    assert await group.kinds(2) == ["tokens", "choice_finished"]
    assert group.whole.has_event
    end = (await group.whole.next()).end.finished
    assert (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (LENGTH, 9, 4 + 5 + 4)
    assert group.released == ["a2", "a0"]


async def test_a_lost_worker_fails_all_once_and_what_is_left_is_cancelled():
    group = Group(0, 1)
    group.parts[0].tokens(0, 1, 5)
    assert await group.kinds(1) == ["tokens"]
    for part in group.parts.values():
        part.lose()
    with pytest.raises(WorkerLostError):
        await group.whole.next()
    group.whole.cancel()
    group.whole.cancel()
    assert [part.cancelled for part in group.parts.values()] == [True, True]
    assert group.released == ["a0", "a1"]


async def test_an_interrupted_wait_ends():
    group = Group(0, 1)
    waiting = asyncio.create_task(group.whole.next())
    await asyncio.sleep(0)
    group.whole.interrupt(WorkerLostError("late"))
    with pytest.raises(WorkerLostError, match="late"):
        await waiting
    group.whole.cancel()


async def test_tokens_of_another_choice_are_a_violation():
    group = Group(1)
    group.parts[1].tokens(0, 1, 5)
    with pytest.raises(InternalError, match="choice 0 in place of 1"):
        await group.whole.next()
    group.whole.cancel()


async def test_a_failure_is_passed_on():
    group = Group(1)
    group.parts[1].put(end=decode_pb2.End(failure=types_pb2.Failure(reason="INTERNAL", message="bug")))
    assert (await group.whole.next()).end.failure.message == "bug"
