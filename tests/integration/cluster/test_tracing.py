"""One request is one connected trace: decode, its call to prefill, prefill, and the KV transfer; and nothing at all when off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych.common.clock import FakeClock
from diptych.common.errors import WorkerLostError
from diptych.common.observe.tracing import tracing
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.common.store.adapters import AdapterVersion, ChosenAdapter
from diptych.router.observe.request_span import RequestSpan, traced
from diptych.router.requests.messages import FinishedEvent, UncheckedRequest, UsageInfo, ValidatedRequest

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
PROMPT = [(7 * i + 3) % 1000 for i in range(70)]


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    assert tracing.configure("test", exporter=exporter, environ={})
    yield exporter
    tracing.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> int:
    return span.parent.span_id if span.parent is not None else 0


async def test_a_request_over_both_pools_is_one_trace(pd: ModuleType, exported: InMemorySpanExporter) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        message = cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=5)
        message.traceparent = CALLER
        answer = await router.run(message)
        assert answer.finished is not None, answer.error
        await cluster.nothing_left()
    spans = by_name(exported)
    assert set(spans) == {"decode", "prefill call", "prefill", "kv transfer"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {CALLER.split("-")[1]}
    assert f"{parent_of(spans['decode']):016x}" == CALLER.split("-")[2]
    assert parent_of(spans["prefill call"]) == spans["decode"].context.span_id
    assert parent_of(spans["prefill"]) == spans["prefill call"].context.span_id
    assert parent_of(spans["kv transfer"]) == spans["prefill call"].context.span_id
    assert spans["kv transfer"].attributes["diptych.kv_bytes"] == answer.explanation.kv_bytes > 0
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 5
    assert spans["prefill"].attributes["diptych.request_id"] == "req-a"
    assert [event.name for event in spans["prefill"].events] == ["started", "first token"]


async def test_a_failure_is_in_the_span_that_saw_it(pd: ModuleType, exported: InMemorySpanExporter) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        message = cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=5)
        message.placement.prefill[0].incarnation = "another life"
        message.failure_policy = 1  # fail
        answer = await router.run(message)
        assert answer.error is not None
        await cluster.nothing_left()
    spans = by_name(exported)
    for name in ("decode", "prefill call"):
        assert spans[name].attributes["error.type"] == answer.error.reason
        assert not spans[name].status.is_ok


async def test_without_an_endpoint_a_callers_context_still_travels(pd: ModuleType) -> None:
    assert not tracing.configure("test", environ={})
    span = tracing.start("x", parent=CALLER)
    assert (span.recording, span.traceparent) == (False, CALLER)
    assert tracing.start("x", parent="y" * 100).traceparent == ""
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=3))
        assert answer.finished is not None


def prepared(clock: FakeClock) -> ValidatedRequest:
    plain = ValidatedRequest(
        "r", "", "m", Prompt((1, 2, 3)), SamplingParams(4), False, 0, 0, clock.now(), clock.now() + 9
    )
    return traced(plain, UncheckedRequest(messages=[], traceparent=CALLER))


def test_the_routers_span_has_the_genai_attributes(exported: InMemorySpanExporter) -> None:
    clock = FakeClock(10.0)
    request = prepared(clock)
    clock.advance(0.5)
    span = RequestSpan(request, clock)
    assert span.traceparent.split("-")[1] == CALLER.split("-")[1]
    span.token()
    span.token()
    span.finished(FinishedEvent(FinishReason.LENGTH, UsageInfo(3, 4, 2), "", None, None))
    span.left()
    (reported,) = exported.get_finished_spans()
    assert reported.name == "chat m"
    assert f"{parent_of(reported):016x}" == CALLER.split("-")[2]
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "diptych", "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4, "gen_ai.request.max_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert expected.items() <= dict(reported.attributes).items()
    assert [event.name for event in reported.events] == ["first token"]
    assert reported.end_time - reported.start_time >= 0.5e9
    assert "error.type" not in reported.attributes


def test_a_span_names_the_version_of_an_adapter(exported: InMemorySpanExporter) -> None:
    clock = FakeClock(10.0)
    chosen = ChosenAdapter("poems", AdapterVersion(3, "a" * 32, "/lora/poems", 8, 1000, 0))
    for adapter in (chosen, None):
        RequestSpan(replace(prepared(clock), adapter=adapter), clock).left()
    names = [
        (s.attributes.get("diptych.adapter"), s.attributes.get("diptych.adapter_version"))
        for s in exported.get_finished_spans()
    ]
    assert names == [("poems", 3), (None, None)]


def test_how_a_request_failed_is_recorded(exported: InMemorySpanExporter) -> None:
    clock = FakeClock(10.0)
    RequestSpan(prepared(clock), clock).failed(WorkerLostError("x"))
    RequestSpan(prepared(clock), clock).left()
    assert [s.attributes["error.type"] for s in exported.get_finished_spans()] == ["WORKER_LOST", "CLIENT_LEFT"]
