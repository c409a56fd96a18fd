"""Benchmarks of the project itself, run from a checkout: `python -P -m diptych.bench`. Not in the wheel."""
