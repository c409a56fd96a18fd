"""Requests that an operator moves to another decode worker, by `diptych move`."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from diptych.cli.main import build_app
from diptych.cli.operator_calls import ask
from diptych.cli.router_access import RouterAccess
from diptych.common.errors import AuthenticationError, DiptychError, InvalidRequestError, NoWorkerError, OverloadedError
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.requests.messages import FinishedEvent, StartedEvent, TokenEvent, UncheckedRequest
from diptych.router.server import ApiServers
from diptych.rpc.operator import operator_key
from diptych.rpc.v1 import router_pb2

NUM_TOKENS, AT = 8, 3


@pytest.fixture
async def router(fleet, tmp_path):
    """(the fleet with the workers d0, which holds an answer, and d1; how to reach its router, which requires keys)"""
    await fleet.add("p0", "prefill")
    await fleet.add("d0", request_fields=("choice",))
    await fleet.until_ready()
    add_key(tmp_path / "keys.json", "a", now=0.0)
    keys = Authenticator(tmp_path / "keys.json", now=lambda: 0.0)
    servers = ApiServers("127.0.0.1", 0, 0, keys=keys, operator_key=operator_key(fleet.secret))
    frontend = fleet.frontend
    at = await servers.start(frontend, frontend.metrics, frontend.status, frontend.budgets, frontend.move_request)
    yield fleet, RouterAccess(at.grpc)
    await servers.stop(0.1)


async def begun(fleet, **changes):
    """An answer that is held at token AT, by d0."""
    worker = next(worker for worker in fleet.workers if worker.worker_id == "d0")
    worker.hold_from = AT
    spec = {"token_ids": [1] * 20, "sampling": {"max_tokens": NUM_TOKENS}, "explain": True, "tenant": "a"} | changes
    n = spec["sampling"].get("n", 1)
    request = await fleet.frontend.prepare(UncheckedRequest(**spec))
    events = fleet.frontend.generate(request)
    seen = [await anext(events)]
    while sum(len(e.token_ids) for e in seen if isinstance(e, TokenEvent)) < AT * n:
        seen.append(await anext(events))
    return request.request_id, seen, asyncio.create_task(rest_of(events))


async def rest_of(events):
    async with asyncio.timeout(60):
        return [event async for event in events]


async def moved(router, request_id, to="", secret=None):
    fleet, access = router
    request = router_pb2.MoveRequest(request_id=request_id, to=to)
    key = fleet.secret if secret is None else secret
    return await asyncio.to_thread(ask, access, key, "Move", request, router_pb2.MoveResponse)


def words(events, choice=0):
    return [t for e in events if isinstance(e, TokenEvent) and e.choice == choice for t in e.token_ids]


@pytest.mark.parametrize(("to", "n"), [("", 1), ("d2", 1), ("", 2)])
async def test_the_stream_goes_on_at_another_worker(router, to, n) -> None:
    fleet, _ = router
    request_id, seen, rest = await begun(fleet, request_id="my-label", sampling={"max_tokens": NUM_TOKENS, "n": n})
    first = fleet.workers[1]
    for name in ("d1", "d2"):
        await fleet.add(name, request_fields=("choice",))
    await fleet.until_ready(decode=3)
    answer = await moved(router, "my-label", to)
    assert (answer.before, answer.num_tokens) == ("d0", AT * n)
    assert answer.after == (to or answer.after) in ("d1", "d2")
    await fleet.until(lambda: first.cancels == [first.submits[0].attempt])
    whole = seen + await rest
    assert isinstance(whole[0], StartedEvent)
    for choice in range(n):
        assert words(whole, choice) == [10 * choice + i for i in range(NUM_TOKENS)]
    assert isinstance(whole[-1], FinishedEvent)
    assert whole[-1].usage.completion_tokens == NUM_TOKENS * n
    why = whole[-1].explanation
    assert [(a.decode, a.num_tokens, a.failure) for a in why.attempts] == [
        ("d0", AT * n, "moved by operator"),
        (answer.after, 0, ""),
    ]
    assert fleet.frontend.metrics.totals()["migrations"] == {"MOVED_BY_OPERATOR,moved": 1.0}
    assert fleet.frontend._cluster.breakers.state("d0", 0.0).value == "closed"
    assert fleet.no_reservations()
    with pytest.raises(InvalidRequestError, match="has ended: finished"):
        await moved(router, request_id)


async def test_as_often_as_an_operator_likes(router) -> None:
    """Without a token between them: such moves do not count."""
    fleet, _ = router
    request_id, seen, rest = await begun(fleet)
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    first = fleet.workers[1]
    second.hold_from = AT
    for number in range(8):
        answer = await moved(router, request_id)
        assert (answer.before, answer.after) == (("d0", "d1") if number % 2 == 0 else ("d1", "d0"))
    first.go.set()
    first.hold_from = -1
    whole = seen + await rest
    assert words(whole) == list(range(NUM_TOKENS))
    assert len(whole[-1].explanation.attempts) == 9


async def test_what_cannot_move_says_why_and_goes_on(router) -> None:
    fleet, _ = router
    request_id, seen, rest = await begun(fleet)
    for wrong, error, text in (
        (("req-unknown", ""), InvalidRequestError, "no recent request with that id"),
        ((request_id, ""), NoWorkerError, "no worker can serve this request"),
        ((request_id, "d0"), InvalidRequestError, "runs on d0 already"),
        ((request_id, "d7"), InvalidRequestError, "'d7' is not a usable decode worker; there are: d0"),
        ((request_id, "p0"), InvalidRequestError, "not a usable decode worker"),
    ):
        with pytest.raises(error, match=text) as refused:
            await moved(router, *wrong)
        assert refused.value.param in ("request_id", "to", None)
    failing, _, other = await begun(fleet, failure_policy="fail")
    await fleet.add("d1")
    await fleet.until_ready(decode=2)
    with pytest.raises(InvalidRequestError, match="failure_policy forbids"):
        await moved(router, failing)
    for worker in fleet.workers[1:]:
        worker.go.set()
    assert words(seen + await rest) == list(range(NUM_TOKENS))
    await other
    assert fleet.workers[2].submits == []


async def test_a_worker_that_refuses_the_move_is_passed_by(router) -> None:
    fleet, _ = router
    request_id, seen, rest = await begun(fleet)
    full = await fleet.add("d1")
    full.refuse = OverloadedError("full")
    await fleet.add("d2")
    await fleet.until_ready(decode=3)
    answer = await moved(router, request_id, "d1")
    assert answer.after == "d2"
    assert words(seen + await rest) == list(range(NUM_TOKENS))


async def test_only_the_cluster_secret_makes_an_operator(router, tmp_path) -> None:
    fleet, access = router
    request_id, seen, rest = await begun(fleet)
    await fleet.add("d1")
    await fleet.until_ready(decode=2)
    with pytest.raises(AuthenticationError, match="cluster secret"):
        await moved(router, request_id, secret=bytes(32))
    assert not fleet.workers[2].submits
    told = CliRunner().invoke(build_app("move"), ["move", request_id, "--address", access.address])
    assert "secret_file" in str(told.exception)
    command = ["move", request_id, "--address", access.address, "--secret-file", str(tmp_path / "secret")]
    done = await asyncio.to_thread(CliRunner().invoke, build_app("move"), command)
    assert done.exit_code == 0, done.exception
    assert done.stdout.endswith(f"{request_id} was on d0, and goes on at d1 after 3 tokens\n")
    assert words(seen + await rest) == list(range(NUM_TOKENS))
    json.dumps(fleet.frontend.status("a"))


async def test_a_router_without_migration_moves_nothing(model_folder, tmp_path) -> None:
    from diptych_tests.router_fleet import running

    async with running(model_folder, tmp_path, migration_attempts=0) as fleet:
        await fleet.add("p0", "prefill")
        worker = await fleet.add("d0")
        await fleet.until_ready()
        request_id, _, rest = await begun(fleet)
        await fleet.add("d1")
        await fleet.until_ready(decode=2)
        with pytest.raises(DiptychError, match="migration_attempts is 0"):
            await fleet.frontend.move_request(request_id, "")
        worker.go.set()
        await rest
