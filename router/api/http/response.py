"""One generation as an ASGI response: whole or streamed, cancelled when the client disconnects.

Status and headers are sent only after a decode worker accepted the request, so that every earlier failure is a plain
error response. A later failure is one `data: {"error": ...}` event and the end of the stream without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.common.errors import DiptychError, InternalError
from diptych.router.api.http.event_ids import EventIds
from diptych.router.api.http.protocol import CHUNKS
from diptych.router.api.interface import RouterApi, accepted
from diptych.router.api.openai.answers import PING
from diptych.router.api.openai.errors import error_response, json_response, warning_headers
from diptych.router.api.openai.format import ResponseContext, ResponseFormatter
from diptych.router.api.openai.requests import ParsedRequest
from diptych.router.requests.batch import all_accepted
from diptych.router.requests.messages import FinishedEvent, GenerateEvent, UncheckedRequest, ValidatedRequest

PING_S = 15.0
SEND_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class GenerationResponse(Response):
    """Runs the generation inside the response, which can watch the connection.

    Args:
        event_ids: messages of a stream have ids.
        extra_headers: called when the response starts; headers of the tenant.
        ping_s: seconds without output after which a stream sends a comment line.
        send_timeout_s: seconds after which a client that does not read is disconnected.
    """

    def __init__(
        self,
        router_api: RouterApi,
        call: ParsedRequest,
        *,
        event_ids: bool = True,
        now: Callable[[], float] = time.time,
        extra_headers: Callable[[str], dict[str, str]] = lambda _: {},
        ping_s: float = PING_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._router_api = router_api
        self._call = call
        self._event_ids = event_ids
        self._now = now
        self._limit_headers = partial(extra_headers, call.spec.tenant)
        self._warning = warning_headers(call.warnings)
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._form: ResponseFormatter | None = None
        self._chunks: Callable[[bytes], Awaitable[None]] | None = None
        """See HttpProtocol.write_chunk; None: another server's, or a response without chunks."""
        self._streaming = False
        self._complete = False
        """The end of the response is being sent."""
        self._last_write = 0.0
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The work runs in this task, which is cancelled when the client leaves or reads nothing."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        left = False
        timer: asyncio.TimerHandle
        pings: set[asyncio.Task[None]] = set()

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                task.cancel()

        def on_gone(_: object) -> None:
            if not self._complete:  # the server says so after the last byte, too
                leave()

        def look() -> None:
            nonlocal timer
            if self._stuck():
                leave()
                return
            timer = loop.call_later(self._ping_s / 3, look)
            if self._is_silent():
                ping = asyncio.create_task(self._ping(send))
                pings.add(ping)
                ping.add_done_callback(pinged)

        def pinged(ping: asyncio.Task[None]) -> None:
            pings.discard(ping)
            if not ping.cancelled() and ping.exception() is not None:
                leave()

        timer = loop.call_later(self._ping_s / 3, look)
        gone = asyncio.create_task(_until_disconnect(receive))
        gone.add_done_callback(on_gone)
        try:
            await self._work(scope, receive, send)
        except asyncio.CancelledError:
            if not left or task.uncancel():
                raise
        finally:
            gone.remove_done_callback(on_gone)
            timer.cancel()
            gone.cancel()
            for ping in pings:
                ping.cancel()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = ""
        try:
            call = self._call
            prepared = await self._router_api.prepare(call.spec)
            request_id = prepared.request_id
            more = tuple([await self._router_api.prepare(_as_first(spec, prepared)) for spec in call.more])
            tokens, features = self._router_api.tokens(prepared.model), self._router_api.features(prepared.model)
            context = ResponseContext(prepared, prepared.created or int(self._now()), features, tokens, more)
            self._form = form = call.make_form(context)
            begun = all_accepted(self._router_api, (prepared, *more)) if more else accepted(self._router_api, prepared)
            async with begun as (started, events):
                if call.stream:
                    if scope.get("http_version") == "1.1":  # HTTP/1.0 has no chunks
                        self._chunks = scope.get("state", {}).get(CHUNKS)
                    ref = started.resume_ref if started is not None and self._event_ids else ""
                    ids = EventIds(form, ref, context.num_choices, prepared.seen)
                    await self._stream(ids, request_id, events, send)
                else:
                    answer = await self._collect(form, request_id, events)
                    self._complete = True
                    await answer(scope, receive, send)
        except DiptychError as error:
            await self._fail(error, request_id, scope, receive, send)
        except OSError:
            return  # the client's connection broke
        except Exception:
            _log.exception("unhandled error in request %s", request_id)
            bug = InternalError("internal error; the server's log has the traceback")
            await self._fail(bug, request_id, scope, receive, send)

    async def _stream(self, ids: EventIds, request_id: str, events: AsyncIterator[GenerateEvent], send: Send) -> None:
        headers = _SSE_HEADERS | {"x-request-id": request_id} | self._extra_headers()
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        self._streaming = True
        if first := ids.begin():
            await self._write(first, send)
        async for event in events:
            chunk = ids.chunks(event)
            if isinstance(event, FinishedEvent):
                await self._write(chunk, send, last=True)
                return
            if chunk:
                await self._write(chunk, send)
        raise InternalError("the answer ended without FinishedEvent")

    async def _write(self, chunk: bytes, send: Send, *, last: bool = False) -> None:
        self._writing_since = self._last_write = time.monotonic()
        if last:
            self._streaming, self._complete = False, True
        if self._chunks is not None and not last:
            await self._chunks(chunk)
        else:
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        self._writing_since = None

    async def _fail(self, error: DiptychError, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._call.renamed.get(error.param or "")
        if name is not None and error.param is not None:
            error.message = error.message.replace(error.param, name, 1)
            error.param = name
        if self._streaming and self._form is not None:
            await self._write(self._form.failure(error), send, last=True)
        else:
            self._complete = True
            await error_response(error, request_id, self._extra_headers())(scope, receive, send)

    def _extra_headers(self) -> dict[str, str]:
        return self._limit_headers() | self._warning

    async def _collect(
        self, form: ResponseFormatter, request_id: str, events: AsyncIterator[GenerateEvent]
    ) -> Response:
        async for event in events:
            if isinstance(event, FinishedEvent):
                body = form.whole(event)
                return json_response(body, headers={"x-request-id": request_id} | self._extra_headers())
            form.absorb(event)
        raise InternalError("the answer ended without FinishedEvent")

    def _stuck(self) -> bool:
        return self._writing_since is not None and time.monotonic() - self._writing_since > self._send_timeout_s

    def _is_silent(self) -> bool:
        return self._streaming and self._writing_since is None and time.monotonic() - self._last_write >= self._ping_s

    async def _ping(self, send: Send) -> None:
        if self._is_silent():
            await self._write(PING, send)


def _as_first(spec: UncheckedRequest, first: ValidatedRequest) -> UncheckedRequest:
    """A further prompt's request, with the first one's version of the adapter: one answer has one version."""
    if first.adapter is None:
        return spec
    return replace(spec, adapter=first.adapter.name, adapter_version=first.adapter.version.number)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
