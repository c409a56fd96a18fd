"""The HTTP server: its app, the checks before routing, and one generation as a response."""
