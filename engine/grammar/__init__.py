"""Structured output: compiling grammars, and following them token by token."""
