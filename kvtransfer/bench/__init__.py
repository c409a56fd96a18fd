"""Benchmarks of the transfer."""
