"""Benchmarks of the project, run from a checkout: `python -P -m diptych.bench`. Not in the wheel."""
