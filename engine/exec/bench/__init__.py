"""Benchmarks of the torch runner."""
