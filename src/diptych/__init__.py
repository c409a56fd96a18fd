"""Diptych: large language models served from two hinged pools, prefill and decode."""

__version__ = "0.1.0"
