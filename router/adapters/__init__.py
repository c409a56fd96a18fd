"""Adapters at the router: which version answers a request, loading and unloading, and turns for the workers' slots."""
