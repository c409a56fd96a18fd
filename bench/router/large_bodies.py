"""Stalls of a router's event loop while clients send it the largest bodies that it accepts, and some that it rejects.

    .venv/bin/python -P bench/router/large_bodies.py --out bench/results/large-bodies.json

One router without workers (a placed request gets a 503), SmolLM2's tokenizer, HTTP and gRPC. A task of its loop wakes
every 2 ms and records the longest delay. The clients are another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from diptych.bench.result import surroundings, write
from diptych.cli.models.store import resolve_model
from diptych.common.clock import MonotonicClock
from diptych.common.collector import set_collector
from diptych.common.secret import create_secret
from diptych.common.store.memory import MemoryStore
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.server import ApiServers

TICK_S = 0.002
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SENDER = """
import sys, threading, time, httpx
url, file, count = sys.argv[1:]
body = open(file, "rb").read()
def one():
    began = time.monotonic()
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=120)
    print(answer.status_code, round(time.monotonic() - began, 3), flush=True)
threads = [threading.Thread(target=one) for _ in range(int(count))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def tool(i: int) -> dict[str, Any]:
    properties = {f"p{j}": {"type": "string", "pattern": "(a|b){1,50}"} for j in range(1000)}
    return {
        "type": "function",
        "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}},
    }


def cases() -> Iterator[tuple[str, int, str, str]]:
    """(name, how many at once, path, body)"""
    few = {"max_tokens": 1}
    empty = [{"role": "user", "content": ""}]
    yield "4 MiB of one word", 4, TEXT, json.dumps({"prompt": "a" * 4_194_304, **few})
    yield "600 kB of one word, which might fit", 4, TEXT, json.dumps({"prompt": "a" * 600_000, **few})
    yield "220,000 messages", 2, CHAT, json.dumps({"messages": empty * 220_000, **few})
    yield "20,000 messages", 2, CHAT, json.dumps({"messages": empty * 20_000, **few})
    yield "8 MB of empty lists", 4, TEXT, '{"prompt": "a", "max_tokens": 1, "zz": [' + "[]," * 2_600_000 + "[]]}"
    yield "3 MB of empty lists", 4, TEXT, '{"prompt": "a", "max_tokens": 1, "zz": [' + "[]," * 980_000 + "[]]}"
    yield "the same with a surrogate pair", 2, TEXT, '{"prompt": "\\ud83d\\ude00", "zz": [' + "[]," * 980_000 + "[]]}"
    none = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "none", **few}
    yield "125 tools of 56 kB", 2, CHAT, json.dumps(none | {"tools": [tool(i) for i in range(125)]})
    yield "8 MB of choices", 2, TEXT, json.dumps({"prompt": "a", "guided_choice": ["a" * 8000] * 1000, **few})
    yield "900,000 prompt ids", 2, TEXT, json.dumps({"prompt": [300] * 900_000, **few})
    yield "2,000,000 stop ids", 2, TEXT, json.dumps({"prompt": "a", "stop_token_ids": [1] * 2_000_000, **few})
    yield (
        "200,000 tokens with their texts",
        2,
        "/tokenize",
        json.dumps({"prompt": "ab " * 200_000, "return_token_strs": True}),
    )


async def measure() -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp())
    create_secret(folder / "secret")
    model = str(resolve_model("smollm2"))
    config = RouterConfig(model=model, secret_file=str(folder / "secret"), worker_settle_s=0.1)
    frontend, servers = Frontend(config, store=MemoryStore(MonotonicClock())), ApiServers("127.0.0.1", 0, 0)
    await frontend.start()
    url = "http://" + (await servers.start(frontend, frontend.metrics)).http
    set_collector()
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(TICK_S)
            longest = max(longest, time.perf_counter() - slept - TICK_S)

    watching = asyncio.create_task(watch())
    found = []
    for name, count, path, body in cases():
        (folder / "body").write_text(body)
        command = [sys.executable, "-c", SENDER, url + path, str(folder / "body"), str(count)]
        await asyncio.sleep(0.5)
        longest = 0.0
        sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        answers = (await sender.communicate())[0].decode().split()
        found.append(
            {
                "body": name, "at_once": count, "bytes": len(body), "longest_stall_s": round(longest, 4),
                "statuses": answers[::2], "slowest_answer_s": max(map(float, answers[1::2])),
            }
        )  # fmt: skip
        print(f"{name:<36} x{count}  longest stall {longest * 1000:7.1f} ms  {' '.join(answers[::2])}", flush=True)
    watching.cancel()
    await servers.stop(1.0)
    await frontend.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    environment = surroundings()
    found = uvloop.run(measure())
    write(out, {"environment": environment, "bodies": found})


if __name__ == "__main__":
    main()
