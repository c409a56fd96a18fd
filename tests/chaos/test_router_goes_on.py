"""Two routers as real processes; kill -9 of the one that has all streams. Each goes on at the other one, where nothing is
computed again, and what its client got before and after is the undisturbed answer."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.cli.up.processes import free_port
from diptych.client import AsyncClient, InvalidRequestError
from diptych_tests import waiting
from diptych_tests.event_stream import messages, plain, undisturbed, undisturbed_after
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, body_of, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
ANSWER_S = 300.0
KEEP_S = 60.0
"""`detach_s`: longer than any of this takes on a busy machine. The default is 10."""
NUM_TOKENS = 40
WORDS = " ".join(f"w{number}" for number in range(3, 40))
SEEDED = {"temperature": 1.0, "ignore_eos": True, "stream": True, "max_tokens": NUM_TOKENS}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", body_of(ask(1, max_tokens=NUM_TOKENS), stream=True, stream_options={"include_usage": True})),
    ("/v1/completions", body_of(ask(2, max_tokens=NUM_TOKENS), stream=True, n=3, logprobs=2)),
    ("/v1/completions", body_of(ask(3, max_tokens=NUM_TOKENS), stream=True, presence_penalty=0.5, min_tokens=20)),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}], "seed": 4, **SEEDED}),
    (
        "/v1/responses",
        {"input": WORDS, "seed": 5, "temperature": 1.0, "ignore_eos": True, "stream": True}
        | {"max_output_tokens": NUM_TOKENS},
    ),
]


def start_second(cluster: FakeModelCluster) -> tuple[str, str]:
    """Another router process. Returns: its HTTP URL and its gRPC address."""
    command = list(cluster.commands["router"])
    ports = free_port("127.0.0.1"), free_port("127.0.0.1")
    for flag, port in zip(("--http-port", "--grpc-port"), ports, strict=True):
        command[command.index(flag) + 1] = str(port)
    cluster.start("router-2", command)
    return f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"


async def until_ready(url: str) -> None:
    async def ready() -> bool:
        try:
            return (await http.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as http:
        await waiting.until(ready)


def said(seen: list[tuple[str, str]]) -> Any:
    """What a client makes of a stream, but for what differs between two requests: ids, time, and what was cached."""
    text, ends, _ = plain(seen)
    made = list(text.values()) if all(isinstance(key, str) for key in text) else text
    return made, re.sub(r"req-[0-9a-f]{24}|\"?created(_at)?'?: \d+|call_\w+|'cached_tokens': \d+", "", repr(ends))


async def test_plain_clients_go_on_by_their_last_event(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2, detach_s=KEEP_S) as cluster:
        other, _ = start_second(cluster)
        await until_ready(other)
        async with (
            httpx.AsyncClient(base_url=cluster.http_url, timeout=ANSWER_S) as first,
            httpx.AsyncClient(base_url=other, timeout=ANSWER_S) as second,
        ):
            expected = [said(await undisturbed(second, path, body)) for path, body in BODIES]
            for name in ("decode-0", "decode-1"):
                await cluster.hold(name, after_steps=25)
            seen: list[list[tuple[str, str]]] = [[] for _ in BODIES]

            async def read(number: int) -> None:
                path, body = BODIES[number]
                async with first.stream("POST", path, json=body) as response:
                    async for pair in messages(response):
                        seen[number].append(pair)

            streams = [asyncio.create_task(read(number)) for number in range(len(BODIES))]
            await waiting.until(lambda: any(cluster.gates.held(name) for name in ("decode-0", "decode-1")))
            await waiting.until(lambda: all(seen) or any(stream.done() for stream in streams))
            cluster.kill_hard("router")
            killed = time.monotonic()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert all(isinstance(end, httpx.TransportError) for end in ends), ends
            assert not any("[DONE]" in message or "completed" in message for pairs in seen for message, _ in pairs)

            async def resume(number: int) -> list[tuple[str, str]]:
                path, body = BODIES[number]
                return await undisturbed_after(second, path, body, seen[number][-1][1])

            rest = [asyncio.create_task(resume(number)) for number in range(len(BODIES))]
            await waiting.until(lambda: attached(second, len(BODIES)))
            print(f"attached {len(BODIES)} answers {time.monotonic() - killed:.3f} s after the kill")
            for name in ("decode-0", "decode-1"):
                cluster.gates.open(name)
            for number, more in enumerate(await asyncio.gather(*rest)):
                assert said(seen[number] + more) == expected[number], BODIES[number]
            assert await outcomes(second) == {"attached": float(len(BODIES))}
            # and after its end an answer is kept, too: from the first message on
            path, body = BODIES[0]
            again = await undisturbed_after(second, path, body, seen[0][0][1])
            assert said([seen[0][0], *again]) == expected[0]
            cluster.start("router")
            await cluster.until_usable()
            await whole_answer_goes_on(cluster, second, "router-2", first)
        await cluster.idle_again()


async def whole_answer_goes_on(
    cluster: FakeModelCluster, at: httpx.AsyncClient, name: str, other: httpx.AsyncClient
) -> None:
    """`name`: the router at which a whole answer is asked for, and which is killed. Its caller has an idempotency key."""
    path, body = BODIES[1]
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    expected = (await at.post(path, json=body)).json()
    for worker in ("decode-0", "decode-1"):
        await cluster.hold(worker, after_steps=25)
    named = {"idempotency-key": "whole", "x-request-id": "whole"}
    lost = asyncio.create_task(at.post(path, json=body, headers=named))

    async def begun() -> bool:
        placements = (await at.get("/status.json")).json()["cluster"]["placements"]
        return any(one["label"] == "whole" and one["ttft_s"] > 0 for one in placements)

    await waiting.until(begun)
    cluster.kill_hard(name)
    with pytest.raises(httpx.TransportError):
        await lost
    found = asyncio.create_task(other.post(path, json=body, headers=named))
    await waiting.until(lambda: attached(other, 1))
    for worker in ("decode-0", "decode-1"):
        cluster.gates.open(worker)
    answer = (await found).json()
    for choices in (answer["choices"], expected["choices"]):
        choices.sort(key=lambda choice: choice["index"])
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 3 * NUM_TOKENS
    assert await outcomes(other) == {"attached": 1.0}


async def outcomes(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    found = [re.match(r'diptych_resumes_total\{.*outcome="(\w+)".*\} ([\d.]+)', line) for line in lines]
    return {match[1]: float(match[2]) for match in found if match}


async def attached(http: httpx.AsyncClient, number: int) -> bool:
    return (await outcomes(http)).get("attached") == number


async def test_the_sdk_goes_on_at_its_other_address(tmp_path: Path) -> None:
    """Eight streams; those that had not begun are asked for again."""
    async with fake_model_cluster(tmp_path, decode=2, detach_s=KEEP_S) as cluster:
        other, grpc_address = start_second(cluster)
        await until_ready(other)
        for name in ("decode-0", "decode-1"):
            await cluster.hold(name, after_steps=25)
        begun = [asyncio.Event() for _ in range(8)]

        async def read(number: int, client: AsyncClient) -> Any:
            stream = client.stream(**ask(number, max_tokens=NUM_TOKENS))
            async for _ in stream:
                begun[number].set()
            return stream.result

        async with AsyncClient([cluster.grpc_address, grpc_address], timeout_s=ANSWER_S) as client:
            streams = [asyncio.create_task(read(number, client)) for number in range(8)]
            await waiting.until(lambda: any(cluster.gates.held(name) for name in ("decode-0", "decode-1")))
            await waiting.until(lambda: any(event.is_set() for event in begun))
            cluster.kill_hard("router")
            num_begun = sum(event.is_set() for event in begun)
            async with httpx.AsyncClient(base_url=other, timeout=ANSWER_S) as http:

                async def all_attached() -> bool:
                    return (await outcomes(http)).get("attached", 0) >= num_begun

                await waiting.until(all_attached)
            for name in ("decode-0", "decode-1"):
                cluster.gates.open(name)
            for number, answer in enumerate(await asyncio.gather(*streams)):
                check(answer, ask(number, max_tokens=NUM_TOKENS))
            with pytest.raises(InvalidRequestError):
                await client.generate(prompt="")
        await cluster.idle_again()


async def test_a_request_moves_while_it_runs(tmp_path: Path) -> None:
    """`diptych move`, as a command."""
    async with fake_model_cluster(tmp_path, decode=2) as cluster:
        for name in ("decode-0", "decode-1"):
            await cluster.hold(name, after_steps=25)
        asked = ask(7, max_tokens=NUM_TOKENS, request_id="to-be-moved")
        async with cluster.client() as client:
            answer = asyncio.create_task(client.generate(**asked))
            await waiting.until(lambda: any(cluster.gates.held(name) for name in ("decode-0", "decode-1")))
            (here,) = (name for name in ("decode-0", "decode-1") if cluster.gates.held(name))
            (there,) = {"decode-0", "decode-1"} - {here}
            cluster.gates.open(there)
            command = [
                "-P",
                "-m",
                "diptych.cli",
                "move",
                "to-be-moved",
                "--to",
                there,
                "--address",
                cluster.grpc_address,
            ]
            process = await asyncio.create_subprocess_exec(
                cluster.commands["router"][0], *command, "--secret-file", str(cluster.root / "secret"),
                env=cluster.env | {"DIPTYCH_RUN_DIR": str(tmp_path / "none")}, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            said, _ = await process.communicate()
            assert process.returncode == 0
            assert re.search(rf"was on {here}, and goes on at {there} after \d+ tokens", said.decode())
            done = await answer
            check(done, asked)
            assert [(a.decode, a.failure) for a in done.explanation.attempts] == [
                (here, "moved by operator"),
                (there, ""),
            ]
            cluster.gates.open(here)
        await cluster.idle_again()
