"""The `diptych` command. Heavy imports happen inside the commands, so that --help is fast.

Exit codes: 0; 1 a fault, or an invalid setting; 2 wrong usage; 130 after SIGINT; 143 after SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from diptych.cli import BENCH_HELP, explain, move, observe, quantize
from diptych.cli.adapters import app as adapters_app
from diptych.cli.cache import app as cache_app
from diptych.cli.chat import DEFAULT_MAX_TOKENS
from diptych.cli.keys import app as keys_app
from diptych.cli.router_access import TLS_CA, TLS_SERVER_NAME, router_access
from diptych.cli.settings.help import run_app
from diptych.cli.settings.option_sources import add_layers
from diptych.cli.settings.options import add_settings_command, build_only, not_built
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.extras import install_command
from diptych.common.paths import run_dir

if TYPE_CHECKING:
    from diptych.cli.serve.config import ServeConfig
    from diptych.cli.up.config import UpConfig
    from diptych.cli.up.progress_log import Stages
    from diptych.router.config import RouterConfig
    from diptych.worker.config import WorkerConfig
    from diptych.worker.rank_config import RankConfig

_DETACH = typer.Option("--detach", help="Return once the cluster serves; `diptych down` stops it.")


def _up(config: UpConfig, detach: bool = False) -> int:
    from diptych.cli.up.cluster_plan import diptych_command, own_name
    from diptych.cli.up.command import run_detached, run_up
    from diptych.worker.config import lora_folders

    lora_folders(config.lora_dir)  # at once, and not by a worker seconds later
    if detach:
        again = [argument for argument in sys.argv[1:] if argument != "--detach"]
        return run_detached([*diptych_command(), *again], run_dir(), config.startup_timeout_s + 1800.0)

    def resolve(stages: Stages) -> tuple[Path, str]:
        from diptych.cli.models.store import DEFAULT_ALIASES, resolve_model
        from diptych.cli.progress import progress_on

        stages.end()
        with progress_on() as progress:
            folder = resolve_model(config.model or DEFAULT_ALIASES[0], progress)
        return folder, config.served_model_name or own_name(config.model, folder)

    return run_up(config, run_dir(), resolve)


def _router(config: RouterConfig) -> int:
    if config.router_processes > 1:
        from diptych.cli.router_processes import run_router_processes

        return run_router_processes(config)
    from diptych.router.server import run_router

    return run_router(config) or 0


def _worker(config: WorkerConfig) -> int:
    from diptych.common.collector import hold_collector
    from diptych.worker.config import lora_folders, model_folder
    from diptych.worker.degrees import check_division
    from diptych.worker.device_start import begin_device

    lora_folders(config.lora_dir)  # before the imports
    check_division(model_folder(config.model), config.degrees)
    hold_collector()
    begin_device(config.device, config.devices, config.degrees)
    from diptych.cli.worker_roles import run_worker  # takes seconds

    return run_worker(config) or 0


def _serve(config: ServeConfig) -> int:
    from diptych.cli.models.store import DEFAULT_ALIASES, resolve_model
    from diptych.cli.progress import progress_on
    from diptych.cli.up.cluster_plan import own_name
    from diptych.cli.up.processes import require_free_port
    from diptych.common.collector import hold_collector
    from diptych.worker.config import lora_folders
    from diptych.worker.degrees import check_division
    from diptych.worker.device_start import begin_device

    for name in ("http_port", "grpc_port"):  # fail before the model is fetched and loaded
        require_free_port(name, config.host, getattr(config, name))
    lora_folders(config.lora_dir)
    with progress_on() as progress:
        folder = resolve_model(config.model or DEFAULT_ALIASES[0], progress)
    check_division(folder, config.degrees)
    hold_collector()
    begin_device(config.device, config.devices, config.degrees)
    from diptych.cli.serve.command import run_serve  # takes seconds

    return run_serve(config, folder, config.served_model_name or own_name(config.model, folder))


def _rank(config: RankConfig) -> int:
    from diptych.worker.nodes import run_node  # takes seconds

    return run_node(config)


def _all_settings() -> tuple[type, ...]:
    from diptych.cli.serve.config import ServeConfig
    from diptych.cli.up.config import UpConfig
    from diptych.router.config import RouterConfig
    from diptych.worker.config import WorkerConfig
    from diptych.worker.rank_config import RankConfig

    return (UpConfig, ServeConfig, RouterConfig, WorkerConfig, RankConfig)


def _add_up(app: typer.Typer, help: str) -> None:
    from diptych.cli.up.config import UpConfig

    flags = {"detach": Annotated[bool, _DETACH]}
    add_settings_command(app, "up", UpConfig, _up, known=_all_settings, help=help, flags=flags)


def _add_serve(app: typer.Typer, help: str) -> None:
    from diptych.cli.serve.config import ServeConfig

    add_settings_command(app, "serve", ServeConfig, _serve, known=_all_settings, help=help)


def _add_router(app: typer.Typer, help: str) -> None:
    from diptych.router.config import RouterConfig

    add_settings_command(app, "router", RouterConfig, _router, known=_all_settings, help=help)


def _add_rank(app: typer.Typer, help: str) -> None:
    from diptych.worker.rank_config import RankConfig

    add_settings_command(app, "rank", RankConfig, _rank, known=_all_settings, help=help)


def _add_worker(role: str, run: Callable[[WorkerConfig], int]) -> Callable[[typer.Typer, str], None]:
    def add(app: typer.Typer, help: str) -> None:
        from diptych.worker.config import WorkerConfig

        add_settings_command(app, role, WorkerConfig, run, known=_all_settings, fixed={"role": role}, help=help)

    return add


_SETTINGS_COMMANDS: Mapping[str, tuple[str, Callable[[typer.Typer, str], None]]] = {
    "up": ("Start a cluster on this machine; Ctrl-C stops it.", _add_up),
    "serve": ("Serve one model in one process, without a cluster.", _add_serve),
    "router": ("Run a router.", _add_router),
    "prefill": ("Run a prefill worker.", _add_worker("prefill", _worker)),
    "decode": ("Run a decode worker.", _add_worker("decode", _worker)),
    "rank": ("Run this host's ranks of a worker on another host.", _add_rank),
}


def build_app(only: str | None = None) -> typer.Typer:
    """The commands. Building those with many flags takes most of the time.

    Args:
        only: the command that will run: others get only name and help. None: build all fully.
    """
    app = typer.Typer(
        name="diptych",
        help="Serves large language models from two pools of workers, prefill and decode. `diptych --version`: the version.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # drawing frames around the help takes half of the time
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, (text, add) in _SETTINGS_COMMANDS.items():
        if only is None or only == name:
            add(app, text)
        else:
            app.command(name, help=text)(not_built)
    explain.register(app)
    move.register(app)
    observe.register(app)
    quantize.register(app)
    _register_small(app)
    add_layers(app, LAYERED if not only else LAYERED & {only})
    app.add_typer(keys_app)
    app.add_typer(cache_app)
    app.add_typer(adapters_app)
    if only:
        build_only(app, only)
    return app


LAYERED = frozenset({"chat", "explain", "what-if", "doctor", "top", "role", "move", "capacity"})


def _register_small(app: typer.Typer) -> None:
    """Commands without a settings class."""

    @app.command()
    def down() -> None:
        """Stop the cluster that `diptych up` started from this folder."""
        from diptych.cli.up.command import run_down

        raise typer.Exit(run_down(run_dir()))

    @app.command()
    def chat(
        address: Annotated[
            str, typer.Option(help="host:port of the router's gRPC server; default: the cluster here.")
        ] = "",
        model: Annotated[str, typer.Option(help="Default: the cluster's only model.")] = "",
        system: Annotated[str, typer.Option(help="A system message.")] = "",
        max_tokens: Annotated[
            int, typer.Option(min=0, max=2**31 - 1, help="Most tokens of every answer; 0: the rest of the context.")
        ] = DEFAULT_MAX_TOKENS,
        temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")] = None,
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
    ) -> None:
        """Chat with the cluster in the terminal. In a pipe, every line is one message. DIPTYCH_API_KEY holds the API key."""
        from diptych.cli.chat import run_chat

        wishes: dict[str, Any] = {"system": system, "max_tokens": max_tokens or None, "temperature": temperature}
        access = router_access(address, tls_ca, tls_server_name)
        raise typer.Exit(run_chat(access.address, model, tls=access.tls(), **wishes))

    @app.command()
    def model(
        name: Annotated[
            str | None,
            typer.Argument(help="smollm2 (the default model), a local folder or GGUF file, or a hub id."),
        ] = None,
        manifest: Annotated[
            bool,
            typer.Option(
                "--manifest",
                help="Hash the files of the model that is named and write diptych-manifest.json into its folder: what "
                "differs from it is never served.",
            ),
        ] = False,
        packed: Annotated[
            bool,
            typer.Option(
                "--packed",
                help="Of a GGUF file or smollm2: keep the quantized blocks of linear layers, in a folder beside the one in "
                "float32.",
            ),
        ] = False,
    ) -> None:
        """Make a model available on this machine; print its folder."""
        from diptych.cli.models.store import main as model_main

        flags = [flag for flag, given in (("--manifest", manifest), ("--packed", packed)) if given]
        raise typer.Exit(model_main([*flags, *([] if name is None else [name])]))

    @app.command(hidden=True)
    def status() -> None:
        """Name the commands that show what it would show."""
        _fail(
            "there is no command 'status': `diptych top` shows the cluster, `diptych doctor` judges it, "
            "`diptych health ADDRESS` checks one server",
            2,
        )

    @app.command()
    def health(
        address: Annotated[str, typer.Argument(help="host:port of a gRPC server, or an http(s):// URL.")],
        timeout_s: Annotated[float, typer.Option(help="Deadline of the check, in seconds.")] = 3.0,
    ) -> None:
        """Check whether one server serves. Exit code 0 or 1, for health checks."""
        from diptych.cli.health import run_health

        raise typer.Exit(run_health(address, timeout_s))

    @app.command()
    def capacity(
        named: Annotated[
            str,
            typer.Argument(
                metavar="[MODEL]",
                help="A config.json, a model's folder, or a name that `diptych model` accepts.",
                show_default=False,
            ),
        ] = "",
        model: Annotated[str, typer.Option("--model", help="The same as the argument MODEL.")] = "",
        dtype: Annotated[
            str, typer.Option(help="dtype of the computation; default: the config's (`up` serves float32 on a CPU).")
        ] = "",
        kv_cache_dtype: Annotated[
            str, typer.Option(help="dtype of the cache: auto (that of the computation), fp8_e4m3, fp8_e5m2 or int8.")
        ] = "auto",
        block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        memory_gib: Annotated[float, typer.Option(help="Show how many tokens fit into this much memory.")] = 0.0,
        prefill_rate: Annotated[float, typer.Option(help="Tokens/s; with --copy-rate: show when swapping pays.")] = 0.0,
        copy_rate: Annotated[float, typer.Option(help="GiB/s between the cache and the host tier.")] = 0.0,
        tensor_parallel_size: Annotated[
            int, typer.Option(help="Ranks that divide the heads: show what each holds.")
        ] = 1,
        pipeline_parallel_size: Annotated[int, typer.Option(help="Stages that divide the layers, likewise.")] = 1,
    ) -> None:
        """Show the size of a token's KV cache. Of any Hugging Face config."""
        from diptych.cli.capacity import run_capacity

        if bool(model) == bool(named):
            raise ConfigError("model", model, "must be given once, as an argument or with --model")
        raise typer.Exit(
            run_capacity(
                model or named,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size,
                memory_gib=memory_gib,
                prefill_rate=prefill_rate,
                copy_rate=copy_rate,
                tensor_parallel=tensor_parallel_size,
                pipeline=pipeline_parallel_size,
            )
        )

    @app.command()
    def version() -> None:
        """Print the version; so does --version."""
        _print_version()

    app.command("bench", help=BENCH_HELP)(not_built)  # a tree of its own: see main


def _print_version() -> None:
    from importlib import metadata

    print(metadata.version("diptych"))


def _run_bench(arguments: Sequence[str]) -> Any:
    try:
        from diptych.cli.bench.command import build_app as build_bench
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("diptych"):
            raise
        _fail(f"`diptych bench` needs {error.name}: {install_command('loadtest')}", 1)
    return run_app(build_bench(_named(arguments)), arguments, "diptych bench")


def main() -> NoReturn:
    """The console script."""
    try:
        arguments = sys.argv[1:]
        if arguments[:1] in (["--version"], ["-V"]):
            _print_version()
            sys.exit(0)
        is_bench = arguments[:1] == ["bench"]  # bench parses its own flags
        code: Any = _run_bench(arguments[1:]) if is_bench else run_app(build_app(_named(arguments)), arguments)
    except ConfigError as error:
        _fail(str(error), 1)
    except DiptychError as error:
        _fail(error.message, 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        words = getattr(error, "format_message", None)  # only click's usage errors have it
        if words is None:
            raise
        if (context := getattr(error, "ctx", None)) is not None:
            print(f"{context.get_usage()}\nsee {context.command_path} --help\n", file=sys.stderr)
        _fail(words() + _hint(arguments, words()), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _hint(arguments: Sequence[str], words: str) -> str:
    """What to do where a flag that may be given several times was followed by several values, as vLLM takes them."""
    flag = next((one for one in ("--lora-modules", "--lora-dir") if one in arguments), "")
    return (
        f"; several values of {flag}: repeat the flag, or put commas between them"
        if flag and "extra arg" in words
        else ""
    )


def _named(arguments: Sequence[str]) -> str:
    """The command that the arguments name; only --help may precede it."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


__all__ = ["build_app", "main"]
