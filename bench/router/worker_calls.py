"""What the token of calls to workers costs: calls and messages of a stream, with and without it, in turn.

    python -P -m diptych.bench worker-calls --out bench/results/worker-calls.json

Client and servers share one event loop on one core, so the time of a call is that of both sides.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from diptych.bench.result import spread, surroundings, write
from diptych.common.secret import call_key, call_token
from diptych.rpc.call_token import TokenInterceptor
from diptych.rpc.channels import bind, new_server, open_channel

ROUNDS, CALLS, MESSAGES = 15, 1000, 2000
ARMS = ("no token", "token")


async def _serve(interceptors: tuple[TokenInterceptor, ...]) -> tuple[grpc.aio.Server, str]:
    async def echo(request: bytes, _: object) -> bytes:
        return request

    async def echoes(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    methods = {
        "Call": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.stream_stream_rpc_method_handler(echoes),
    }
    server = new_server(interceptors)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", methods),))
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    return server, address


async def _calls(channel: Any) -> float:
    """Seconds of a call."""
    call = channel.unary_unary("/bench/Call")
    began = time.perf_counter()
    for _ in range(CALLS):
        await call(b"x" * 100)
    return (time.perf_counter() - began) / CALLS


async def _messages(channel: Any) -> float:
    """Seconds of a message there and back, on one stream."""
    stream = channel.stream_stream("/bench/Stream")()
    began = time.perf_counter()
    for _ in range(MESSAGES):
        await stream.write(b"x" * 100)
        await stream.read()
    took_s = (time.perf_counter() - began) / MESSAGES
    stream.cancel()
    return took_s


async def measure() -> dict[str, dict[str, Any]]:
    """Microseconds of a call and of a message in each arm."""
    callers = TokenInterceptor()
    plain, there = await _serve(())
    guarded, here = await _serve((callers,))
    token = call_token(call_key(bytes(32)), here)
    callers.expect(token, here)
    channels = dict(zip(ARMS, (open_channel(there), open_channel(here, token=token)), strict=True))
    found: dict[str, dict[str, list[float]]] = {arm: {"call_us": [], "message_us": []} for arm in ARMS}
    for number in range(ROUNDS + 1):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            row = {"call_us": await _calls(channels[arm]) * 1e6, "message_us": await _messages(channels[arm]) * 1e6}
            if number:  # the first round warms up
                for name, value in row.items():
                    found[arm][name].append(round(value, 2))
    for channel in channels.values():
        await channel.close()
    for server in (plain, guarded):
        await server.stop(0)
    return {arm: {name: spread(values) for name, values in rows.items()} for arm, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    environment = surroundings()
    found = uvloop.run(measure())
    for arm, rows in found.items():
        print(arm, {name: round(row["median"], 1) for name, row in rows.items()}, flush=True)
    write(out, {"environment": environment, **found})


if __name__ == "__main__":
    main()
