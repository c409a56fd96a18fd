"""Spans over router -> decode -> prefill -> transfer, as OpenTelemetry over OTLP; off unless an endpoint is set.

    router   SERVER "chat MODEL"         parent: the caller's `traceparent` (HTTP header or gRPC metadata)
      decode   SERVER "decode"           parent: in Submit.traceparent (its stream is shared by all requests)
        decode   CLIENT "prefill call"
          prefill  SERVER "prefill"      parent: in the call's metadata
          decode   INTERNAL "kv transfer"

The endpoint is the standard OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT). Without it OpenTelemetry is not
imported and a span costs one call; a caller's context is still passed on. Spans are started and ended explicitly: they
live in generators and callbacks, where the current-span context may belong to another request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from diptych.common.errors import ConfigError
from diptych.common.extras import install_command

TRACEPARENT = "traceparent"
PROVIDER = "diptych"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_CONTEXT = 64
"""A W3C traceparent has 55 characters."""
_FLUSH_MS = 2000

Value = str | int | float | bool | list[str]


class Span:
    """A span; with `span` None only the context that is passed on. `end` is idempotent."""

    def __init__(self, span: Any, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent
        """For the processes that work for this span; may be empty."""

    @property
    def recording(self) -> bool:
        return self._span is not None

    def set(self, **attributes: Value) -> None:
        """Attributes; `__` in a name stands for a dot."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(name.replace("__", "."), value)

    def event(self, name: str) -> None:
        """A moment within the span."""
        if self._span is not None:
            self._span.add_event(name)

    def fail(self, reason: str, message: str = "") -> None:
        """Mark it failed: `error.type` is the reason. Does not end it."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", reason)
            self._span.set_status(Status(StatusCode.ERROR, message or reason))

    def end(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()


class Tracing:
    """The span exporter of this process, see `tracing`."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None
        self._processor: Any = None
        self._service = ""
        self._instance = ""

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def start(
        self,
        name: str,
        *,
        kind: str = "internal",
        parent: str = "",
        began_s_ago: float = 0.0,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """Begin a span.

        Args:
            kind: server, client or internal.
            parent: a traceparent; empty or malformed: a new trace.
            began_s_ago: seconds by which the start is backdated.
        """
        parent = parent if len(parent) <= _MAX_CONTEXT else ""
        if self._tracer is None:
            return Span(None, parent)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            name,
            context=propagator.extract({TRACEPARENT: parent}),
            kind=SpanKind[kind.upper()],
            attributes=dict(attributes or {}),
            start_time=time.time_ns() - int(began_s_ago * 1e9),
        )
        context = span.get_span_context()
        made = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return Span(span, made)

    def configure(
        self, role: str, instance: str = "", *, exporter: Any = None, environ: Mapping[str, str] = os.environ
    ) -> bool:
        """Switch tracing on if an endpoint is set (or an exporter is given: tests). Returns: whether it is on. Raises:
        ConfigError when an endpoint is set and the package's extra `otel` is not installed."""
        named = next((name for name in ENDPOINT_VARIABLES if environ.get(name)), "")
        if exporter is None and not named:
            return False
        try:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                self._processor = BatchSpanProcessor(OTLPSpanExporter())
            else:
                self._processor = SimpleSpanProcessor(exporter)
        except ModuleNotFoundError as error:
            rule = f"needs {error.name}: {install_command('otel')}"
            raise ConfigError(named, environ.get(named, ""), rule) from None
        self._service, self._instance = environ.get("OTEL_SERVICE_NAME", ""), instance
        self._provide(role)
        return True

    def set_role(self, role: str) -> None:
        """Spans that begin from now on are of this role."""
        if self.on:
            self._provide(role)

    def _provide(self, role: str) -> None:
        """A provider's resource is fixed. All of this process export through one processor."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = {"service.name": self._service or f"diptych-{role}", "diptych.role": role}
        if self._instance:
            resource["service.instance.id"] = self._instance
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("diptych")

    def close(self) -> None:
        """Flush for a bounded time and switch off. Idempotent; blocks, so call it off the event loop."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is not None:
            provider.force_flush(_FLUSH_MS)
            provider.shutdown()


tracing = Tracing()
"""The instance of this process."""
