"""`diptych bench`: the load harness as a command. Reports go to --out, figures to stdout, progress to stderr."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli import BENCH_HELP
from diptych.cli.bench.options import add_bench_command
from diptych.cli.settings.help import HELP_FLAGS
from diptych.cli.settings.option_sources import add_layers
from diptych.cli.settings.options import build_only, not_built
from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.cli.bench.config import ClusterChoice
    from diptych.cli.bench.run import Targets
    from diptych.loadtest.config import BenchConfig
    from diptych.loadtest.runs.sweep_spec import SweepSpec

_TARGET = typer.Option(
    help="http://host:port or grpc://host:port, optionally with a prefix name=; default: a cluster of the benchmark's own, "
    "with its colocated baseline."
)
_BASELINE = typer.Option("--baseline-target", help="A second target, measured in alternation with the first.")
_ROUNDS = typer.Option(help="Rounds of A B A B.", min=1)


def _serve(config: BenchConfig, cluster: ClusterChoice, target: str, baseline_target: str, rounds: int) -> int:
    from diptych.cli.bench import run as bench_run

    return bench_run.serve(config, _targets(config, cluster, target, baseline_target), rounds)


def _compare(config: BenchConfig, a: str, b: str, rounds: int) -> int:
    from diptych.cli.bench import run as bench_run

    return bench_run.serve(config, bench_run.Targets.given(a, b), rounds, kind="compare")


def _sweep(config: BenchConfig, search: SweepSpec, cluster: ClusterChoice, target: str, baseline_target: str) -> int:
    from diptych.cli.bench import run as bench_run

    return bench_run.sweep(config, search, _targets(config, cluster, target, baseline_target))


def _replay(
    config: BenchConfig, cluster: ClusterChoice, trace: Path, form: str, target: str, baseline_target: str, rounds: int
) -> int:
    from diptych.cli.bench import run as bench_run

    return bench_run.serve(config, _targets(config, cluster, target, baseline_target), rounds, kind="replay")


def _targets(config: BenchConfig, cluster: ClusterChoice, target: str, baseline: str) -> Targets:
    from diptych.cli.bench.run import Targets

    return Targets.given(target, baseline) if target else Targets.own(cluster)


_WHERE: dict[str, tuple[Any, Any]] = {
    "target": (Annotated[str, _TARGET], ""),
    "baseline_target": (Annotated[str, _BASELINE], ""),
}
_TURNS: dict[str, tuple[Any, Any]] = {"rounds": (Annotated[int, _ROUNDS], 2)}


def _add_serve(app: typer.Typer, help: str) -> None:
    from diptych.cli.bench.config import ClusterChoice
    from diptych.loadtest.config import BenchConfig

    add_bench_command(
        app,
        "serve",
        {"config": BenchConfig, "cluster": ClusterChoice},
        _serve,
        arguments=_WHERE | _TURNS,
        help=help,
    )


def _add_compare(app: typer.Typer, help: str) -> None:
    from diptych.loadtest.config import BenchConfig

    add_bench_command(
        app,
        "compare",
        {"config": BenchConfig},
        _compare,
        arguments={
            "a": (Annotated[str, typer.Argument(help="URL of A, optionally with a prefix name=.")], ...),
            "b": (Annotated[str, typer.Argument(help="URL of B.")], ...),
            "rounds": (Annotated[int, _ROUNDS], 3),
        },
        help=help,
    )


def _add_sweep(app: typer.Typer, help: str) -> None:
    from diptych.cli.bench.config import ClusterChoice
    from diptych.loadtest.config import BenchConfig
    from diptych.loadtest.runs.sweep_spec import SweepSpec

    add_bench_command(
        app,
        "sweep",
        {"config": BenchConfig, "search": SweepSpec, "cluster": ClusterChoice},
        _sweep,
        arguments=_WHERE,
        hidden=("num_requests", "request_rate", "ramp_to", "closed_loop", "dataset"),
        help=help,
    )


def _add_replay(app: typer.Typer, help: str) -> None:
    from diptych.cli.bench.config import ClusterChoice
    from diptych.loadtest.config import FILE_FORMATS, BenchConfig

    add_bench_command(
        app,
        "replay",
        {"config": BenchConfig, "cluster": ClusterChoice},
        _replay,
        arguments={
            "trace": (Annotated[Path, typer.Argument(help="The trace or data set.")], ...),
            "form": (Annotated[str, typer.Option("--format", help=", ".join(FILE_FORMATS))], "mooncake"),
        }
        | _WHERE
        | {"rounds": (Annotated[int, _ROUNDS], 1)},
        hidden=("workload", "dataset"),
        defaults={"num_requests": 0},
        fixed=lambda given: {"workload": given["form"], "dataset": given["trace"]},
        help=help,
    )


_LOAD_COMMANDS: Mapping[str, tuple[str, Callable[[typer.Typer, str], None]]] = {
    "serve": ("Drive one target, by default beside the colocated baseline with as many workers.", _add_serve),
    "compare": ("Alternate between two targets, A B A B; prints B / A with its spread.", _add_compare),
    "sweep": ("Raise the rate until the SLO is violated.", _add_sweep),
    "replay": ("Replay a recorded trace at its (scaled) times.", _add_replay),
}


def build_app(only: str | None = None) -> typer.Typer:
    """The commands. `only`: the command that will run: others get only name and help. None: build all fully."""
    app = typer.Typer(
        name="bench",
        help=BENCH_HELP,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": list(HELP_FLAGS)},
        rich_markup_mode=None,
    )
    for name, (text, add) in _LOAD_COMMANDS.items():
        if only is None or only == name:
            add(app, text)
        else:
            app.command(name, help=text)(not_built)
    _register_small(app)
    add_layers(app, {only} if only else None, group="bench")
    if only:
        build_only(app, only)
    return app


def _from_checkout(name: str) -> Any:
    """A module of `diptych.bench`. Raises: Exit when installed from a wheel, which does not contain it."""
    try:
        return importlib.import_module(f"diptych.bench.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("diptych.bench"):
            raise
        print(
            "error: this benchmark is part of a checkout of the project, not of the installed package", file=sys.stderr
        )
        raise typer.Exit(2) from None


def _register_small(app: typer.Typer) -> None:
    """Commands without a settings class."""

    @app.command()
    def mock(
        port: Annotated[int, typer.Option(help="0: any free one.")] = 0,
        first_token_s: Annotated[float, typer.Option(help="Seconds until the first token.")] = 0.1,
        token_s: Annotated[float, typer.Option(help="Seconds a token.")] = 0.02,
        tokens_per_chunk: Annotated[int, typer.Option(help="Token rate after the first token, per stream.")] = 4,
        slots: Annotated[int, typer.Option(help="Requests at once; 0: no limit.")] = 0,
    ) -> None:
        """A mock server with scripted timing, to check a load harness."""
        import asyncio

        from diptych.loadtest.mock_server import Script, run_forever

        script = Script(first_token_s, token_s, tokens_per_chunk, slots)
        asyncio.run(run_forever(script, "127.0.0.1", port))

    @app.command()
    def capacity(
        streams: Annotated[int, typer.Option(help="Streams open at once.")] = 2000,
        tokens_per_s: Annotated[float, typer.Option(help="Token rate of all streams together.")] = 5000.0,
        tokens_per_chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 4,
        duration_s: Annotated[float, typer.Option(help="Duration of the full load.")] = 20.0,
        out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("bench-out"),
    ) -> None:
        """Capacity of the harness on one core, against the mock server; reports its delay."""
        from diptych.cli.bench.capacity import run_capacity

        raise typer.Exit(run_capacity(streams, tokens_per_s, tokens_per_chunk, duration_s, out))

    @app.command()
    def kv(
        transport: Annotated[str, typer.Option(help="ucx, inproc; separated by commas.")] = "inproc,ucx",
        slab_kib: Annotated[
            str, typer.Option(help="Slab sizes in KiB, separated by commas.")
        ] = "64,256,1024,4096,16384",
        repeats: Annotated[int, typer.Option(help="Number of runs; the best counts.", min=1)] = 3,
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("bench-out"),
    ) -> None:
        """The KV transfer alone."""
        run_kv = _from_checkout("kvtransfer.slabs").run_kv

        try:
            sizes = [int(part) for part in slab_kib.split(",")]
        except ValueError:
            raise typer.BadParameter("must be numbers separated by commas", param_hint="--slab-kib") from None
        raise typer.Exit(run_kv(transport.split(","), sizes, repeats, out))

    @app.command()
    def router(
        requests: Annotated[int, typer.Option(help="Requests per measurement.", min=1)] = 400,
        prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens per request.", min=1)] = 128,
        concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 32,
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("bench-out"),
    ) -> None:
        """The router alone, in CPU microseconds a request and a token."""
        run_router_bench = _from_checkout("router.relay").run_router_bench

        raise typer.Exit(run_router_bench(requests, prompt_tokens, concurrency, out))

    @app.command()
    def startup(
        repeats: Annotated[int, typer.Option(help="Number of runs; the median counts.", min=1)] = 5,
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("bench-out"),
    ) -> None:
        """How long every command's --help takes."""
        run_startup = _from_checkout("cli.startup").run_startup

        raise typer.Exit(run_startup(repeats, out))

    @app.command()
    def vllm(
        environment: Annotated[Path, typer.Argument(help="Virtual environment made by bench/peers/setup_vllm_cpu.sh.")],
        mode: Annotated[
            str,
            typer.Option(
                help="pd: 1 prefill + 1 decode on both sides; colocated: one engine; serve: ours as one process."
            ),
        ] = "pd",
        loads: Annotated[
            str, typer.Option(help="rate:0.3 or users:8, separated by commas; default: by the mode.")
        ] = "",
        rounds: Annotated[int, typer.Option(help="Rounds of A B A B.", min=1)] = 3,
        requests: Annotated[int, typer.Option(help="Duration of each run; 0: by the load.", min=0)] = 0,
        vllm_flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`.")] = "--enforce-eager",
        dtype: Annotated[str, typer.Option(help="Of both sides: float32 or bfloat16.")] = "float32",
        seed: Annotated[int, typer.Option(help="Seed of workload and arrivals; -1: random.")] = -1,
        out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("bench-out"),
    ) -> None:
        """vLLM on the CPU and Diptych, alternating: TTFT, TPOT and tokens/s as ratios."""
        run_vllm_bench = _from_checkout("peers.vllm").run_vllm_bench

        try:
            code = run_vllm_bench(environment, mode, loads, rounds, requests, vllm_flags, seed, out, dtype)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(code)

    @app.command()
    def suite(
        out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("bench-out"),
        minutes: Annotated[float, typer.Option(help="Approximate duration of the serving benchmarks.", min=1.0)] = 6.0,
    ) -> None:
        """The CPU suite: the harness itself, P/D beside the colocated baseline, a sweep, the engine; writes the reports."""
        run_suite = _from_checkout("suite").run_suite

        raise typer.Exit(run_suite(out, minutes))
