"""How the process of a rank is started, by the worker or by the node that it is on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from diptych.common import child
from diptych.engine.ranks.frames import EngineEnd


@dataclass(frozen=True, slots=True)
class RankSpec:
    """How a rank's process is started.

    Args:
        factory: "module:callable"; called with `arguments`, returns the rank's ModelRunner. It gets the whole step, with what is
            to be drawn; the sampling rank's result counts, and what others draw is not looked at.
        arguments: by name, as JSON holds them.
        env: the process's whole environment; None: ours without passwords.
    """

    factory: str
    arguments: Mapping[str, object]
    env: Mapping[str, str] | None = None


class StartedRank:
    """A rank of this host, and our end of the socket to it. Its process ends with the thread that makes this."""

    def __init__(self, number: int, spec: RankSpec) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self.link = EngineEnd(ours)
        with theirs:
            self.process: subprocess.Popen[bytes] = child.start(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "diptych.engine.ranks.process",
                    spec.factory,
                    json.dumps(dict(spec.arguments)),
                ],
                env=child.environment() if spec.env is None else spec.env,
                stdin=theirs.fileno(),
                stdout=child.DEVNULL,
                new_session=True,
            )
