"""How the throughput of `diptych router --router-processes N` grows with N, before workers without an engine.

    python -P -m diptych.bench.router.processes [--processes 1 2 4 8] [--rounds 2] [--seconds 10] [--out FILE]

For every N and round: the shipped router before N mock workers and a real Valkey, and CLIENTS processes of clients for each
router process, each with USERS requests at any time. What is counted are answers that ended within SECONDS, after SECONDS / 4
of the same load. The rounds go through the N in alternating order.

    request     answers of one token, whole
    token       answers of 257 tokens, streamed as fast as they come: most are merged

Checked: every answer has the tokens that were asked for and its usage, every process served, and /metrics of the address
counts all requests that were sent. `of_one` is the throughput over that of one process, `busy` how much of a core each router
process used, and all clients and all workers together: with fewer cores than these need, throughput is not the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from diptych.bench.gpu.random_model import write_tokenizer
from diptych.bench.part import end_process, running_part
from diptych.bench.result import spread, surroundings, write
from diptych.bench.router.processes_client import Load
from diptych.bench.router.relay_parts import worker_records
from diptych.cli.temporary import temporary_folder
from diptych.cli.up import embedded_redis
from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych.common.cores import usable_cores
from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret
from diptych.common.store.redis_store import RedisStore

VOCAB = 32_768
START_S = 120.0
CLIENT_START_S = 5.0
GRPC_CLIENTS = 4
"""For each client over HTTP, with as many users in all: an SDK client has one connection, which belongs to one process."""
KINDS = {"request": 1, "token": 257}
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What all routers of a run have in common."""

    folder: Path
    secret: Path
    redis_url: str
    workers: tuple[psutil.Process, ...]


@dataclass(frozen=True, slots=True)
class _Router:
    http: str
    grpc: str
    processes: tuple[psutil.Process, ...]


def _model(folder: Path) -> Path:
    """A model folder without weights."""
    folder.mkdir()
    write_tokenizer(folder, VOCAB)
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def _cluster(num_workers: int) -> Iterator[_Cluster]:
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(temporary_folder("diptych-bench-")))
        secret, model, socket = root / "secret", _model(root / "model"), root / "redis"
        key = create_secret(secret)
        server = embedded_redis.start_server(socket, log=root / "redis.log", folder=root)
        stack.callback(end_process, server)
        if not embedded_redis.wait_ready(server, socket, deadline_s=START_S):
            raise ConfigError("bench", "redis", (root / "redis.log").read_text()[-1000:])
        parts = [stack.enter_context(running_part("diptych.bench.peers.mock", str(secret))) for _ in range(num_workers)]
        url = f"unix://{socket}"

        async def register() -> None:
            store = RedisStore(url, cluster="diptych")
            for number, (_, addresses) in enumerate(parts):
                for record in worker_records(model, key, addresses[1], number, "mock"):
                    await store.put_worker(record, ttl_s=86_400.0)
            await store.close()

        asyncio.run(register())
        yield _Cluster(model, secret, url, tuple(process for process, _ in parts))


@contextlib.contextmanager
def _router(cluster: _Cluster, count: int) -> Iterator[_Router]:
    """The shipped command. Raises: ConfigError when not all of its processes serve in time."""
    http, grpc = free_port("127.0.0.1"), free_port("127.0.0.1")
    flags = {
        "model": cluster.folder, "secret-file": cluster.secret, "redis-url": cluster.redis_url, "http-port": http,
        "grpc-port": grpc, "router-processes": count,
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "diptych.cli", "router", *(f"--{n}={v}" for n, v in flags.items())]
    log = cluster.folder.parent / f"router-{http}.log"
    with log.open("wb") as output:
        process = child.start(command, stdout=output, stderr=output, new_session=True)
    try:
        until = time.monotonic() + START_S
        url = f"http://127.0.0.1:{http}"
        while len(_series(url, "diptych_requests_total")) < count or _get(url + "/ready") is None:
            if process.poll() is not None or time.monotonic() > until:
                raise ConfigError("bench", f"{count} processes", f"did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        parent = psutil.Process(process.pid)
        yield _Router(url, f"grpc://127.0.0.1:{grpc}", tuple(parent.children()) if count > 1 else (parent,))
    finally:
        end_process(process)


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:  # noqa: S310 - ours
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def _series(url: str, name: str) -> list[float]:
    lines = (_get(url + "/metrics") or "").splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _run(cluster: _Cluster, router: _Router, face: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One measured load. Raises: ConfigError when a check fails."""
    more = 1 if face == "HTTP" else GRPC_CLIENTS
    num_clients, users = more * args.clients * len(router.processes), max(1, args.users // more)
    before = _series(router.http, "diptych_requests_total")
    begin = time.monotonic() + CLIENT_START_S + args.seconds / 4
    load = Load(
        router.http if face == "HTTP" else router.grpc, users, args.prompt_tokens, KINDS[kind], begin, begin + args.seconds
    )  # fmt: skip
    command = [sys.executable, "-P", "-m", "diptych.bench.router.processes_client", json.dumps(asdict(load))]
    clients = [child.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(num_clients)]
    try:
        measured = [*router.processes, *cluster.workers, *(psutil.Process(client.pid) for client in clients)]
        time.sleep(max(0.0, begin - time.monotonic()))
        at_begin = [_cpu_s(process) for process in measured]
        time.sleep(max(0.0, load.end - time.monotonic()))
        busy = [(_cpu_s(process) - was) / args.seconds for process, was in zip(measured, at_begin, strict=True)]
        said = [client.communicate(timeout=START_S) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    failed = [error.decode()[-1000:] for client, (_, error) in zip(clients, said, strict=True) if client.returncode]
    if failed:
        raise ConfigError("bench", f"{face}, {kind}", f"a client failed: {failed[0]}")
    found = [json.loads(out) for out, _ in said]
    answers, sent = sum(one["answers"] for one in found), sum(one["sent"] for one in found)
    counted = [now - was for now, was in zip(_series(router.http, "diptych_requests_total"), before, strict=True)]
    if sum(counted) != sent or (face == "HTTP" and min(counted) <= 0):
        raise ConfigError("bench", f"{face}, {kind}", f"{sent} requests were sent; the processes count {counted}")
    walls = np.concatenate([one["wall_s"] for one in found])
    num_routers, num_workers = len(router.processes), len(cluster.workers)
    return {
        "requests_per_s": answers / args.seconds,
        "tokens_per_s": answers * KINDS[kind] / args.seconds,
        "p50_ms": 1e3 * float(np.percentile(walls, 50)),
        "p99_ms": 1e3 * float(np.percentile(walls, 99)),
        "served_by": sorted(counted),
        "busy_routers": [round(share, 3) for share in busy[:num_routers]],
        "busy_workers": round(sum(busy[num_routers : num_routers + num_workers]), 2),
        "busy_clients": round(sum(busy[num_routers + num_workers :]), 2),
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Runs by face, kind and number of processes."""
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for number in range(args.rounds):
        for count in args.processes if number % 2 == 0 else reversed(args.processes):
            with _cluster(count) as cluster, _router(cluster, count) as router:
                for face in args.faces:
                    for kind in KINDS:
                        run = _run(cluster, router, face, kind, args)
                        found.setdefault(face, {}).setdefault(kind, {}).setdefault(str(count), []).append(run)
                        print(f"{count} processes, {face}, {kind}: {run['requests_per_s']:.0f} requests/s", flush=True)
    return found


def summary(runs: dict[str, list[dict[str, Any]]], unit: str) -> dict[str, Any]:
    """By number of processes: throughput, and its ratio to the least number's, round by round."""
    first = next(iter(sorted(runs, key=int)))
    return {
        count: {
            unit: spread([run[unit] for run in each]),
            f"of_{first}": statistics.median(
                run[unit] / one[unit] for run, one in zip(each, runs[first], strict=True)
            ),
            "busy": statistics.median(share for run in each for share in run["busy_routers"]),
        }
        for count, each in sorted(runs.items(), key=lambda item: int(item[0]))
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--faces", nargs="+", choices=["HTTP", "gRPC"], default=["HTTP", "gRPC"])
    parser.add_argument("--clients", type=int, default=2, help="processes of clients for each router process")
    parser.add_argument("--users", type=int, default=24, help="requests at any time of each of them")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("bench-out/router-processes.json"))
    args = parser.parse_args(arguments)
    environment = surroundings()
    runs = measure(args)
    summaries = {
        face: {kind: summary(each, f"{kind}s_per_s") for kind, each in kinds.items()} for face, kinds in runs.items()
    }
    for face, kinds in summaries.items():
        for kind, counts in kinds.items():
            for count, row in counts.items():
                unit = row[f"{kind}s_per_s"]
                print(f"{face:<6}{kind:<9}{count:>3} processes {unit['median']:>12.0f}/s  {row}", flush=True)
    settings = {
        **{name: value for name, value in vars(args).items() if name != "out"}, "cores": usable_cores(), "tokens": KINDS,
    }  # fmt: skip
    write(args.out, {"environment": environment, "settings": settings, "summary": summaries, "runs": runs})


if __name__ == "__main__":
    main()
