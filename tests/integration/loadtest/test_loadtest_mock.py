"""The whole harness over real sockets against the mock server: every figure within 2% of the script.

Both ends are in one loop whose clock jumps, so the figures do not depend on the machine's load.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from diptych.loadtest.config import BenchConfig, make_target
from diptych.loadtest.mock_server import Script, serve
from diptych.loadtest.runs import live
from diptych.loadtest.runs.result import RunRecord, measure
from diptych.loadtest.targets.target import TargetError
from diptych.loadtest.virtual_loop import run_virtual

SCRIPT = Script()  # first token 100 ms, then 20 ms a token, 4 tokens a chunk


def run_bench(script: Script, config: BenchConfig, *, target: Any = None) -> RunRecord:
    async def main() -> RunRecord:
        runner, _, url = await serve(script)
        made = target or make_target(f"mock={url}", config)
        try:
            return await measure(made, await made.open(), config, config.items(), live.silent)
        finally:
            await made.close()
            await runner.cleanup()

    return run_virtual(main())


def config(**more: Any) -> BenchConfig:
    return BenchConfig(**({"num_requests": 60, "request_rate": 20.0, "input_len": "32", "output_len": "33"} | more))


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("loop", [{}, {"closed_loop": True, "max_concurrency": 8}, {"burstiness": 0.3}])
def test_every_figure_is_within_two_percent_of_the_script(api, loop):
    run = run_bench(SCRIPT, config(api=api, slo="ttft:102,tpot:20.4,e2e:753", **loop))
    summary = run.summary
    assert (summary.completed, summary.failed) == (60, 0)
    for found, scripted in (
        (summary.ttft, 0.1),
        (summary.tpot, 0.02),
        (summary.itl, 0.02),
        (summary.first_gap, 0.02),
        (summary.chunk_gap, 0.08),
        (summary.e2e, 0.1 + 32 * 0.02),
        (summary.prefill, 0.1),
        (summary.transfer, 0.01),
    ):
        for value in (found.mean, found.median, found.percentiles[90], found.p99):
            assert value == pytest.approx(scripted, rel=0.02)
    assert summary.queue.high == 0.0
    assert summary.itl.count == 60 * 32
    assert summary.output_tokens == 60 * 33
    assert summary.output_rate == pytest.approx(60 * 33 / summary.duration_s)
    assert summary.slo_attainment == 1.0
    assert summary.counted_by == {"token_ids": 60}
    if api == "completions":
        assert summary.input_tokens == 60 * 32


def test_usage_alone_gives_the_same_totals():
    """A server without token ids: totals, TTFT, TPOT and E2E are exact, single intervals are distributed."""
    script = Script()

    class Strict:
        """Drops fields unknown to strict servers."""

        def __init__(self, made: Any) -> None:
            self._made = made
            body = made.body
            made.body = lambda ask: {k: v for k, v in body(ask).items() if k not in ("return_token_ids", "ignore_eos")}

    async def main() -> RunRecord:
        runner, _, url = await serve(script)
        chosen = config()
        made = make_target(url, chosen)
        Strict(made)
        try:
            return await measure(made, await made.open(), chosen, chosen.items(), live.silent)
        finally:
            await made.close()
            await runner.cleanup()

    summary = run_virtual(main()).summary
    assert summary.counted_by == {"usage": 60}
    assert summary.output_tokens == 60 * 33
    assert summary.ttft.median == pytest.approx(0.1, rel=0.02)
    assert summary.tpot.median == pytest.approx(0.02, rel=0.02)
    assert summary.itl.mean == pytest.approx(0.02, rel=0.02)


def test_refusals_cuts_and_errors_are_counted():
    script = Script(refuse_rate=0.1, cut_rate=0.2, error_rate=0.1, seed=5)
    run = run_bench(script, config(num_requests=100, warmup=0))
    outcomes = run.summary.outcomes
    assert sum(outcomes.values()) == 100
    assert set(outcomes) == {"ok", "refused", "cut", "error"}
    assert 10 <= outcomes["cut"] <= 30
    assert {record.status for record in run.records if record.outcome.value == "refused"} == {529}
    assert all(record.output_tokens > 0 for record in run.records if record.outcome.value in ("cut", "error"))
    assert run.summary.ttft.median == pytest.approx(0.1, rel=0.02)
    assert any("failed" in text for text in run.warnings)


def test_waiting_in_the_servers_queue_is_in_the_ttft_and_reported_separately():
    run = run_bench(Script(slots=2), config(request_rate=10.0, num_requests=30))
    summary = run.summary
    assert summary.queue.high > 0.5
    for record in run.records:
        if not record.warmup:
            assert record.ttft_s == pytest.approx(record.queue_s + record.prefill_s, abs=0.002)


def test_cancelled_streams_and_conversations():
    run = run_bench(SCRIPT, config(workload="conversation", think_time="0.5", cancel_rate=0.2, num_requests=40, seed=2))
    outcomes = run.summary.outcomes
    assert set(outcomes) == {"ok", "cancelled"}
    assert sum(outcomes.values()) == 40
    later = [r for r in run.records if r.ok and not r.warmup and r.input_tokens > 32]
    assert later  # history travels: later turns have longer prompts


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, '{"error": {"message": "no key"}}', r"/v1/models answers HTTP 401: .*no key"),
        (200, "{}", "/v1/models answers with no list of models"),
        (200, "<html>", "/v1/models answers with no list of models"),
    ],
)
def test_a_server_that_refuses_to_name_its_models(status, body, said):
    """It was said not to answer, with the name of a key of Python's."""

    async def models(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target = make_target(f"http://127.0.0.1:{runner.addresses[0][1]}", config())
        try:
            with pytest.raises(TargetError, match=said):
                await target.open()
        finally:
            await target.close()
            await runner.cleanup()

    asyncio.run(main())


def test_a_server_that_is_not_there():
    chosen = config()

    async def main() -> None:
        target = make_target("http://127.0.0.1:9", chosen)
        try:
            with pytest.raises(TargetError, match="does not answer: Connection refused$"):
                await target.open()
        finally:
            await target.close()

    asyncio.run(main())
    named = config(model="m", num_requests=3, warmup=0)
    run = run_bench(SCRIPT, named, target=make_target("http://127.0.0.1:9", named))
    assert run.summary.outcomes == {"error": 3}
    assert "cannot connect" in next(iter(run.summary.errors))
