"""Messages between router and workers without one of their parts, or with a name that another one has: each ends typed,
by itself, and its neighbours get the undisturbed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from diptych.common.errors import DiptychError as AnyError
from diptych.rpc.stubs import PrefillStub
from diptych.rpc.v1 import prefill_pb2
from diptych_tests import pd

ATTEMPT_S = 60.0
TYPED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    asyncio.run(pd.start_grpc())


def parts(message: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field that is set, the inner ones, too."""
    for field, value in message.ListFields():
        yield (*path, field.name)
        if field.message_type is not None and hasattr(value, "ListFields"):
            yield from parts(value, (*path, field.name))


def without(message: Any, path: tuple[str, ...]) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    inner = copy
    for name in path[:-1]:
        inner = getattr(inner, name)
    inner.ClearField(path[-1])
    return copy


async def test_a_submission_without_one_of_its_fields() -> None:
    """Each field in turn: an answer or a typed error, at once; the worker serves on."""
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        whole = cluster.submit_message(attempt="whole", prompt=pd.PROMPT)
        wanted = (await router.run(whole)).token_ids
        outcomes = {}
        for number, path in enumerate(parts(whole)):
            if path == ("attempt",):
                continue  # there is nobody to answer: see below
            message = without(whole, path)
            message.attempt = f"a{number}"
            answer = await router.run(message)
            assert isinstance(answer.error, AnyError) or answer.finished is not None, path
            outcomes[".".join(path)] = answer.error
        assert {"prompt_token_ids", "sampling.max_tokens", "placement.decode.incarnation", "remaining_s"} <= {
            name for name, error in outcomes.items() if error is not None
        }, outcomes
        whole.attempt = "again"
        assert (await router.run(whole)).token_ids == wanted
        await cluster.nothing_left()


async def test_a_prefill_request_without_one_of_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decode sends, less one field: an event or a typed status; no block and no slab is left, and decode is served on."""
    sent: list[prefill_pb2.PrefillRequest] = []
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        prefill = cluster.prefill[0]
        sessions = prefill.role.services["prefill"].handoffs
        serve = sessions.serve
        monkeypatch.setattr(sessions, "serve", lambda request: (sent.append(request), serve(request))[1])
        wanted = (await router.run(cluster.submit_message(attempt="a", prompt=pd.PROMPT))).token_ids
        (request,) = sent
        refused = set()
        async with pd.worker_channel(prefill.address) as channel:
            for number, path in enumerate(parts(request)):
                message = without(request, path)
                if path != ("attempt",):
                    message.attempt = f"b{number}/1"
                call = PrefillStub(channel).Prefill(message, timeout=ATTEMPT_S)
                try:
                    first = await call.read()
                except grpc.aio.AioRpcError:
                    first = await call.code()
                    refused.add(".".join(path))
                assert isinstance(first, prefill_pb2.PrefillEvent) or first in TYPED, (path, first)
                call.cancel()
        assert {
            "attempt",
            "prompt_token_ids",
            "sampling.max_tokens",
            "prefill.worker_id",
            "decode",
            "remaining_s",
        } <= refused
        await cluster.decode.engine.reset_cache()
        again = await router.run(cluster.submit_message(attempt="c", prompt=pd.PROMPT))
        assert again.token_ids == wanted
        await cluster.nothing_left()


async def test_two_requests_of_one_name_at_once() -> None:
    """A client's id is a label: both get their own answer, over one router, in the midst of each other."""
    gate = pd.Gate(1)
    async with pd.cluster(prefill=lambda: pd.fake_model(before_execute=gate)) as cluster:
        async with pd.FakeRouter(cluster.decode.address) as router:
            first = cluster.submit_message(attempt="a/1", prompt=pd.PROMPT)
            second = cluster.submit_message(attempt="b/1", prompt=pd.PROMPT[::-1])
            second.request_id = first.request_id
            answers = [router.submit(first), router.submit(second)]
            await gate.wait()
            gate.open()
            for attempt in ("a/1", "b/1"):
                await router.ended(attempt)
            for answer, prompt in zip(answers, (pd.PROMPT, pd.PROMPT[::-1]), strict=True):
                local = await router.run(
                    cluster.submit_message(attempt=f"l{prompt[0]}", prompt=prompt, local=True, local_max=999)
                )
                assert answer.token_ids == local.token_ids
        await cluster.nothing_left()
