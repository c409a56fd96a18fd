"""One process of a router (--router-processes N), started by its parent (cli/router_processes.py).

    python -P -m diptych.router.processes.child FOLDER NUMBER

FOLDER holds the sockets, the environment the settings: a URL among them may hold a password, and other users do not see
it there. The process ends with its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.router.processes.siblings import Siblings

_SETTINGS = "DIPTYCH_ROUTER_PROCESS_SETTINGS"


def environment_of(config: RouterConfig) -> dict[str, str]:
    """The variables of a process with these settings."""
    return {_SETTINGS: msgspec.json.encode(config, enc_hook=str).decode()}


def settings_in(environment: Mapping[str, str]) -> RouterConfig:
    """The inverse of environment_of."""

    def path(kind: type, value: Any) -> Path:
        return Path(value)

    return msgspec.json.decode(environment[_SETTINGS], type=RouterConfig, dec_hook=path)


def main() -> int:
    from diptych.router.server import run_router

    config, folder, number = settings_in(os.environ), Path(sys.argv[1]), int(sys.argv[2])
    try:
        return run_router(config, Siblings(folder, number, config.router_processes))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
