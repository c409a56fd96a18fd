"""One module for each transport; each registers its `TransportSpec` (kvtransfer/registry.py) when it is imported."""
