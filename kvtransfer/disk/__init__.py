"""Blocks of KV in files of this machine: the tier below host memory, which outlives the process."""
