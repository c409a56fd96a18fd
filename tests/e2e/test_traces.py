"""A real cluster with a collector, as shipped: it starts, compiles grammars, and one HTTP request is one trace over the router,
decode and prefill processes."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []
        self.env: dict[str, str] = {}  # that send traces here
        self._lock = threading.Lock()

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = grpc.server(futures.ThreadPoolExecutor(2, thread_name_prefix="grpc"))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    servicer.env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
    yield servicer
    server.stop(1.0).wait()


def post(url: str, body: object, headers: dict[str, str] | None = None) -> dict:
    headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_2_4_a_cluster_that_exports_traces_starts_and_one_request_is_one_trace(
    cluster_module, collector: Collector, tmp_path
) -> None:
    with cluster_module.running_cluster(tmp_path, extra_env=collector.env) as running:
        asked = {
            "messages": [{"role": "user", "content": "Is the sky blue?"}],
            "max_tokens": 8,
            "structured_outputs": {"choice": ["yes", "no"]},
        }
        reported = post(running.http_url + "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
        assert reported in ("yes", "no")
        body = {"prompt": list(range(1000, 1120)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        body["local_prefill_max_tokens"] = 0
        post(running.http_url + "/v1/completions", body, {"traceparent": f"00-{TRACE}-{PARENT}-01"})

        def ours() -> list[tuple[str, object]]:
            return [(service, span) for service, span in collector.spans if span.trace_id.hex() == TRACE]

        cluster_module.wait_until(lambda: len(ours()) >= 5, deadline_s=120, what="five spans have come")
        spans = {(service, span.name.split(" ")[0]): span for service, span in ours()}
        assert set(spans) == {
            ("diptych-router", "text_completion"),
            ("diptych-decode", "decode"),
            ("diptych-decode", "prefill"),
            ("diptych-decode", "kv"),
            ("diptych-prefill", "prefill"),
        }
        known = {PARENT} | {span.span_id.hex() for span in spans.values()}
        assert all(span.parent_span_id.hex() in known for span in spans.values())
        assert [s for s in spans.values() if s.parent_span_id.hex() == PARENT] == [
            spans["diptych-router", "text_completion"]
        ]
