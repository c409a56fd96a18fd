"""`python -m diptych.cli`, which is how the cluster's child processes are started."""

from __future__ import annotations

from diptych.cli.start import main

main()
