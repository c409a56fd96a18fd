"""What a relayed request costs the routers of several checkouts, in turns: CPU time of the router's process.

    python -P -m diptych.bench.router.relay_checkouts NAME=CHECKOUT... [--rounds 5] [--requests 400] [--out FILE]

One router of each checkout runs all the time, before two decode workers without an engine, which are this checkout's; in
every round each of them gets the same load, in alternating order. Objects of the start are exempt from garbage
collection in all of them, as in the shipped router.

    request     an answer of one token
    token       each further one of 65, as fast as they come: most are merged
    chunk       each further one of 65, all answers' together every STEP_S: a chunk for nearly every token
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diptych.bench.part import running_command, running_part
from diptych.bench.result import spread, surroundings, write
from diptych.cli.bench.run import Place, opened, run_async
from diptych.cli.models.store import resolve_model
from diptych.cli.progress import progress_on
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.runs import live
from diptych.loadtest.runs.result import measure

STEP_S = 0.02
_SHORT, _LONG = 1, 65
_SETTLED_S = 5.0
"""Until the start is over and its objects are exempt."""
_DECODE = "diptych.bench.router.relay_parts"
_ROUTERS = (_DECODE, "diptych.cli.bench_router_parts")
"""Where a checkout has its router part: now, and before the packages."""
_LAUNCH = (
    "import gc, runpy, sys, threading; threading.Timer(3.0, lambda: (gc.collect(), gc.freeze())).start(); "
    "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_FACES = (
    ("HTTP, token ids", "completions", "ids"),
    ("HTTP, chat", "chat", "messages"),
    ("gRPC, token ids", "grpc", "ids"),
)


@dataclass(slots=True)
class _Router:
    """One checkout's router: its process, CPU seconds a second when idle, and its addresses by kind of decode worker."""

    name: str
    process: psutil.Process
    http: str
    grpc: str
    idle_share: float = 0.0


@contextlib.contextmanager
def _router(name: str, checkout: Path, model: Path, decode: str) -> Iterator[_Router]:
    module = next((m for m in _ROUTERS if (checkout / "src" / m.replace(".", "/")).with_suffix(".py").exists()), None)
    if module is None:
        raise ConfigError("checkout", str(checkout), "holds no router part of this benchmark")
    command = [sys.executable, "-P", "-c", _LAUNCH, module, "router", str(model), decode]
    env = os.environ | {"PYTHONPATH": str(checkout / "src")}
    with running_command(command, module, env) as (process, (http, grpc)):
        yield _Router(name, process, http if http.startswith("http") else f"http://{http}", f"grpc://{grpc}")


def _cpu_s(process: psutil.Process) -> float:
    """Nanoseconds are counted by thread; the process's times are in hundredths of a second."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def _cost(router: _Router, api: str, form: str, tokens: int, args: argparse.Namespace) -> tuple[float, float]:
    """(CPU microseconds a request, chunks of its answer). Raises: ConfigError when a request failed."""
    config = BenchConfig(
        num_requests=args.requests, closed_loop=True, max_concurrency=args.concurrency, input_len=str(args.prompt_tokens),
        api=api, prompt_form=form, vocab="1000,30000", explain=False, warmup=8, output_len=str(tokens),
    )  # fmt: skip

    async def measured() -> tuple[float, float]:
        async with opened(config, [Place(router.grpc if api == "grpc" else router.http)]) as targets:
            target, model, _ = targets[0]
            began, before = time.monotonic(), _cpu_s(router.process)
            run = await measure(target, model, config, config.items(), live.silent)
            spent = _cpu_s(router.process) - before - router.idle_share * (time.monotonic() - began)
        if run.summary.failed:
            raise ConfigError("router", router.name, f"requests failed: {dict(run.summary.errors)}")
        chunks = sum(len(record.chunk_times) for record in run.records)
        return 1e6 * spent / (run.summary.requests + run.summary.warmup_requests), chunks / max(1, len(run.records))

    return run_async(measured())


def _rounds(
    routers: Sequence[_Router], args: argparse.Namespace, steps: bool
) -> dict[str, dict[str, dict[str, object]]]:
    """By checkout and face. `steps`: the decode worker sends a token every STEP_S."""
    time.sleep(_SETTLED_S)
    for router in routers:
        before, began = _cpu_s(router.process), time.monotonic()
        time.sleep(2.0)
        router.idle_share = (_cpu_s(router.process) - before) / (time.monotonic() - began)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for face, api, form in _FACES:
            short: dict[str, float] = {}
            for tokens in (_SHORT, _LONG):
                for router in routers if number % 2 == 0 else reversed(routers):
                    us, chunks = _cost(router, api, form, tokens, args)
                    if tokens == _SHORT:
                        short[router.name] = us
                        if not steps:
                            found[router.name, face, "us_per_request"].append(us)
                        continue
                    more = us - short[router.name]
                    if steps:
                        found[router.name, face, "us_per_chunk"].append(more / max(1.0, chunks - 1))
                        found[router.name, face, "chunks_per_token_in_steps"].append(chunks / tokens)
                    else:
                        found[router.name, face, "us_per_token"].append(more / (_LONG - _SHORT))
                        found[router.name, face, "chunks_per_token"].append(chunks / tokens)
    result: dict[str, dict[str, dict[str, object]]] = {}
    for (name, face, what), values in found.items():
        result.setdefault(name, {}).setdefault(face, {})[what] = spread(values)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("bench-out/router-checkouts.json"))
    args = parser.parse_args()
    checkouts = {name: Path(path).resolve() for name, _, path in (one.partition("=") for one in args.checkouts)}
    environment = surroundings()
    with progress_on() as progress:
        model = resolve_model("smollm2", progress)
    result: dict[str, dict[str, dict[str, object]]] = {}
    for steps in (False, True):
        with contextlib.ExitStack() as stack:
            _, (decode,) = stack.enter_context(running_part(_DECODE, "decode", *([str(STEP_S)] if steps else [])))
            routers = [stack.enter_context(_router(name, path, model, decode)) for name, path in checkouts.items()]
            for name, faces in _rounds(routers, args, steps).items():
                for face, costs in faces.items():
                    result.setdefault(name, {}).setdefault(face, {}).update(costs)
    _show(result)
    settings = {
        "rounds": args.rounds, "requests": args.requests, "prompt_tokens": args.prompt_tokens, "concurrency": args.concurrency,
        "step_s": STEP_S,
    }  # fmt: skip
    write(args.out, {"environment": environment, "settings": settings, "checkouts": result})


def _show(result: dict[str, dict[str, dict[str, object]]]) -> None:
    columns = ("us_per_request", "us_per_token", "chunks_per_token", "us_per_chunk", "chunks_per_token_in_steps")
    print(f"{'checkout':<14}{'face':<18}" + "".join(f"{name:>27}" for name in columns))
    for name, faces in result.items():
        for face, costs in faces.items():
            medians = [costs[column]["median"] for column in columns]  # type: ignore[index]
            print(f"{name:<14}{face:<18}" + "".join(f"{value:>27.2f}" for value in medians))


if __name__ == "__main__":
    main()
