"""Time to first token of a short request: alone, beside long prompts of other tenants and of its own, and in a full
pool.

    python -P -m diptych.bench.router.beside_long_prompts [--prefill-workers 1 2] [--seconds 30] [--out FILE] [--before FILE]

Each pool is a `diptych up` with default flags (except API keys, for tenants). `--longs` long prompts of random tokens
run at a time, each followed by the next; meanwhile short requests are sent one after the other over HTTP, of one and of
128 tokens alternately. A last cluster has a KV pool of FULL_POOL, which the streams of another tenant outgrow.
`--before`: a result of an older version, drawn beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.result import RESULTS, surroundings, write
from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych.loadtest.reports.svg import bars

RESULT = RESULTS / "router" / "beside.json"
SITUATIONS = ("alone", "beside others' long ones", "beside its own long ones")
_IN_SHORT = dict(zip(SITUATIONS, ("alone", "others' long", "own long"), strict=True))
FULL_POOL = ("--num-blocks", "64", "--max-model-len", "960")
FULL_SITUATIONS = ("alone", "beside streams that outgrow the pool")
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 3, 64, 600
"""Three answers of 600 tokens: up to 1,992 tokens of KV, where the pool has 1,024."""
SHORT = (1, 128)
LONG = (6000, 3000, 1500)
PAUSE_S = 0.2
START_S = 240.0
REQUEST_S = 300.0


class Cluster:
    """`diptych up` with one key for each of two tenants."""

    def __init__(self, prefill_workers: int, folder: Path, pool: Sequence[str] = ()) -> None:
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
        self._env["DIPTYCH_RUN_DIR"] = str(folder)
        self.keys = {tenant: self._add(folder, tenant) for tenant in ("one", "other")}
        self._env["DIPTYCH_API_KEY"] = self.keys["one"]
        port, grpc_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--http-port", str(port), "--grpc-port", str(grpc_port), "--prefill-workers", str(prefill_workers)]
        self._log = (folder / "up.log").open("wb")
        self._process = child.start(
            [*_DIPTYCH, "up", *flags, *pool, "--keys-file", str(folder / "keys.json")],
            env=self._env, stdout=self._log, stderr=subprocess.STDOUT, new_session=True,
        )  # fmt: skip

    def _add(self, folder: Path, tenant: str) -> str:
        command = [*_DIPTYCH, "keys", "add", tenant, "--keys-file", str(folder / "keys.json")]
        done = subprocess.run(command, env=self._env, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def wait_ready(self) -> None:
        """Raises: RuntimeError with the log's end."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                headers = {"authorization": f"Bearer {self.keys['one']}"}
                body = {"model": self.model(), "prompt": [1], "max_tokens": 1}
                httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
                return
            except (httpx.HTTPError, LookupError):
                time.sleep(0.5)
        raise RuntimeError(f"the cluster did not start:\n{Path(self._log.name).read_text()[-2000:]}")

    def model(self) -> str:
        headers = {"authorization": f"Bearer {self.keys['one']}"}
        found = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=10).raise_for_status().json()
        return str(found["data"][0]["id"])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._log.close()


_DIPTYCH = (sys.executable, "-P", "-m", "diptych.cli")


class Client:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._model = cluster.model()
        self._http = httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S)
        self._chance = random.Random(7)

    async def ttft_s(self, tenant: str, num_tokens: int) -> float:
        """TTFT of an uncached prompt. Raises: httpx.HTTPError; RuntimeError when no token arrived."""
        prompt = [self._chance.randrange(1000, 40_000) for _ in range(num_tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "stream": True}
        headers = {"authorization": f"Bearer {self._cluster.keys[tenant]}"}
        began = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - began
        raise RuntimeError("the answer has no token")

    async def keep_long(self, tenant: str, number: int, durations: list[float]) -> None:
        while True:
            durations.append(await self.ttft_s(tenant, LONG[number % len(LONG)]))

    async def keep_stream(self, tenant: str, durations: list[float]) -> None:
        """Raises: RuntimeError when an answer is incomplete."""
        while True:
            prompt = [self._chance.randrange(1000, 40_000) for _ in range(STREAM_PROMPT)]
            body = {"model": self._model, "prompt": prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
            headers = {"authorization": f"Bearer {self._cluster.keys[tenant]}"}
            began = time.perf_counter()
            answer = await self._http.post("/v1/completions", json=body, headers=headers)
            usage = answer.raise_for_status().json()["usage"]
            if usage["completion_tokens"] != STREAM_TOKENS:
                raise RuntimeError(f"an answer has {usage['completion_tokens']} of {STREAM_TOKENS} tokens")
            durations.append(time.perf_counter() - began)

    async def situation(self, name: str, longs: int, seconds: float) -> dict[str, Any]:
        tenant = {SITUATIONS[1]: "other", SITUATIONS[2]: "one"}.get(name, "")
        durations: list[float] = []
        if name == FULL_SITUATIONS[1]:
            tasks = [asyncio.create_task(self.keep_stream("other", durations)) for _ in range(STREAMS)]
            await asyncio.sleep(10.0)  # until the pool is nearly full; later results do not depend on it
        else:
            tasks = [asyncio.create_task(self.keep_long(tenant, i, durations)) for i in range(longs if tenant else 0)]
        await asyncio.sleep(2.0 if tenant else 0.0)
        found: dict[int, list[float]] = {size: [] for size in SHORT}
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for size in SHORT:
                found[size].append(await self.ttft_s("one", size))
                await asyncio.sleep(PAUSE_S)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        if failed := [str(one) for one in ended if not isinstance(one, asyncio.CancelledError)]:
            raise RuntimeError(f"a long request failed: {failed[0]}")
        await asyncio.sleep(2.0)  # cancelled requests leave the workers
        return {"short": {str(size): _summary(found[size]) for size in SHORT}, "long_ended": len(durations)}

    async def close(self) -> None:
        await self._http.aclose()


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "count": len(ordered),
        **{f"{name}_s": round(value, 4) for name, value in at.items()},
        "max_s": round(ordered[-1], 4),
    }


async def _situations(cluster: Cluster, names: Sequence[str], longs: int, seconds: float) -> dict[str, Any]:
    client = Client(cluster)
    try:
        for size in (*SHORT, 600, *SHORT):  # warm-up; the workers' rates are measured
            await client.ttft_s("one", size)
        return {name: await client.situation(name, longs, seconds) for name in names}
    finally:
        await client.close()


def _draw(result: dict[str, Any], before: dict[str, Any] | None, path: Path) -> None:
    panels = []
    for pool in result["pools"]:
        for size in SHORT:
            rows: dict[str, float] = {}
            for label, version in (("", result), ("was: ", before)):
                if version is not None and pool in version["pools"]:
                    for name, situation in version["pools"][pool].items():
                        rows[label + _IN_SHORT.get(name, name)] = situation["short"][str(size)]["p99_s"]
            panels.append((f"p99 TTFT in s, prompts of {size}, {pool}", rows))
    path.write_text(bars(panels, columns=2), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--longs", type=int, default=3, help="long prompts under way at a time")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three situations")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--before", type=Path, default=None)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster is stopped
    result: dict[str, Any] = {
        "surroundings": surroundings(),
        "setting": {"long_tokens": LONG[: given.longs], "longs": given.longs, "seconds": given.seconds},
        "pools": {},
    }
    runs: list[tuple[str, int, tuple[str, ...], tuple[str, ...], float]] = [
        (f"{count}P+1D", count, (), SITUATIONS, given.seconds) for count in given.prefill_workers
    ]
    runs.append(("1P+1D, 64 blocks", 1, FULL_POOL, FULL_SITUATIONS, 2 * given.seconds))
    for label, count, pool, names, seconds in runs:
        with tempfile.TemporaryDirectory(prefix="diptych-beside-") as folder:
            cluster = Cluster(count, Path(folder), pool)
            try:
                cluster.wait_ready()
                result["pools"][label] = situations = asyncio.run(_situations(cluster, names, given.longs, seconds))
            finally:
                cluster.stop()
        for name, situation in situations.items():
            print(label, name, situation, flush=True)
    write(given.out, result)
    before = None if given.before is None else json.loads(given.before.read_text(encoding="utf-8"))
    _draw(result, before, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
