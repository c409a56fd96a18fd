"""Requests that wait in the router, over real gRPC."""

import asyncio

import pytest

from diptych.common.errors import NoWorkerError, OverloadedError, RequestDeadlineError
from diptych.common.secret import tenant_salt
from diptych.common.store.worker_record import WorkerLoad
from diptych.router.fairness.fair_queue import Share
from diptych.router.requests.messages import UncheckedRequest
from diptych_tests.router_fleet import running

SLOW = WorkerLoad(prefill_tokens_per_s=100.0)


async def send(fleet, tenant, **more):
    spec = UncheckedRequest(token_ids=[1] * 40, sampling={"max_tokens": 2}, tenant=tenant, **more)
    return [event async for event in fleet.frontend.generate(await fleet.frontend.prepare(spec))]


async def test_a_tenant_with_ten_times_the_requests_gets_its_share(model_folder, tmp_path):
    async with running(model_folder, tmp_path, turn_window_s=0.5) as fleet:
        await fleet.add("p0", "prefill", load=SLOW)
        decode = await fleet.add("d0")
        await fleet.until_ready()
        fleet.frontend.use_shares(lambda tenant: Share(2.0 if tenant == "double" else 1.0))
        decode.go.clear()  # nothing gets computed: each tenant has room for two prompts
        gate = fleet.frontend._cluster.wait_queue
        tasks = [asyncio.create_task(send(fleet, "greedy")) for _ in range(60)]
        await fleet.until(lambda: len(gate) > 0)
        tasks += [
            asyncio.create_task(send(fleet, tenant)) for _ in range(6) for tenant in ("modest", "double", "double")
        ]
        # On a loaded machine a request that is not yet in the queue could be overtaken by those that are.
        await fleet.until(lambda: len(decode.submits) + len(gate) == len(tasks))
        assert fleet.frontend.metrics.value("requests_waiting_turn") > 0
        spec = UncheckedRequest(token_ids=[1] * 40, sampling={"max_tokens": 2}, tenant="greedy")
        (refused,) = fleet.frontend.place([await fleet.frontend.prepare(spec)])
        assert isinstance(refused, NoWorkerError)
        assert "ticket" in refused.message
        # On a loaded machine its time may be over before it could wait: then admission refuses it.
        with pytest.raises((RequestDeadlineError, OverloadedError)):
            await send(fleet, "greedy", timeout_s=0.1)
        decode.go.set()
        await asyncio.gather(*tasks)
        names = {tenant_salt(fleet.secret, name): name for name in ("greedy", "modest", "double")}
        order = [names[submit.cache_salt] for submit in decode.submits]
        assert len(order) == 78
        # All requests of the other tenants come before most of the greedy one's.
        last = max(i for i, name in enumerate(order) if name != "greedy")
        assert order[: last + 1].count("greedy") <= 40
        assert fleet.no_reservations()
        assert gate.passing == 0


async def test_without_a_measured_speed_no_request_waits(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    decode.go.clear()
    tasks = [asyncio.create_task(send(fleet, "t")) for _ in range(30)]
    await fleet.until(lambda: len(decode.submits) == 30)
    decode.go.set()
    await asyncio.gather(*tasks)
