"""Progress of a start-up on stderr: a spinner on a terminal, one line per stage in a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

from diptych.cli.stderr import write_line


class Stages:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._status: Any = None
        self._console: Any = None
        self._lost = 0
        """Lines that a full disk did not take, since the last one that it took."""
        if sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False)

    def stage(self, text: str) -> None:
        """Show the current stage."""
        if self._console is None:
            self._print(text + " ...")
            return
        self.end()
        self._status = self._console.status(text + " ...")
        self._status.start()

    def done(self, text: str) -> None:
        """Show one finished stage; it stays on the screen."""
        self.end()
        self._print(text)

    def end(self) -> None:
        """Remove the spinner, so that other output can follow."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        if self._console is not None:
            self._console.print(line, markup=False)
            return
        lost = f"({self._lost} lines could not be written)\n" if self._lost else ""
        self._lost = 0 if write_line(lost + line) else self._lost + 1
