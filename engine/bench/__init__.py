"""Benchmarks of the scheduler alone."""
