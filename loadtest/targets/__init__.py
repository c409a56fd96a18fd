"""The servers that are measured, by HTTP and by gRPC."""
