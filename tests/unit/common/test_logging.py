"""All output of a process uses the log format (5.4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

WAIT_S = 60.0


def log_lines(program: str, **env: str) -> list[dict[str, Any]]:
    """Lines on stderr of a process: each must be JSON with a time, a level and an event."""
    code = "from diptych.common.observe.logging import setup_logging; setup_logging(role='test'); " + program
    env = (
        {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        | {"DIPTYCH_LOG_JSON": "1"}
        | env
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, env=env, check=False
    )
    found = [json.loads(line) for line in done.stderr.splitlines()]
    for line in found:
        assert {"event", "level", "timestamp"} <= line.keys()
        assert line["role"] == "test"
    return found


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("import warnings; warnings.warn('old')", "old"),
        ("import logging; logging.getLogger('uvicorn.error').warning('from uvicorn')", "from uvicorn"),
        ("import logging; logging.getLogger('grpc._cython').error('from grpc')", "from grpc"),
        ("import asyncio; asyncio.run(asyncio.sleep(0)); 1 / 0", "uncaught exception"),
        (
            "import threading; one = threading.Thread(target=lambda: 1 / 0); one.start(); one.join()",
            "uncaught exception",
        ),
        (
            "import asyncio\nasync def main():\n"
            "    asyncio.get_running_loop().call_soon(lambda: 1 / 0)\n    await asyncio.sleep(0.01)\nasyncio.run(main())",
            "Exception in callback",
        ),
    ],
)
def test_5_4_whatever_speaks_in_a_process_speaks_json(program: str, event: str) -> None:
    (line,) = log_lines(program)
    assert event in line["event"]
    assert line["level"] in ("warning", "error")
    assert ("exception" in line) == ("1 / 0" in program)


def test_5_4_grpcs_core_is_silent_unless_asked() -> None:
    """A port that is taken is one of the things that it has words for."""
    program = (
        "import grpc, socket; from concurrent import futures; taken = socket.socket(); taken.bind(('127.0.0.1', 0)); "
        "taken.listen(); server = grpc.server(futures.ThreadPoolExecutor(1))\n"
        "try:\n    server.add_insecure_port(f'127.0.0.1:{taken.getsockname()[1]}')\nexcept RuntimeError:\n    print('taken')"
    )
    assert log_lines(program) == []


def test_a_line_that_cannot_be_rendered_is_replaced_by_one_that_says_so() -> None:
    """The caller goes on: a value that a line cannot hold is no error of the request that logs it."""
    program = (
        "import structlog; log = structlog.get_logger('here'); log.info('odd', value={(1, 2): 3}); log.info('next')"
    )
    odd, following = log_lines(program)
    assert odd["event"] == "odd"
    assert odd["not_rendered"] == "TypeError"
    assert (following["event"], following["logger"]) == ("next", "here")
