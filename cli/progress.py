"""Progress of long set-up work: a bar on a terminal, a line per stage and per tenth in a pipe, nothing in tests."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self, TextIO


class Progress(Protocol):
    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are finished; a new stage name ends the former stage."""
        ...

    def note(self, text: str) -> None:
        """One line without an amount."""
        ...


class SilentProgress:
    def update(self, stage: str, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class LineProgress:
    """Plain lines, at most eleven a stage."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._stage = ""
        self._tenth = -1

    def update(self, stage: str, done: int, total: int) -> None:
        tenth = 10 * min(done, total) // max(total, 1)
        if stage != self._stage:
            self._stage, self._tenth = stage, -1
        if tenth > self._tenth:
            self._tenth = tenth
            self.note(f"{stage}: {10 * tenth}%")

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class BarProgress:
    """A rich bar; use as a context manager, so that the terminal is restored."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(file=out),
        )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        from rich.progress import TaskID

        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(TaskID(self._tasks[stage]), completed=min(done, total), total=total)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False)


class _Lines(LineProgress):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def progress_on(out: TextIO | None = None) -> BarProgress | _Lines:
    """The kind of progress for `out` (standard error by default): `with progress_on() as progress: ...`."""
    out = sys.stderr if out is None else out
    return BarProgress(out) if out.isatty() else _Lines(out)
