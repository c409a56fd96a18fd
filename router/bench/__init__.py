"""Benchmarks of the router's decisions; results are in results/."""
