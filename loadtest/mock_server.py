"""A mock OpenAI-compatible server with scripted timing, to check load harnesses.

The first token is sent `first_token_s` after a request's arrival, alone; then `tokens_per_chunk` tokens at a time, each
chunk when its last token is due, a token every `token_s`. Refusals, cuts and errors occur at given rates from a seed;
`slots` limits the requests served at once, the others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import msgspec
from aiohttp import web

from diptych.common.addresses import host_port
from diptych.loadtest.figures.stats import dist
from diptych.loadtest.virtual_loop import precise_clock

MODEL = "mock"
WORD = " word"
TOKEN_ID = 2134


@dataclass(frozen=True, slots=True)
class Script:
    """Seconds; rates are shares of the requests."""

    first_token_s: float = 0.1
    token_s: float = 0.02
    tokens_per_chunk: int = 4
    slots: int = 0
    refuse_rate: float = 0.0
    cut_rate: float = 0.0
    error_rate: float = 0.0
    cached_share: float = 0.0
    default_tokens: int = 64
    seed: int = 0

    def chunks(self, num_tokens: int) -> Iterator[tuple[float, int]]:
        """(seconds after arrival, tokens) of each chunk."""
        yield self.first_token_s, 1
        sent = 1
        while sent < num_tokens:
            tokens = min(self.tokens_per_chunk, num_tokens - sent)
            sent += tokens
            yield self.first_token_s + self.token_s * (sent - 1), tokens


class MockServer:
    """Answers by the script, on the running loop's clock."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._rng = Random(script.seed)
        self._slots = asyncio.Semaphore(script.slots) if script.slots else None
        self.lateness: list[float] = []
        """Lateness of every chunk against the script, in seconds."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/mock", self._truth)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mock", "max_model_len": 1_000_000}
        return web.json_response({"object": "list", "data": [card]})

    async def _truth(self, _: web.Request) -> web.Response:
        """The mock server's lateness against the script, in seconds."""
        late = dist(self.lateness)
        return web.json_response({"chunks": late.count, "mean_s": late.mean, "p50_s": late.median, "p99_s": late.p99})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrived = precise_clock()()
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        chance = self._rng.random()
        if chance < self._script.refuse_rate:
            error = {"error": {"message": "shed", "type": "overloaded_error", "param": None, "code": "overloaded"}}
            return web.json_response(error, status=529, headers={"retry-after": "1"})
        if self._slots is None:
            return await self._answer(request, body, arrived, 0.0, chance)
        async with self._slots:
            begun = precise_clock()()
            return await self._answer(request, body, begun, begun - arrived, chance)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], zero: float, queued_s: float, chance: float
    ) -> web.StreamResponse:
        answer = _Answer(body, request.path.endswith("/chat/completions"), self._script, queued_s)
        now = precise_clock()
        chunks = list(self._script.chunks(answer.num_tokens))
        if not body.get("stream"):
            await asyncio.sleep(max(0.0, zero + chunks[-1][0] - now()))
            return web.json_response(answer.whole())
        with contextlib.suppress(ConnectionError):  # the client disconnected
            return await self._stream(request, answer, chunks, zero, chance)
        return web.Response()

    async def _stream(
        self,
        request: web.Request,
        answer: _Answer,
        chunks: list[tuple[float, int]],
        zero: float,
        chance: float,
    ) -> web.StreamResponse:
        now = precise_clock()
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        if answer.chat:
            await response.write(answer.role())
        fault = chance - self._script.refuse_rate
        stop_after = max(1, len(chunks) // 2)
        for number, (due, tokens) in enumerate(chunks):
            wait = zero + due - now()
            if wait > 0:
                await asyncio.sleep(wait)
            if number >= stop_after and fault < self._script.cut_rate:
                if request.transport is not None:
                    request.transport.close()
                return response
            if number >= stop_after and fault < self._script.cut_rate + self._script.error_rate:
                await response.write(b'data: {"error": {"message": "scripted", "type": "server_error"}}\n\n')
                return response
            await response.write(answer.chunk(tokens))
            self.lateness.append(now() - zero - due)
        wants_facts = request.headers.get("x-diptych-explain") == "1"
        await response.write(answer.end(wants_facts))
        await response.write_eof()
        return response


class _Answer:
    """The bytes of one answer, in the requested OpenAI format."""

    def __init__(self, body: dict[str, Any], chat: bool, script: Script, queued_s: float) -> None:
        self.chat = chat
        self.num_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or script.default_tokens)
        self._script = script
        self._queued_s = queued_s
        self._with_ids = bool(body.get("return_token_ids"))
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._num_input = _prompt_tokens(body)
        self._head = {
            "id": "mock-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
        }

    def role(self) -> bytes:
        return self._sse({"delta": {"role": "assistant", "content": ""}})

    def chunk(self, tokens: int) -> bytes:
        text = WORD * tokens
        choice: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        if self._with_ids:
            choice["token_ids"] = [TOKEN_ID] * tokens
        return self._sse(choice)

    def end(self, with_facts: bool) -> bytes:
        choice: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        extra: dict[str, Any] = {"diptych": self._facts()} if with_facts else {}
        out = self._sse(choice | {"finish_reason": "length"}, extra)
        if self._with_usage:
            out += b"data: " + msgspec.json.encode(self._head | {"choices": [], "usage": self._usage()}) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        text = WORD * self.num_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head | {"object": kind, "choices": [choice], "usage": self._usage()}

    def _facts(self) -> dict[str, Any]:
        first = self._queued_s + self._script.first_token_s
        return {
            "request_id": "mock-1",
            "prefill": "mock-prefill",
            "decode": "mock-decode",
            "transport": "mock",
            "kv_bytes": self._num_input * 1024,
            "reserved_s": self._queued_s,
            "first_token_s": first,
            "kv_complete_s": first + self._script.token_s / 2,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_input,
            "completion_tokens": self.num_tokens,
            "total_tokens": self._num_input + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": int(self._num_input * self._script.cached_share)},
        }

    def _sse(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        full = {"index": 0, "finish_reason": None} | choice
        return b"data: " + msgspec.json.encode(self._head | {"choices": [full]} | (extra or {})) + b"\n\n"


def _prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(len(str(message.get("content") or "").split()) for message in body.get("messages") or ())


async def serve(script: Script, *, host: str = "127.0.0.1", port: int = 0) -> tuple[web.AppRunner, MockServer, str]:
    """Start serving; returns (runner: await its cleanup(), the server, its URL)."""
    server = MockServer(script)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    listener = socket.create_server((host, port), backlog=4096)
    await web.SockSite(runner, listener, backlog=4096).start()
    return runner, server, f"http://{host_port(host, listener.getsockname()[1])}"


async def run_forever(script: Script, host: str, port: int, *, collect: bool = True) -> None:
    """Serve until cancelled; the URL is the first line on stdout.

    Args:
        collect: False: no garbage collection, for the duration of a measurement: with thousands of open streams a full
            collection blocks all of them for a quarter of a second.
    """
    _, _, url = await serve(script, host=host, port=port)
    if not collect:
        gc.disable()
    print(url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """`python -P -m diptych.loadtest.mock_server [--port N] [--first-token-s X] ...`; prints its URL."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    for found in fields(Script):
        kind = type(found.default)
        parser.add_argument("--" + found.name.replace("_", "-"), type=kind, default=found.default)
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    uvloop.run(run_forever(Script(**given), host, port, collect=False))


if __name__ == "__main__":
    main()
