"""Roll-outs over real gRPC: canary and shadow by configuration, and builds that do not fit are never paired."""

from __future__ import annotations

from dataclasses import replace

from diptych.common.errors import InternalError
from diptych.router.cluster.fake_decode import FakeDecode
from diptych_tests.router_fleet import running


async def where(fleet, asks: int) -> list[tuple[str, str]]:
    """(prefill, decode) that requests were placed on."""
    found = []
    for _ in range(asks):
        finished = (await fleet.ask())[-1]
        chosen = next(c for c in finished.explanation.candidates if c.chosen)
        found.append((chosen.prefill_worker_id, chosen.decode_worker_id))
    return found


async def test_a_canary_gets_its_share_whole_and_nothing_more(model_folder, tmp_path) -> None:
    settings = {"canary_workers": ("canary-*",), "canary_share": 0.3}
    async with running(model_folder, tmp_path, **settings) as fleet:
        for name in ("p0", "canary-p0"):
            await fleet.add(name, "prefill")
        for name in ("d0", "canary-d0"):
            await fleet.add(name)
        await fleet.until_ready(decode=2, prefill=2)
        assert fleet.frontend.ready() == (True, [])
        placed = await where(fleet, 60)
        assert set(placed) == {("p0", "d0"), ("canary-p0", "canary-d0")}
        assert 6 <= placed.count(("canary-p0", "canary-d0")) <= 32
        assert fleet.no_reservations()


async def test_without_a_canary_its_share_goes_to_stable_workers_and_says_so(model_folder, tmp_path) -> None:
    settings = {"canary_workers": ("canary-*",), "canary_share": 1.0}
    async with running(model_folder, tmp_path, **settings) as fleet:
        await fleet.add("p0", "prefill")
        await fleet.add("d0")
        await fleet.until_ready()
        finished = (await fleet.ask())[-1]
        assert "no canary worker is usable: placed on a stable worker" in finished.explanation.notes


async def test_shadows_get_copies_that_no_client_sees_and_that_harm_no_request(model_folder, tmp_path) -> None:
    settings = {"shadow_workers": ("shadow-*",), "shadow_share": 1.0}
    async with running(model_folder, tmp_path, **settings) as fleet:
        for name in ("p0", "shadow-p0"):
            await fleet.add(name, "prefill")
        real, shadow = await fleet.add("d0"), await fleet.add("shadow-d0")
        await fleet.until_ready(decode=2, prefill=2)
        assert set(await where(fleet, 5)) == {("p0", "d0")}
        await fleet.until(lambda: len(shadow.submits) == 5 and fleet.no_reservations())
        assert [list(s.prompt_token_ids) for s in shadow.submits] == [list(s.prompt_token_ids) for s in real.submits]
        assert [s.sampling.seed for s in shadow.submits] == [s.sampling.seed for s in real.submits]
        assert not {s.request_id for s in shadow.submits} & {s.request_id for s in real.submits}
        await fleet.until(lambda: fleet.frontend.metrics.totals()["shadow_requests"] == {"finished": 5.0})
        assert fleet.frontend.metrics.totals()["placements"]["remote"] == 5.0, "copies are no traffic"
        shadow.refuse = InternalError("the new build is broken")
        assert set(await where(fleet, 3)) == {("p0", "d0")}
        await fleet.until(lambda: fleet.frontend.metrics.totals()["shadow_requests"].get("INTERNAL") == 3.0)
        assert fleet.frontend.metrics.totals()["request_errors"] == {}


async def test_two_builds_are_kept_apart_by_the_handshake(model_folder, tmp_path) -> None:
    """A rolling upgrade that changes what is computed: old and new serve side by side, and never together."""
    async with running(model_folder, tmp_path) as fleet:
        for build in ("1", "2"):
            for role in ("prefill", "decode"):
                worker = await FakeDecode(worker_id=f"{role}-{build}", incarnation="i1").start()
                fleet.workers.append(worker)
                record = fleet.record(worker, role, header=replace(fleet.header, attention_version=build))
                await fleet.store.put_worker(record, ttl_s=1000)
        await fleet.until_ready(decode=2, prefill=2)
        ready, reasons = fleet.frontend.ready()
        assert ready
        assert [reason for reason in reasons if "prefill-1 and decode-2 are incompatible: attention_version" in reason]
        assert set(await where(fleet, 20)) <= {("prefill-1", "decode-1"), ("prefill-2", "decode-2")}
