from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import typer

from diptych.cli.main import build_app
from diptych.cli.settings.merge import merge
from diptych.router.config import RouterConfig
from diptych.worker.config import WorkerConfig

CLASSES = {"router": RouterConfig, "prefill": WorkerConfig, "decode": WorkerConfig}
KNOWN = frozenset(field.name for cls in set(CLASSES.values()) for field in dataclasses.fields(cls))


@pytest.fixture
def parsed() -> Callable[[Sequence[str], Mapping[str, str]], Any]:
    """The settings that `diptych ARGUMENTS` gets in that environment, through the real command line's parser."""

    def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Any:
        role, *rest = arguments
        command = typer.main.get_command(build_app()).commands[role]  # type: ignore[attr-defined]
        given = dict(command.make_context(role, list(rest)).params)
        assert given.pop("config") is None
        given.pop("verbose")
        fixed = {} if role == "router" else {"role": role}
        return merge(CLASSES[role], given | fixed, environ=environ, known_elsewhere=KNOWN)

    return parse
