"""The moves of requests, and of blocks for them, between the owners of the scheduler's collections."""
