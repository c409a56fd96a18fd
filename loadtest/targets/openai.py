"""Any OpenAI-compatible server over HTTP: completions or chat, streamed.

Token counts come from the chunks' `token_ids` if the server sends them (Diptych and vLLM do on request), else from the
usage at the end. The role chunk is not a token.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from diptych.loadtest.figures.record import Outcome, ServerFacts
from diptych.loadtest.targets.target import Accepted, Ask, Chunk, Ended, Event, Sampling, TargetError

REFUSALS = frozenset({429, 503, 529})
_MAX_EVENT_BYTES = 16 * 2**20


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Two names of one field; the first is the newer one."""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None
    diptych: ServerFacts | None = None


class OpenAITarget:
    """An OpenAI-compatible server.

    Args:
        url: http://host:port, with or without /v1.
        model: "" uses the server's first.
        tenant_header: HTTP header with the tenant.
        tenant_keys: tenant -> API key, in place of `api_key`.
        ca_file: PEM file of the authorities to trust.
        extra: additional fields of every request's body.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "",
        model: str = "",
        api: Literal["completions", "chat"] = "completions",
        sampling: Sampling | None = None,
        api_key: str = "",
        tenant_header: str = "",
        tenant_keys: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.label = label or self.url
        self._model = model
        self._path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        self._chat = api == "chat"
        self._sampling = sampling or Sampling()
        self._tenant_header = tenant_header
        self._headers = {"content-type": "application/json"}
        if self._sampling.explain:
            self._headers["x-diptych-explain"] = "1"
        self._tenant_keys = dict(tenant_keys or {})
        api_key = api_key or next(iter(self._tenant_keys.values()), "")  # for the model's name and the warm-up
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._ca_file = ca_file
        self._extra = dict(extra or {})
        self._session: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Event)

    async def open(self) -> str:
        """Raises: TargetError."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=300.0, ssl=self._trust(), happy_eyeballs_delay=None
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept-encoding"),
            timeout=aiohttp.ClientTimeout(total=self._sampling.timeout_s, connect=30.0),
            read_bufsize=2**18,
        )
        if not self._model:
            try:
                async with self._session.get(self.url + "/v1/models", headers=self._headers) as answer:
                    if answer.status != 200:
                        said = f"HTTP {answer.status}: {(await answer.text())[:400]}"
                        raise TargetError(Outcome.ERROR, f"{self.url}/v1/models answers {said}", status=answer.status)
                    self._model = (await answer.json())["data"][0]["id"]
            except (aiohttp.ClientError, TimeoutError) as error:
                raise TargetError(Outcome.ERROR, f"{self.url}/v1/models does not answer: {_said(error)}") from None
            except (LookupError, TypeError, ValueError):
                raise TargetError(Outcome.ERROR, f"{self.url}/v1/models answers with no list of models") from None
        return self._model

    def _trust(self) -> ssl.SSLContext | bool:
        """Raises: TargetError."""
        if self._ca_file is None:
            return True
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise TargetError(Outcome.ERROR, f"ca_file {self._ca_file}: {_said(error)}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # lets the transports close

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self._extra,
        }
        if self._sampling.ignore_eos:
            body["ignore_eos"] = True
        if ask.tenant:
            body["user"] = ask.tenant
        if self._chat:
            messages = ask.messages or ({"role": "user", "content": ask.text},)
            body["messages"] = messages
        else:
            body["prompt"] = ask.token_ids or ask.text
        return body

    async def send(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Raises: TargetError."""
        assert self._session is not None, "open() first"
        headers = self._headers
        if ask.tenant and self._tenant_header:
            headers = headers | {self._tenant_header: ask.tenant}
        if ask.tenant in self._tenant_keys:
            headers = headers | {"authorization": f"Bearer {self._tenant_keys[ask.tenant]}"}
        data = msgspec.json.encode(self.body(ask))
        try:
            async with self._session.post(self.url + self._path, data=data, headers=headers) as answer:
                if answer.status != 200:
                    said = (await answer.text())[:400]
                    kind = Outcome.REFUSED if answer.status in REFUSALS else Outcome.ERROR
                    raise TargetError(kind, f"HTTP {answer.status}: {said}", status=answer.status)
                async for event in self._events(answer.content):
                    yield event
        except TimeoutError:
            raise TargetError(Outcome.TIMEOUT, f"no end within {self._sampling.timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise TargetError(Outcome.ERROR, f"cannot connect: {_said(error)}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TargetError(Outcome.CUT, f"the connection broke: {_said(error)}") from None

    async def _events(self, stream: aiohttp.StreamReader) -> AsyncGenerator[Event, None]:
        buffer = b""
        end = Ended()
        finished = False
        async for piece in stream.iter_any():
            buffer += piece
            if b"\r" in buffer:
                buffer = buffer.replace(b"\r\n", b"\n")
            *events, buffer = buffer.split(b"\n\n")
            if len(buffer) > _MAX_EVENT_BYTES:
                raise TargetError(Outcome.ERROR, "an event without end")
            for raw in events:
                data = _data_of(raw)
                if data is None:
                    continue
                if data == b"[DONE]":
                    if not finished:
                        raise TargetError(Outcome.CUT, "[DONE] arrived without a finish_reason")
                    yield end
                    return
                event = self._decoded(data)
                if event.error is not None:
                    raise TargetError(Outcome.ERROR, f"error in the stream: {event.error}"[:400])
                finished = _gather(event, end) or finished
                found = _chunk_of(event)
                if found is not None:
                    yield found
        raise TargetError(Outcome.CUT, "the stream ended without [DONE]")

    def _decoded(self, data: bytes) -> _Event:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise TargetError(Outcome.ERROR, f"an event that is not a chunk: {error}: {data[:120]!r}") from None


def _data_of(raw: bytes) -> bytes | None:
    """The data of one server-sent event; None for comments and empty events."""
    if raw.startswith(b"data:") and b"\n" not in raw:
        return raw[5:].strip()
    lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _gather(event: _Event, end: Ended) -> bool:
    """Facts of the end; returns whether this event finishes the choice."""
    if event.usage is not None:
        end.input_tokens, end.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            end.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if event.diptych is not None:
        end.server = event.diptych
    for choice in event.choices:
        if choice.finish_reason:
            end.finish_reason = choice.finish_reason
            return True
    return False


def _chunk_of(event: _Event) -> Event | None:
    if not event.choices:
        return None
    choice = event.choices[0]
    text = choice.text or ""
    if choice.delta is not None:
        text = choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content or ""
    if choice.token_ids:
        return Chunk(text, choice.token_ids, len(choice.token_ids))
    if text:
        return Chunk(text)
    return Accepted() if choice.finish_reason is None else None


def _said(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its own text names TLS, whether it is used or not
        cause = error.os_error
        return os.strerror(cause.errno) if isinstance(cause, ConnectionError) and cause.errno else str(cause)
    return str(error) or type(error).__name__
