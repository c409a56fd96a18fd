"""The console script. The SDK's installation has it, too, without the dependencies of the command line; then it prints
what to install."""

from __future__ import annotations

import sys
from typing import NoReturn

from diptych.common.extras import install_command


def main() -> NoReturn:
    try:
        from diptych.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("diptych"):
            raise
        print(
            f"error: the command line needs {error.name}: {install_command('cli', 'router', 'worker')}", file=sys.stderr
        )
        sys.exit(1)
    run()
