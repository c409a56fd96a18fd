"""--help without the parser: typer parses with pydantic, whose import takes longer than the rest of a help page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.main

HELP_FLAGS = ("-h", "--help")


def help_text(app: typer.Typer, program: str, arguments: Sequence[str]) -> str | None:
    """The help page when the arguments are a command and --help, nothing else; None: the parser is needed."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name=program, **command.context_settings)
    for argument in arguments:
        if argument in HELP_FLAGS:
            return str(command.get_help(context))
        inner = command.get_command(context, argument) if hasattr(command, "get_command") else None
        if inner is None:
            return None
        command = inner
        context = command.context_class(command, info_name=argument, parent=context, **command.context_settings)
    return None


def run_app(app: typer.Typer, arguments: Sequence[str], program: str | None = None) -> Any:
    """Show help if only that is requested, or nothing, else run a command. Returns: its result, or its exit code."""
    text = None
    if not arguments or list(arguments) in [[name] for name in _groups(app)]:
        arguments = [*arguments, HELP_FLAGS[0]]
    if any(flag in arguments for flag in HELP_FLAGS):
        text = help_text(app, program or _program(), arguments)
    if text is not None:
        print(text)
        return 0
    return app(args=list(arguments), prog_name=program, standalone_mode=False)


def _groups(app: typer.Typer) -> list[str]:
    """Names that commands follow."""
    return [
        str(group.name or (group.typer_instance and group.typer_instance.info.name)) for group in app.registered_groups
    ]


def _program() -> str:
    """The program's name as a user types it."""
    return "diptych" if sys.argv[0].endswith("diptych") else "python -m diptych.cli"
