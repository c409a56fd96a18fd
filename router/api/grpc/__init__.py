"""The gRPC server: services Router and Operations, and the check of keys before them."""
