"""The store of the cluster's metadata: its interface, Redis and memory behind it, and what workers write there."""
