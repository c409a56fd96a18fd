"""structlog on stderr: lines for people on a terminal, JSON otherwise. DIPTYCH_LOG_LEVEL and DIPTYCH_LOG_JSON decide more.

Loggers bind what they know (`request_id`, `attempt`, ...); what holds for the whole process is given to setup_logging.
Variables of a trace are never printed: they may hold prompts or keys.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer


def setup_logging(**process: Any) -> None:
    """Configure structlog and the standard library's logging for this process; `process` is bound to every line.

    Call it once, before the first line.
    """
    level = logging.getLevelNamesMapping().get(os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper(), logging.INFO)
    wish = os.environ.get("DIPTYCH_LOG_JSON", "")
    as_json = wish not in ("0", "false", "no") if wish else not sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        lambda _logger, _method, event: {**process, **event},
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    end: list[Any] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("asyncio", "httpx", "httpcore", "grpc"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
