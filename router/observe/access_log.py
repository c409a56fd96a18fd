"""One log line per request, whatever its outcome: served, refused, failed or cancelled.

The HTTP or gRPC server opens it, other modules add fields (through context variables), and the server writes it at the
end. Several prompts in one request are one line: their tokens are summed, their workers listed together.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

import structlog

from diptych.common.errors import DiptychError, InternalError, RequestCancelledError
from diptych.router.observe.explain import RequestTrace
from diptych.router.requests.messages import FinishedEvent, UncheckedRequest, ValidatedRequest

_MAX_UNCHECKED = 128
_MAX_ERROR = 500
_NAMED = ("request_id", "label", "tenant", "model", "adapter_version", "reason", "error", "finish_reason")
"""Fields of the line that are left out when they are empty."""
_log = structlog.get_logger("diptych.access")


class _Switch:
    on = True


def switch(on: bool) -> None:
    """Switch the lines of this process on or off."""
    _Switch.on = on


@dataclass(slots=True)
class Access:
    """The fields of one request's line.

    Args:
        face: http, grpc or lookaside.
        route: "POST /v1/completions", or a gRPC method.
        status: of HTTP; 0: there is none.
    """

    face: str
    route: str
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    request_id: str = ""
    label: str = ""
    tenant: str = ""
    model: str = ""
    adapter_version: int = 0
    """Of the adapter that `model` names; 0: it names none."""
    reason: str = ""
    error: str = ""
    """Message of the error that ended it."""
    started: bool = False
    cancelled: bool = False
    finish_reason: str = ""
    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    quiet: bool = False
    """A probe or a scrape: logged at level DEBUG only."""

    def asked(self, spec: UncheckedRequest) -> None:
        """Called before anything of it was checked."""
        self.tenant = spec.tenant
        for name, value in (("label", spec.request_id), ("model", spec.model)):
            if isinstance(value, str) and len(value) <= _MAX_UNCHECKED:
                setattr(self, name, value)

    def prepared(self, request: ValidatedRequest) -> None:
        self.request_id = self.request_id or request.request_id
        self.label, self.tenant, self.model = request.label, request.tenant, request.shown_model
        self.adapter_version = 0 if request.adapter is None else request.adapter.version.number
        self.prompt_tokens += len(request.prompt.token_ids)

    def fail(self, reason: str, message: str = "") -> None:
        """The first reason counts."""
        if reason == RequestCancelledError.reason:
            self.cancelled = True
        elif not self.reason:
            self.reason, self.error = reason, message[:_MAX_ERROR]

    def failed(self, error: DiptychError) -> None:
        """The message of a caller's error is not logged: it may quote the request."""
        at = f"at {error.param}" if error.param else ""
        self.fail(error.reason, error.message if error.http_status >= 500 else at)

    def placed(self, trace: RequestTrace) -> None:
        """Add the placement, as known at the end."""
        facts, placement = trace.facts, trace.placement
        if facts is not None:
            decode, prefill = facts.decode, facts.prefill
        elif placement is not None:
            chosen = placement.chosen.prefill
            decode = placement.decode.worker_id
            prefill = decode if chosen is None else chosen.worker_id
        else:
            return
        for known, name in ((self.decode, decode), (self.prefill, prefill)):
            if name and name not in known:
                known.append(name)
        self.queue_s = max(self.queue_s, trace.waited_s)
        self.ttft_s = max(self.ttft_s, trace.ttft_s)

    def finished(self, reason: str, completion_tokens: int, cached_tokens: int) -> None:
        self.finish_reason = reason
        self.completion_tokens += completion_tokens
        self.cached_tokens += cached_tokens

    @property
    def outcome(self) -> str:
        """If there are both an error and a disconnect, the error came first."""
        if self.reason:
            return "failed" if self.started else "refused"
        if self.cancelled:
            return "cancelled"
        return "refused" if self.status >= 400 else "served"

    def write(self, now: float | None = None) -> None:
        """Write the line. `now`: on the clock of `began`; None: the monotonic one."""
        if not _Switch.on:
            return
        fields: dict[str, object] = {"face": self.face, "route": self.route, "outcome": self.outcome}
        for name in _NAMED:
            if value := getattr(self, name):
                fields[name] = value
        if self.prefill:
            fields["prefill"] = " ".join(self.prefill)
        if self.decode:
            fields["decode"] = " ".join(self.decode)
        fields["status"] = self.status
        if self.prompt_tokens:
            fields["prompt_tokens"] = self.prompt_tokens
            fields["cached_tokens"] = self.cached_tokens
            fields["completion_tokens"] = self.completion_tokens
            fields["queue_s"] = round(self.queue_s, 4)
            fields["ttft_s"] = round(self.ttft_s, 4)
        fields["total_s"] = round((time.monotonic() if now is None else now) - self.began, 4)
        (_log.debug if self.quiet else _log.info)("request", **fields)


current_access: ContextVar[Access | None] = ContextVar("current_access", default=None)


class logged:
    """The line of the block; it includes an error raised there. A class: a generator costs each request more."""

    __slots__ = ("_access", "_before")
    _before: Token[Access | None]

    def __init__(self, access: Access) -> None:
        self._access = access

    def __enter__(self) -> Access:
        self._before = current_access.set(self._access)
        return self._access

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DiptychError):
            self._access.failed(error)
        elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._access.cancelled = True
        elif isinstance(error, Exception):
            self._access.fail(InternalError.reason)
        current_access.reset(self._before)
        self._access.write()


def note_end(trace: RequestTrace, event: FinishedEvent | None) -> None:
    """A request of the current line has ended: well if there is an event; else it failed or the client disconnected."""
    access = current_access.get()
    if access is None:
        return
    access.placed(trace)
    if event is None:
        access.cancelled = True
    else:
        access.finished(event.reason.value, event.usage.completion_tokens, event.usage.cached_tokens)
