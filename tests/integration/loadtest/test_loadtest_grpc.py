"""The harness over our own gRPC API, against the router's APIs with a scripted frontend behind them."""

from __future__ import annotations

import grpc.aio
import pytest

from diptych.cli.bench.run import Place, opened
from diptych.common.errors import ConfigError, OverloadedError
from diptych.loadtest.config import BenchConfig, make_target
from diptych.loadtest.runs import live
from diptych.loadtest.runs.result import RunRecord, measure
from diptych.loadtest.targets.target import TargetError
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.api.fake import MODEL, FakeRouterApi, hello_script
from diptych_tests.http_api import api_servers

grpc.aio.init_grpc_aio()  # its poller thread runs as long as the process; it must not count as a leak of the first test


async def bench(router_api: FakeRouterApi, **more: object) -> tuple[str, RunRecord]:
    settings = {
        "num_requests": 6,
        "request_rate": 50.0,
        "input_len": "8",
        "output_len": "8",
        "warmup": 1,
        "timeout_s": 10.0,
    }
    config = BenchConfig(**(settings | more))
    async with api_servers(router_api) as at:
        address = at.grpc
        target = make_target(f"ours=grpc://{address}", config)
        try:
            model = await target.open()
            return model, await measure(target, model, config, config.items(), live.silent)
        finally:
            await target.close()


async def test_answers_over_grpc_are_whole_and_explained():
    model, run = await bench(FakeRouterApi(hello_script()))
    assert model == MODEL
    assert run.summary.outcomes == {"ok": 6}
    assert run.summary.counted_by == {"token_ids": 6}
    assert run.summary.output_tokens > 0
    assert all(record.ttft_s is not None and record.ttft_s >= 0 for record in run.records)
    assert all(record.finish_reason for record in run.records)


@pytest.mark.parametrize("form", ["text", "messages"])
async def test_every_form_of_prompt(form):
    _, run = await bench(FakeRouterApi(hello_script()), prompt_form=form, api="grpc", num_requests=2)
    assert run.summary.outcomes == {"ok": 2}


async def test_a_shed_request_is_a_refusal():
    router_api = FakeRouterApi(hello_script())
    router_api.refuse = OverloadedError("busy", retry_after_s=1.0)
    _, run = await bench(router_api, num_requests=3, warmup=0)
    assert run.summary.outcomes == {"refused": 3}
    assert run.summary.failed == 3


async def test_no_server():
    target = make_target("grpc://127.0.0.1:9", BenchConfig())
    try:
        with pytest.raises(TargetError, match="does not answer"):
            await target.open()
    finally:
        await target.close()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_server_with_keys_says_where_the_key_is_taken_from(tmp_path, monkeypatch, scheme):
    """A gRPC server that wanted a key was said not to answer, and neither said where the key comes from."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    served = tmp_path / "keys.json"
    add_key(served, "acme", now=0.0)
    async with api_servers(FakeRouterApi(hello_script()), keys=Authenticator(served, now=lambda: 0.0)) as addresses:
        place = Place(f"{scheme}://{getattr(addresses, scheme)}")
        with pytest.raises(
            ConfigError, match=r"an API key is required.*; the key comes from OPENAI_API_KEY$"
        ) as refused:
            async with opened(BenchConfig(), [place]):
                pass
    assert "does not answer" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_tenants_are_known_to_the_server_by_their_keys(tmp_path, scheme):
    served, keys = tmp_path / "keys.json", tmp_path / "tenants"
    made = {name: add_key(served, name, now=0.0)[0] for name in ("gold", "free")}
    keys.write_text("# tenant key\n" + "".join(f"{name} {key}\n" for name, key in made.items()))
    config = BenchConfig(
        num_requests=12, request_rate=100.0, input_len="8", output_len="8", tenants="gold:1,free:1", tenant_keys=keys
    )
    router_api = FakeRouterApi(hello_script())
    async with api_servers(router_api, keys=Authenticator(served, now=lambda: 0.0)) as addresses:
        target = make_target(f"ours={scheme}://{getattr(addresses, scheme)}", config)
        try:
            run = await measure(target, await target.open(), config, config.items(), live.silent)
        finally:
            await target.close()
    assert run.summary.outcomes == {"ok": 12}
    sent = [record.tenant for record in run.records]
    assert sorted(spec.tenant for spec in router_api.specs) == sorted(sent)
    assert set(sent) == {"gold", "free"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("gold k1\n", "holds no key for free"),
        ("gold k1\ngold k2\n", "twice"),
        ("gold\n", "must be a tenant and its key"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, text, wrong):
    file = tmp_path / "tenants"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wrong) as caught:
        make_target("grpc://h:1", BenchConfig(tenants="gold,free", tenant_keys=file))
    assert "k1" not in str(caught.value)
