"""One module for each transport; each registers its `TransportSpec` (kvtransfer/fabric/registry.py) when it is imported."""
