"""The load harness: honest numbers of any OpenAI-compatible server and of our own gRPC API.

    workload (pure) -> schedule (pure) -> runner -> records -> stats (pure) -> reports (JSON, CSV, HTML)

Latencies count from the *intended* send time, tokens are counted and not chunks, and whatever went wrong stays in the
figures. The harness measures its own lag and says when it was too large.
"""
