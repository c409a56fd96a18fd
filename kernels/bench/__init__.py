"""Benchmarks of the GPU kernels, and the cases that they share with the tests."""
