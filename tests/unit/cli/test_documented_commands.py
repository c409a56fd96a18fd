"""Command lines of `diptych` in the README, the pages and the examples: the commands and their flags are there. And the README
names what an operator looks at first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from diptych.cli import main
from diptych.cli.bench import command as bench
from diptych.cli.settings.help import help_text
from diptych.cli.settings.options import not_built

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    path for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "tests/adapters/*.md") for path in ROOT.glob(pattern)
]
HISTORY = "docs/faults-fixed.md"
"""Names commands as they were typed."""
CODE = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
CALL = re.compile(r"(?:^|(?<=[\s/(|=\"']))diptych((?: +[^|&;#\n`]+)?)", re.MULTILINE)


@cache
def commands() -> dict[str, set[str]]:
    """Name, for example `bench serve`, -> its flags."""

    def below(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
        yield name, {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        for part, inner in (getattr(command, "commands", None) or {}).items():
            yield from below(f"{name} {part}".strip(), inner)

    apps = {"": main.build_app(None), "bench": bench.build_app(None)}
    return {name: flags for start, app in apps.items() for name, flags in below(start, typer.main.get_command(app))}


def calls(page: str) -> Iterator[str]:
    """What follows `diptych` in code: lines continued by a backslash are one."""
    for block, span in CODE.findall(page):
        yield from (found.strip() for found in CALL.findall((block or span).replace("\\\n", " ")))


def wrong(call: str) -> str:
    """What of a command line is not there; empty: nothing. Words in capitals stand for something else."""
    words = call.partition(" -- ")[0].split()
    name = ""
    while words and f"{name} {words[0]}".strip() in commands():
        name = f"{name} {words.pop(0)}".strip()
    if not name:
        return f"no command {words[0]}" if words and re.fullmatch(r"[a-z][a-z-]+", words[0]) else ""
    flags = {flag for word in words for flag in re.findall(r"^--[a-z][a-z0-9-]*", word)}
    missing = flags - commands()[name] - {"--help"}
    return f"{name} has no {', '.join(sorted(missing))}" if missing else ""


def test_15_every_command_line_of_the_pages_can_be_typed() -> None:
    found = [
        (path, call)
        for path in PAGES
        if str(path.relative_to(ROOT)) != HISTORY
        for call in calls(path.read_text("utf-8"))
    ]
    assert len(found) > 100, "the search finds nothing"
    assert not [f"{path.relative_to(ROOT)}: diptych {call}: {why}" for path, call in found if (why := wrong(call))]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("statuses", "no command statuses"),
        ("top --evry-s 3", "top has no --evry-s"),
        ("bench serve --num-request 3", "bench serve has no --num-request"),
        ("top --every-s=3", ""),
        ("bench serve --num-requests 3", ""),
        ("COMMAND", ""),
    ],
)
def test_what_is_not_there_is_found(call: str, why: str) -> None:
    assert wrong(call) == why


def test_5_8_the_readme_names_the_pages_and_commands_that_show_a_cluster() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`/status`" in readme
    assert {"top", "doctor", "explain"} <= {call.split()[0] for call in calls(readme) if call}


@pytest.mark.parametrize("only", ["chat", "up", "keys", "bench"])
def test_where_one_command_is_built_the_others_are_listed_as_before(only: str) -> None:
    whole, one = (main.build_app(name) for name in (None, only))
    assert help_text(one, "diptych", ["--help"]) == help_text(whole, "diptych", ["--help"])
    assert help_text(one, "diptych", [only, "--help"]) == help_text(whole, "diptych", [only, "--help"])
    others = [command.name for command in one.registered_commands if command.callback is not_built]
    assert only not in others or only == "bench"
    assert len(others) >= len(one.registered_commands) - 1
