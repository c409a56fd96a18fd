"""The frontend over real gRPC against decode workers without an engine; the store is in memory."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from diptych.common.block_identity import block_keys
from diptych.common.errors import (
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    QuotaExceededError,
)
from diptych.common.request import Prompt
from diptych.common.secret import tenant_salt
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad
from diptych.common.tiers import TierState
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.router.fairness.prompt_speeds import MIN_SEEN
from diptych.router.observe.access_log import Access, logged
from diptych.router.placement.placer import PromptBlocks
from diptych.router.placement.types import PlacementRequest
from diptych.router.requests.messages import FinishedEvent, StartedEvent, UncheckedRequest
from diptych_tests.router_fleet import drain, running


async def test_answer_and_explanation(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    started, *tokens, finished = await fleet.ask(failure_policy="recompute")
    assert isinstance(started, StartedEvent)
    assert started.prompt_tokens == 40
    assert [i for event in tokens for i in event.token_ids] == [0, 1, 2]
    assert "".join(event.text for event in tokens) == "t0 t1 t2 "
    assert isinstance(finished, FinishedEvent)
    assert finished.usage.cached_tokens == 16
    why = finished.explanation
    assert (why.request_id, why.index_mode, why.kv_bytes) == (started.request_id, "EXACT", 4096)
    assert [(c.prefill_worker_id, c.chosen) for c in why.candidates] == [("p0", True)]
    submit = decode.submits[0]
    assert submit.placement.prefill[0].worker_id == "p0"
    assert not submit.placement.local_prefill
    assert submit.placement.decode.incarnation == "i1"
    assert 500 < submit.remaining_s < 600
    assert submit.sampling.HasField("seed")
    assert fleet.no_reservations()
    assert fleet.frontend.metrics.success.labels("length").value == 1
    assert not decode.cancels


async def test_decisions_are_explained_afterwards_to_their_owner(fleet):
    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    started = (await fleet.ask(request_id="mine"))[0]
    reported = await fleet.frontend.explain("mine", "")
    assert (await fleet.frontend.explain(started.request_id, "")).explanation == reported.explanation
    why = reported.explanation
    assert (reported.outcome, reported.label, reported.prompt_tokens) == ("finished", "mine", 40)
    assert (why.request_id, why.policy, why.decode, why.cached_tokens) == (started.request_id, "cost", "d0", 16)
    assert why.predicted_ttft_s > 0
    assert 0 < why.ttft_s <= why.total_s
    assert [c.prefill_worker_id for c in why.candidates] == ["p0"]
    for name, tenant in (("mine", "another"), ("nobody", "")):
        with pytest.raises(InvalidRequestError, match="has no recent request"):
            await fleet.frontend.explain(name, tenant)
    assert fleet.frontend.metrics.value("placement_regret_seconds_count") == 1.0


async def test_what_if_runs_nothing(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    prepared = await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 40))
    here = fleet.frontend.what_if(prepared, "").explanation
    assert [(c.prefill_worker_id, c.decode_worker_id) for c in here.candidates] == [("p0", "d0")]
    there = fleet.frontend.what_if(prepared, "4P2D")
    assert len(there.explanation.candidates) == 8
    assert there.prompt_tokens == 40
    alone = fleet.frontend.what_if(prepared, "0p1d").explanation
    assert alone.notes == ["no usable prefill worker: local prefill"]
    for pool in ("4P", "4P0D", "P4D4", "999P1D"):
        with pytest.raises(InvalidRequestError) as caught:
            fleet.frontend.what_if(prepared, pool)
        assert caught.value.param == "pool"
    assert decode.submits == []


async def test_a_worker_without_events_is_said(fleet):
    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    await fleet.ask()  # the fake computes here and publishes nothing
    assert fleet.frontend.metrics.value("mode_degraded") == 0.0
    watch = fleet.frontend._cluster._event_watch
    assert watch._workers["p0"].computed_at is not None
    watch._workers["p0"].computed_at -= 10.0
    await fleet.until(lambda: fleet.frontend._cluster.untracked_workers == {"p0": "publishes no cache events"})
    assert fleet.frontend.metrics.value("mode_degraded") == 1.0
    assert "p0 publishes no cache events" in fleet.frontend.ready()[1]


async def test_prompt_text_and_chat_are_tokenized(fleet):
    await fleet.until(lambda: True)
    prepared = await fleet.frontend.prepare(UncheckedRequest(prompt="w1 w2 w3"))
    assert prepared.prompt.token_ids == (1, 2, 3)
    assert prepared.sampling.max_tokens == 512 - 3
    chat = await fleet.frontend.prepare(UncheckedRequest(messages=[{"role": "user", "content": "w4 w5"}]))
    assert chat.prompt.token_ids == (4, 5)


async def test_a_default_for_max_tokens_fits_the_smallest_decode_pool(fleet):
    await fleet.add("p0", "prefill", num_blocks=2)
    await fleet.add("d0", num_blocks=9)
    await fleet.add("d1", num_blocks=7)
    await fleet.until(lambda: fleet.frontend._cluster.pool_tokens(1) == 7 * 16)
    assert fleet.frontend._cluster.pool_tokens(2) == 3 * 16
    prepared = await fleet.frontend.prepare(UncheckedRequest(prompt="w1 w2 w3"))
    assert prepared.sampling.max_tokens == 7 * 16 + 1 - 3
    explicit = await fleet.frontend.prepare(UncheckedRequest(prompt="w1 w2 w3", sampling={"max_tokens": 200}))
    assert explicit.sampling.max_tokens == 200


async def test_no_worker_is_a_typed_error_with_reasons(fleet):
    with (
        capture_logs() as lines,
        pytest.raises(NoWorkerError, match="no usable decode worker"),
        logged(Access("test", "")),
    ):
        await fleet.ask()
    (reported,) = [line for line in lines if line["event"] == "request"]
    assert (reported["outcome"], reported["reason"]) == ("refused", "NO_WORKER")
    assert "no usable decode worker" in reported["error"]
    assert reported["request_id"]
    ok, reasons = fleet.frontend.ready()
    assert not ok
    assert "no usable decode worker" in reasons


async def test_a_request_waits_for_the_workers_of_a_router_that_has_just_started(model_folder, tmp_path):
    async with running(model_folder, tmp_path, settle_s=600.0) as fleet:
        cluster, held = fleet.frontend._cluster, asyncio.Event()
        wait = cluster.wait_for_change

        async def hold(timeout_s):
            held.set()
            await wait(timeout_s)

        cluster.wait_for_change = hold
        asking = asyncio.create_task(fleet.ask())
        await asyncio.wait_for(held.wait(), 60)  # no worker is found, and the request is not refused
        assert not asking.done()
        await fleet.add("d0")
        events = await asyncio.wait_for(asking, 60)
        assert isinstance(events[-1], FinishedEvent)


async def test_a_worker_of_another_secret_is_never_placed_on(fleet):
    await fleet.add("p0", "prefill")
    compat = fleet.record(FakeDecode()).compat | {"block_identity_golden": "00" * 16}
    await fleet.add("d0", compat=compat)
    await fleet.until_ready(decode=0)
    await fleet.until(lambda: "block identity" in " ".join(fleet.frontend.ready()[1]))
    with pytest.raises(NoWorkerError, match="block identity"):
        await fleet.ask()


async def test_index_follows_events_and_fetches_snapshots(fleet):
    await fleet.add("p0", "prefill")
    keys = tuple(block_keys(replace(fleet.header, salt=tenant_salt(fleet.secret, "")), [1] * 64))
    decode = await fleet.add("d0", event_epoch=0, tiers=(TierState("device", 5),))
    decode.dump = (0, 5, keys[:1])
    await fleet.until_ready()
    index = fleet.frontend._cluster._index
    await fleet.until(lambda: index.hit_blocks("d0", keys) == 1)
    await fleet.store.append_events("d0", [KvEvent("i1", 0, 6, "stored", keys[1:2])])
    await fleet.until(lambda: index.hit_blocks("d0", keys) == 2)
    finished = (await fleet.ask(num_prompt=64))[-1]
    assert finished.explanation.candidates[0].decode_hit_tokens == 32
    decode.dump = (0, 9, keys)
    await fleet.store.append_events("d0", [KvEvent("i1", 0, 9, "stored", keys[3:4])])
    await fleet.until(lambda: index.hit_blocks("d0", keys) == 4)
    finished = (await fleet.ask(num_prompt=64))[-1]
    assert finished.explanation.candidates[0].decode_hit_tokens == 48  # the last token is always computed


async def test_store_away_serving_goes_on(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    fleet.store.available = False
    # Its rows may be refused before it looks for others' and finds that its view is old.
    await fleet.until(lambda: any("store is unavailable" in reason for reason in fleet.frontend.ready()[1]))
    assert fleet.frontend._cluster.degraded
    assert fleet.frontend.ready()[0]
    finished = (await fleet.ask())[-1]
    assert finished.explanation.index_mode == "STALE"
    keys = tuple(block_keys(replace(fleet.header, salt=tenant_salt(fleet.secret, "")), [1] * 64))
    decode.dump = (0, 7, keys)  # its events of these were lost, and it has no lease yet
    index, members = fleet.frontend._cluster._index, fleet.frontend._cluster._members
    with capture_logs() as lines:
        right = lambda: any(line["event"] == "index is right again" for line in lines)  # noqa: E731
        fleet.store.available = True
        fleet.store.flush()
        await fleet.until(lambda: not fleet.frontend._cluster.degraded)
        await fleet.until(lambda: index.hit_blocks("d0", keys) == 4)
        assert (await fleet.ask())[-1]  # a moment without any lease changes nothing
        for name, worker in zip(("p0", "d0"), fleet.workers, strict=True):
            tiers = (TierState("device", 8),) if name == "d0" else ()
            record = fleet.record(worker, "prefill" if name == "p0" else "decode", tiers=tiers)
            await fleet.store.put_worker(record, ttl_s=1000)
        await fleet.until(lambda: all(one.missing_since is None for one in members.all()))
        assert not right()  # the lease mentions an event that is not here yet
        await fleet.store.append_events("d0", [KvEvent("i1", 0, 8, "evicted", keys[3:4])])
        await fleet.until(right)
        assert index.hit_blocks("d0", keys) == 3


async def test_explain_and_what_if_from_the_command_line(fleet):
    from typer.testing import CliRunner

    from diptych.cli.main import build_app

    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    await fleet.ask(request_id="mine")
    async with fleet.served() as address:

        async def command(*arguments):
            arguments = [*arguments, "--address", address]
            return await asyncio.to_thread(CliRunner().invoke, build_app(), arguments)

        reported = await command("explain", "mine")
        assert reported.exit_code == 0, reported.output
        # A warning of the router in this process may come first.
        assert any(line.startswith("finished, 40 prompt tokens") for line in reported.output.splitlines())
        assert "> p0" in reported.output
        other = await command("what-if", "--prompt", "w1 w2 w3", "--pool", "2P2D")
        assert other.exit_code == 0, other.output
        assert "prefill-1" in other.output
        unknown = await command("explain", "nobody")
        assert "has no recent request" in str(unknown.exception)


async def test_a_cluster_without_prefill_is_ready_when_that_is_wanted(model_folder, tmp_path):
    for wanted in (True, False):
        async with running(model_folder, tmp_path, require_prefill=wanted) as fleet:
            await fleet.add("d0")
            await fleet.until_ready(decode=1, prefill=0)
            ready, reasons = fleet.frontend.ready()
            assert ready is not wanted
            assert reasons == (["no usable prefill worker"] if wanted else [])
            if not wanted:
                prefill = await fleet.add("p0", "prefill")
                await fleet.until_ready()
                assert fleet.frontend.ready() == (True, [])
                await prefill.kill()
                await fleet.until(lambda: "no usable prefill worker" in fleet.frontend.ready()[1])  # it is degraded now
                assert fleet.frontend._cluster.place(
                    PlacementRequest(40, 0), PromptBlocks(Prompt([1] * 40))
                ).local_prefill


async def test_what_cannot_come_in_time_is_shed_before_any_work(model_folder, tmp_path):
    async with running(model_folder, tmp_path, max_ttft_s=0.5) as fleet:
        await fleet.add("p0", "prefill", load=WorkerLoad(prefill_tokens_per_s=100.0))
        decode = await fleet.add("d0")
        await fleet.until_ready()
        cluster = fleet.frontend._cluster
        await fleet.ask(num_prompt=240)  # nothing is known of prompts of this length: it is served
        assert cluster.admission.ttft.num_seen == 1
        speeds = cluster.placer.speeds
        speeds._workers["p0"].seen.clear()  # these workers compute nothing
        for _ in range(MIN_SEEN):
            speeds.on_computed("p0", 200, 2.0)
        done = len(decode.submits)
        request = await fleet.frontend.prepare(UncheckedRequest(token_ids=[2] * 240, sampling={"max_tokens": 2}))
        with pytest.raises(OverloadedError, match="shed before any work: the first token in 1.4 s or later") as caught:
            await drain(fleet.frontend.generate(request))  # 240 tokens at 1.5 x 100 a second, less 0.25 s
        assert caught.value.retry_after_s == pytest.approx(2.4, abs=0.1)
        assert len(decode.submits) == done
        refused = (await fleet.frontend.explain(request.request_id, "")).explanation
        assert any("admission: shed before any work" in note for note in refused.notes)
        await fleet.ask(num_prompt=2)
        await fleet.until(fleet.no_reservations)
        counted = fleet.frontend.metrics.admission
        assert [counted.labels(verdict).value for verdict in ("admitted", "refused")] == [2, 1]


async def test_routers_of_a_cluster_share_a_tenants_budget(fleet):
    await fleet.add("d0")
    one, other = (fleet.frontend.budgets(lambda _: 600) for _ in range(2))
    for quotas in (one, other):
        quotas.check("a")
        await quotas.exchange()
    one.spend("a", 600)
    await one.exchange()
    other.spend("a", 20)
    await other.exchange()
    with pytest.raises(QuotaExceededError):
        other.check("a")
