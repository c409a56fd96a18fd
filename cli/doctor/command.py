"""`diptych doctor`: gather facts about a slow cluster, evaluate them, print next steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from diptych.cli.doctor import adapters as doctor_adapters
from diptych.cli.doctor import gpus as doctor_gpus
from diptych.cli.doctor import hosts as doctor_hosts
from diptych.cli.doctor import ranks as doctor_ranks
from diptych.cli.doctor import serving as doctor_serving
from diptych.cli.doctor.facts import Facts
from diptych.cli.doctor.verdict import Level, Verdict, info

if TYPE_CHECKING:
    from diptych.cli.status_client import StatusClient
    from diptych.cli.worker_access import WorkerAccess

CHECKS: tuple[Callable[[Facts], Iterator[Verdict]], ...] = (
    doctor_hosts.cluster,
    doctor_serving.queues,
    doctor_serving.balance,
    doctor_serving.batches,
    doctor_serving.preemptions,
    doctor_serving.swap,
    doctor_serving.kv_headroom,
    doctor_serving.cache,
    doctor_serving.tokenizer,
    doctor_serving.fallbacks,
    doctor_adapters.adapters,
    doctor_hosts.transport,
    doctor_gpus.gpus,
    doctor_ranks.ranks,
    doctor_hosts.kernels,
    doctor_hosts.cores,
    doctor_hosts.limits,
    doctor_hosts.clocks,
)
_STYLES = {Level.OK: "green", Level.INFO: "dim", Level.WARN: "yellow", Level.BAD: "bold red", Level.UNKNOWN: "magenta"}


def examine(facts: Facts) -> list[Verdict]:
    """The verdicts of all checks. Pure."""
    return [verdict for check in CHECKS for verdict in check(facts)]


def as_json(verdicts: list[Verdict]) -> str:
    rows = [
        {"check": v.check, "level": v.level.value, "finding": v.finding, "next_step": v.next_step} for v in verdicts
    ]
    return json.dumps({"ok": not is_bad(verdicts), "verdicts": rows}, indent=1)


def is_bad(verdicts: list[Verdict]) -> bool:
    return any(verdict.level is Level.BAD for verdict in verdicts)


def lines_of(verdicts: list[Verdict]) -> list[str]:
    """Output for a pipe: one line per verdict, and one for its next step."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{verdict.level.value:<8}{verdict.check:<13}{verdict.finding}")
        if verdict.next_step:
            lines.append(f"{'':<21}-> {verdict.next_step}")
    return lines


def _table(verdicts: list[Verdict]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "finding, and what to do next"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts:
        text = Text(verdict.finding)
        if verdict.next_step:
            text.append(f"\n→ {verdict.next_step}", style="italic")
        table.add_row(Text(verdict.level.value, style=_STYLES[verdict.level]), verdict.check, text)
    return table


def show(verdicts: list[Verdict]) -> None:
    if not sys.stdout.isatty():
        print("\n".join(lines_of(verdicts)))
        return
    from rich.console import Console

    Console().print(_table(verdicts))


def run_doctor(client: StatusClient, *, sample_s: float, json_out: bool, access: WorkerAccess) -> int:
    """Returns: the exit code; 1 when a verdict is BAD. Raises: DiptychError when the router cannot be reached."""
    from diptych.cli.doctor.gather import gather

    facts = gather(client, sample_s, access=access)
    verdicts = [info("router", f"{client.url} serves {facts.status.get('model', '')}"), *examine(facts)]
    if json_out:
        print(as_json(verdicts))
    else:
        show(verdicts)
    return int(is_bad(verdicts))
