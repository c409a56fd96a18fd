"""GPU memory that slabs lie in: allocated and shared, reached by which path and at which rate."""
