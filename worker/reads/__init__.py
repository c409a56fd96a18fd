"""Reads of other workers' KV: hand-offs and pulls."""
