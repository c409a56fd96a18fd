"""The harness over our own gRPC API, against the router's faces with a scripted frontend behind them."""

from __future__ import annotations

import grpc.aio
import pytest

from diptych.common.errors import OverloadedError
from diptych.loadtest import live
from diptych.loadtest.config import BenchConfig, make_target
from diptych.loadtest.result import RunRecord, measure
from diptych.loadtest.target import TargetError
from diptych.router.fake_door import MODEL, FakeDoor, hello_script
from diptych.router.server import Faces

grpc.aio.init_grpc_aio()  # its poller thread lives as long as the process; it must not look like a leak of the first test


async def bench(door: FakeDoor, **more: object) -> tuple[str, RunRecord]:
    settings = {
        "num_requests": 6,
        "request_rate": 50.0,
        "input_len": "8",
        "output_len": "8",
        "warmup": 1,
        "timeout_s": 10.0,
    }
    config = BenchConfig(**(settings | more))
    faces = Faces("127.0.0.1", 0, 0)
    try:
        address = (await faces.start(door, door.metrics)).grpc
        target = make_target(f"ours=grpc://{address}", config)
        try:
            model = await target.open()
            return model, await measure(target, model, config, config.items(), live.silent)
        finally:
            await target.close()
    finally:
        await faces.stop(1.0)


async def test_answers_over_grpc_are_whole_and_explained():
    model, run = await bench(FakeDoor(hello_script()))
    assert model == MODEL
    assert run.summary.outcomes == {"ok": 6}
    assert run.summary.counted_by == {"token_ids": 6}
    assert run.summary.output_tokens > 0
    assert all(record.ttft_s is not None and record.ttft_s >= 0 for record in run.records)
    assert all(record.finish_reason for record in run.records)


@pytest.mark.parametrize("form", ["text", "messages"])
async def test_every_form_of_prompt(form):
    _, run = await bench(FakeDoor(hello_script()), prompt_form=form, api="grpc", num_requests=2)
    assert run.summary.outcomes == {"ok": 2}


async def test_a_shed_request_is_a_refusal():
    door = FakeDoor(hello_script())
    door.refuse = OverloadedError("busy", retry_after_s=1.0)
    _, run = await bench(door, num_requests=3, warmup=0)
    assert run.summary.outcomes == {"refused": 3}
    assert run.summary.failed == 3


async def test_nobody_there():
    target = make_target("grpc://127.0.0.1:9", BenchConfig())
    try:
        with pytest.raises(TargetError, match="does not answer"):
            await target.open()
    finally:
        await target.close()
