"""Live output during a run, on stderr: a table on a terminal, occasional lines in a pipe."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from diptych.loadtest.runs.runner import Progress, Runner

PLAIN_EVERY_S = 5.0
RECENT = 50


def line(label: str, progress: Progress, elapsed_s: float) -> str:
    if not progress.total:
        return f"{label}: warm-up, {progress.done} done, {elapsed_s:.0f} s"
    recent = list(progress.ttfts[-RECENT:])
    ttft = f"{statistics.median(recent) * 1000:.0f} ms" if recent else "-"
    rate = progress.tokens / elapsed_s if elapsed_s > 0 else 0.0
    return (
        f"{label}: {progress.done}/{progress.total} done, {progress.running} running, {progress.failed} failed, "
        f"{rate:.1f} tok/s, TTFT p50 {ttft} (last {min(len(recent), RECENT)}), {elapsed_s:.0f} s"
    )


def watcher(stream: TextIO | None = None) -> Callable[[str, Runner], contextlib.AbstractContextManager[None]]:
    """The `Watch` for this output: rich on a terminal, lines otherwise."""
    out = stream or sys.stderr
    return _rich(out) if out.isatty() else _plain(out)


def silent(label: str, runner: Runner) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _plain(out: TextIO) -> Callable[[str, Runner], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def watch(label: str, runner: Runner) -> Iterator[None]:
        began = time.monotonic()
        with _ticking(lambda: print(line(label, runner.progress, time.monotonic() - began), file=out, flush=True)):
            yield
        print(line(label, runner.progress, time.monotonic() - began), file=out, flush=True)

    return watch


@contextlib.contextmanager
def _ticking(action: Callable[[], None], every_s: float = PLAIN_EVERY_S) -> Iterator[None]:
    """Runs on a separate thread, to keep the event loop free. It only reads counters."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(every_s):
            action()

    thread = threading.Thread(target=tick, name="bench progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rich(out: TextIO) -> Callable[[str, Runner], contextlib.AbstractContextManager[None]]:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    console = Console(file=out)

    def view(label: str, progress: Progress, elapsed_s: float) -> Any:
        table = Table.grid(padding=(0, 1))
        table.add_row(f"[bold]{label}[/]", ProgressBar(total=max(1, progress.total), completed=progress.done, width=40))
        table.add_row("", line(label, progress, elapsed_s).partition(": ")[2])
        return table

    @contextlib.contextmanager
    def watch(label: str, runner: Runner) -> Iterator[None]:
        began = time.monotonic()
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def show() -> None:
                live.update(view(label, runner.progress, time.monotonic() - began), refresh=True)

            with _ticking(show, every_s=0.25):
                yield
        print(line(label, runner.progress, time.monotonic() - began), file=out, flush=True)

    return watch
