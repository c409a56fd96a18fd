"""One request's span at the router, with the attributes of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

from dataclasses import replace

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError
from diptych.common.observe.tracing import PROVIDER, Span, Value, tracing
from diptych.router.requests.messages import FinishedEvent, UncheckedRequest, ValidatedRequest


def traced(prepared: ValidatedRequest, spec: UncheckedRequest) -> ValidatedRequest:
    """With the caller's trace context and the operation's name, if tracing is on."""
    if not (tracing.on or spec.traceparent):
        return prepared
    operation = "chat" if spec.messages is not None else "text_completion"
    return replace(prepared, traceparent=spec.traceparent, operation=operation)


class RequestSpan:
    """From the request's arrival to its end; exactly one of finished, failed, left ends it."""

    def __init__(self, request: ValidatedRequest, clock: Clock) -> None:
        self._first = True
        if not tracing.on:
            self._span = Span(None, request.traceparent)
            return
        sampling, adapter = request.sampling, request.adapter
        named: dict[str, Value] = {}
        if adapter is not None:
            named = {"diptych.adapter": adapter.name, "diptych.adapter_version": adapter.version.number}
        self._span = tracing.start(
            f"{request.operation} {request.model}",
            kind="server",
            parent=request.traceparent,
            began_s_ago=max(0.0, clock.now() - request.arrived),
            attributes={
                "gen_ai.operation.name": request.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": request.model,
                "gen_ai.response.model": request.model,
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": len(request.prompt.token_ids),
                "diptych.request_id": request.request_id,
                **named,
            },
        )

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def token(self) -> None:
        if self._first:
            self._first = False
            self._span.event("first token")

    def finished(self, event: FinishedEvent) -> None:
        self._span.set(
            gen_ai__usage__output_tokens=event.usage.completion_tokens,
            gen_ai__usage__cache_read__input_tokens=event.usage.cached_tokens,
            gen_ai__response__finish_reasons=[event.reason.value],
        )
        self._span.end()

    def failed(self, error: DiptychError) -> None:
        self._span.fail(error.reason, error.message)
        self._span.end()

    def left(self) -> None:
        """The client disconnected; no effect when the request has ended."""
        self._span.fail("CLIENT_LEFT")
        self._span.end()
