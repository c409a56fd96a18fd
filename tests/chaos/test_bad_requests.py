"""Requests that a worker cannot compute, and messages between router and workers without one of their parts: each ends
typed, by itself, and its neighbours get the undisturbed answer."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.client import DiptychError
from diptych.common.errors import DiptychError as AnyError
from diptych.rpc.stubs import PrefillStub
from diptych.rpc.v1 import prefill_pb2
from diptych_tests import pd
from diptych_tests.fake_model_cluster import POISON, ask, check, fake_model_cluster

needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")
ATTEMPT_S = 60.0
TYPED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    asyncio.run(pd.start_grpc())


@pytest.mark.multiproc
@needs_ucx
async def test_logits_that_are_no_numbers_end_their_request_alone(tmp_path: Path) -> None:
    """On prefill and on decode, amid others that share its steps; nothing of it is cached, and no worker counts as faulty."""
    async with fake_model_cluster(tmp_path, fake={"poison": POISON}) as cluster, cluster.client() as client:
        for local in (0, 2**31 - 1):
            bad = ask(50)
            bad["token_ids"][100] = POISON
            asks = [ask(number + local % 7) for number in range(6)]
            running = [asyncio.create_task(client.generate(**a, local_prefill_max_tokens=local)) for a in asks]
            for _ in range(2):
                with pytest.raises(DiptychError, match="logits"):
                    await client.generate(**bad, local_prefill_max_tokens=local)
            for asked, answer in zip(asks, await asyncio.gather(*running), strict=True):
                check(answer, asked)
            good = bad | {"token_ids": [*bad["token_ids"][:100], 5, *bad["token_ids"][101:]]}
            answer = await client.generate(**good, local_prefill_max_tokens=local)
            check(answer, good)
            await cluster.idle_again()
        assert await cluster.usable() == {"prefill-0", "decode-0"}


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
