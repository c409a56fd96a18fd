"""The client of over_http: one streamed completion over a raw socket; it records arrival times and parses afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

TIMEOUT_S = 120.0


@dataclass(slots=True)
class Answer:
    """One answer.

    Args:
        begun: send time; like `times` on the monotonic clock.
        times, counts: of each message with tokens, and the number of tokens.
        kv_bytes: transferred from prefill to decode.
        kv_ranges, kv_ranges_overlapped: messages with KV, and those sent while the prompt was computed.
        pulls: KV that workers took from each other's caches for it, as the explanation has it.
        cached_prefill: prompt tokens that the prefill worker had, or had pulled.
    """

    begun: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    kv_bytes: int = 0
    kv_ranges: int = 0
    kv_ranges_overlapped: int = 0
    pulls: list[dict[str, Any]] = field(default_factory=list)
    cached_prefill: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.pieces: list[tuple[float, bytes]] = []
        self.over = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-32:]
        if b"data: [DONE]" in self._tail:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def ask(port: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
    """Greedy, to its full length. `fields`: further fields of the body."""
    body = json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "content-type: application/json",
        "x-diptych-explain: 1",
        "connection: close",
        f"content-length: {len(body)}",
    )
    request = "\r\n".join((*head, "", "")).encode() + body
    answer = Answer(time.monotonic())
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: _Connection(request), "127.0.0.1", port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await connection.over
    except TimeoutError:
        answer.error = f"not over after {TIMEOUT_S:.0f} s"
    finally:
        if connection.transport is not None:
            connection.transport.close()
    read(connection.pieces, answer)
    return answer


def read(pieces: Sequence[tuple[float, bytes]], answer: Answer) -> None:
    """Parse the stream's events into `answer`, each with the time at which it was complete."""
    raw = b"".join(data for _, data in pieces)
    starts, total = [], 0
    for _, data in pieces:
        starts.append(total)
        total += len(data)
    head, _, _ = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        answer.error = answer.error or raw[:300].decode("utf-8", "replace") or "no answer"
        return
    done, at = False, len(head)
    # Our server cuts transfer chunks at events, so an event never contains a chunk's border.
    while (begin := raw.find(b"data: ", at)) >= 0 and (end := raw.find(b"\n\n", begin)) >= 0:
        at, data = end, raw[begin + 6 : end]
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = answer.error or str(event["error"])[:300]
            return
        reported = event.get("diptych") or {}
        answer.kv_bytes = reported.get("kv_bytes", answer.kv_bytes)
        answer.kv_ranges = reported.get("kv_ranges", answer.kv_ranges)
        answer.pulls = reported.get("pulls", answer.pulls)
        answer.cached_prefill = reported.get("cached_tokens_prefill", answer.cached_prefill)
        answer.kv_ranges_overlapped = reported.get("kv_ranges_overlapped", answer.kv_ranges_overlapped)
        ids = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        if ids:
            answer.times.append(pieces[bisect_right(starts, end + 1) - 1][0])
            answer.counts.append(len(ids))
            answer.token_ids += ids
    if not done:
        answer.error = answer.error or "the stream was cut"
