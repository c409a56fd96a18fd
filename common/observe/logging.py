"""Logging: structlog on stderr, text on a terminal, JSON otherwise. DIPTYCH_LOG_LEVEL and DIPTYCH_LOG_JSON override.

The standard library's logging (uvicorn, asyncio, grpc), warnings and uncaught exceptions of all threads use the same
format. gRPC's core writes to stderr directly; it is silent unless GRPC_VERBOSITY is set, since its errors also arrive
as a call's status. A thread writes the lines (log_writer.py): a full pipe blocks nobody. Lines of structlog's loggers
go to it as they are; a record of the standard library for each would double their cost.

Loggers bind context (`request_id`, `attempt`, ...); context of the whole process is given to setup_logging. Tracebacks
never show variables: they may contain prompts or keys.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from functools import partial
from types import TracebackType
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from diptych.common.observe.log_writer import ThreadedWriter

_STDERR = 2
_ENCODER = json.JSONEncoder(default=repr)
_process: dict[str, Any] = {}
"""Bound to every line of this process."""


class _LineLogger:
    """What a structlog logger writes its rendered lines to: every method takes one line."""

    def __init__(self, name: str, writer: ThreadedWriter) -> None:
        self.name = name
        self.debug = self.info = writer.write
        self.warning = self.error = self.critical = partial(writer.write, urgent=True)


def bind_process(**changes: Any) -> None:
    """Change what is bound to every line, such as the role of a worker. From any thread."""
    _process.update(changes)


def writes_json() -> bool:
    """Whether lines are JSON: as DIPTYCH_LOG_JSON says, else if stderr is not a terminal."""
    wish = os.environ.get("DIPTYCH_LOG_JSON", "")
    return wish not in ("0", "false", "no") if wish else not sys.stderr.isatty()


def setup_logging(**process: Any) -> None:
    """Configure structlog and the standard library's logging for this process; `process` is bound to every line.

    Call it once, before the first line.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _process.clear()
    bind_process(**process)
    level = logging.getLevelNamesMapping().get(os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper(), logging.INFO)
    shared: list[Any] = [
        lambda _logger, _method, event: {**_process, **event},
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    end: list[Any] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(lambda event, **_: _ENCODER.encode(event)),
        ]
        if writes_json()
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ,
                exception_formatter=structlog.dev.plain_traceback,  # rich, where it is installed, shows variables
            )
        ]
    )

    def rendered(logger: Any, method: str, event: Any) -> str:
        """A line, whatever the values are: the caller must not fail by what it logs."""
        line = event
        try:
            for step in end:
                line = step(logger, method, line)
            return str(line)
        except Exception as error:
            plain = {name: value for name, value in event.items() if isinstance(value, (str, int, float))}
            return _ENCODER.encode(plain | {"not_rendered": type(error).__name__})

    handler = ThreadedWriter(_STDERR, _dropped)
    names = structlog.stdlib.LoggerFactory(ignore_frame_names=[__name__])
    structlog.configure(
        processors=[*shared, rendered],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *name: _LineLogger(names(*name).name, handler),
        cache_logger_on_first_use=True,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end]
        )
    )
    root = logging.getLogger()
    for earlier in root.handlers:
        earlier.close()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("asyncio", "httpx", "httpcore", "grpc"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(
        args.exc_type, args.exc_value, args.exc_traceback, args.thread.name if args.thread is not None else ""
    )
    sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback, repr(args.object))


def _dropped(num_lines: int) -> logging.LogRecord:
    words = "log lines were dropped: whoever reads them is too slow, or the disk is full"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, f"{num_lines} {words}", (), None)


def _uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, where: str = ""
) -> None:
    if issubclass(kind, (KeyboardInterrupt, SystemExit)):
        return
    reported = (kind, error if error is not None else kind(), trace)
    logging.getLogger("diptych").error("uncaught exception%s", f" ({where})" if where else "", exc_info=reported)
