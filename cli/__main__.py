"""`python -m diptych.cli`; the cluster's child processes are started this way."""

from __future__ import annotations

from diptych.cli.start import main

main()
