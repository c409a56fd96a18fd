"""Two models behind one router: each has its tokenizer, workers and blocks, and requests select one by name."""

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace

import httpx
import pytest

from diptych.client import AsyncClient
from diptych.common.block_identity import block_keys
from diptych.common.errors import ConfigError, InvalidRequestError, ModelNotFoundError, NoWorkerError
from diptych.common.secret import derive_key, tenant_salt
from diptych.common.store.interface import KvEvent
from diptych.common.ticket import PURPOSE
from diptych.router.requests.messages import UncheckedRequest
from diptych_tests.http_api import api_servers
from diptych_tests.router_fleet import make_model_folder, running


@pytest.fixture
def other_folder(tmp_path):
    return make_model_folder(tmp_path / "other", vocab=48)


@pytest.fixture
async def two(model_folder, other_folder, tmp_path):
    async with running(model_folder, tmp_path, more_models=(f"big={other_folder}",)) as fleet:
        yield fleet


async def start_all(fleet, folder):
    """A pair of workers for each model; by model, the decode worker."""
    key = derive_key(fleet.secret, PURPOSE)
    await fleet.add("p0", "prefill")
    tiny = await fleet.add("d0", ticket_key=key)
    header = fleet.header_of(folder, "m2")
    await fleet.add("p1", "prefill", header=header, max_model_len=128)
    big = await fleet.add("d1", ticket_key=key, header=header, max_model_len=128)
    await fleet.until(lambda: fleet.frontend.ready()[0])
    return tiny, big, header


async def test_requests_go_to_the_workers_of_the_model_that_they_name(two, other_folder):
    tiny, big, _ = await start_all(two, other_folder)
    assert [(one.id, one.max_model_len) for one in two.frontend.models()] == [("tiny", 256), ("big", 128)]
    started = (await two.ask(model="big"))[0]
    assert started.model == "big"
    assert (len(tiny.submits), len(big.submits)) == (0, 1)
    assert big.submits[0].placement.prefill[0].worker_id == "p1"
    await two.ask(model="tiny")
    assert (len(tiny.submits), len(big.submits)) == (1, 1)
    for name in ("tiny", "big"):  # each with a different vocabulary
        spec = UncheckedRequest(model=name, prompt="w50")
        assert await two.frontend.tokenize(spec) == [50 if name == "tiny" else 47]
        assert two.frontend.tokens(name).of(1) == b"w1"
    with pytest.raises(InvalidRequestError, match="47"):
        await two.frontend.prepare(UncheckedRequest(model="big", token_ids=[50]))
    reported = two.frontend.status("")
    assert (reported["model"], [one["model"] for one in reported["more_models"]]) == ("tiny", ["big"])
    assert two.no_reservations()


@pytest.mark.slow
async def test_the_status_page_draws_every_model(two, other_folder, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    await start_all(two, other_folder)
    await two.ask(model="big", request_id="of-big")
    async with api_servers(two.frontend, two.frontend.status) as addresses:
        command = [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command += ["--virtual-time-budget=3000", "--dump-dom", f"http://{addresses.http}/status"]
        dump = (await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)).stdout
    assert '<span id="model">tiny, big</span>' in dump
    for worker in ("p0", "d0", "p1", "d1"):
        assert f'data-worker="{worker}"' in dump
    assert dump.index('class="model">tiny') < dump.index('data-worker="d0"') < dump.index('class="model">big')
    assert "of-big · big" in dump


async def test_a_model_must_be_named_and_known(two, other_folder):
    await start_all(two, other_folder)
    with pytest.raises(InvalidRequestError, match="'tiny', 'big'") as caught:
        await two.ask()
    assert caught.value.param == "model"
    for model in ("huge", "x" * 300, "tiny:adapter"):
        with pytest.raises(ModelNotFoundError) as unknown:
            await two.ask(model=model)
        assert (unknown.value.http_status, unknown.value.param) == (404, "model")
    with pytest.raises(InvalidRequestError, match="must be text"):
        await two.ask(model=7)


async def test_each_model_has_blocks_of_its_own(two, other_folder):
    _, _, header = await start_all(two, other_folder)
    salt = tenant_salt(two.secret, "")
    keys = tuple(block_keys(replace(header, salt=salt), [1] * 64))
    await two.store.append_events("p1", [KvEvent("i1", 0, 1, "stored", keys)])
    big = two.frontend._models["big"].cluster
    await two.until(lambda: big._index.hit_blocks("p1", keys) == 4)
    for name, cached in (("big", 48), ("tiny", 0)):
        prepared = await two.frontend.prepare(UncheckedRequest(model=name, token_ids=[1] * 64))
        why = two.frontend.what_if(prepared, "").explanation
        assert [c.prefill_hit_tokens for c in why.candidates] == [cached]
        assert why.candidates[0].prefill_worker_id == ("p1" if name == "big" else "p0")


async def test_one_model_may_be_away_while_the_other_serves(two, other_folder):
    tiny, big, _ = await start_all(two, other_folder)
    await two.store.remove_worker("d1", "i1")
    await big.kill()
    await two.until(lambda: not two.frontend._models["big"].cluster.snapshot().decode)
    assert (await two.ask(model="tiny"))[0].model == "tiny"
    with pytest.raises(NoWorkerError):
        await two.ask(model="big")
    ready, reasons = two.frontend.ready()
    assert ready
    assert any(reason.startswith("big: no usable decode worker") for reason in reasons)


async def test_over_both_apis_and_by_ticket(two, other_folder):
    tiny, big, _ = await start_all(two, other_folder)
    async with api_servers(two.frontend) as addresses:
        async with httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=300.0) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["max_model_len"]) for one in listed] == [("tiny", 256), ("big", 128)]
            body = {"model": "big", "prompt": [1] * 40, "max_tokens": 3}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == ("big", 3)
            assert len(big.submits) == 1
            unknown = await http.post("/v1/completions", json=body | {"model": "huge"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            nameless = await http.post("/tokenize", json={"prompt": "w1"})
            assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
            counted = (await http.post("/tokenize", json={"model": "big", "prompt": "w1 w60"})).json()
            assert (counted["tokens"], counted["max_model_len"]) == ([1, 47], 128)
        async with AsyncClient(addresses.grpc, lookaside=True, timeout_s=300.0) as client:
            for name, worker in (("big", big), ("tiny", tiny)):
                before = len(worker.submits)
                answer = await client.generate(model=name, token_ids=[1] * 40, max_tokens=3)
                assert (answer.model, len(answer.token_ids)) == (name, 3)
                assert len(worker.submits) == before + 1


async def test_a_worker_of_no_model_is_reported_and_never_used(two, other_folder, tmp_path):
    await start_all(two, other_folder)
    stranger = make_model_folder(tmp_path / "stranger", vocab=32)
    lost = await two.add("d9", header=two.header_of(stranger))
    await two.until(lambda: any("d9" in reason for reason in two.frontend.ready()[1]))
    for name in ("tiny", "big"):
        await two.ask(model=name)
    assert not lost.submits


async def test_models_that_cannot_be_distinguished_are_refused(model_folder, tmp_path):
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in model_folder.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    (twin / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match="look like those of tiny"):
        async with running(model_folder, tmp_path, more_models=(f"twin={twin}",)):
            pass
