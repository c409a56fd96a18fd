"""The load harness for any OpenAI-compatible server and for Diptych's gRPC API.

    workload (pure) -> schedule (pure) -> runner -> records -> stats (pure) -> reports (JSON, CSV, HTML)

Latencies count from the *intended* send time, tokens are counted instead of chunks, and errors stay in the figures. The
harness measures its own delay and warns when it was too large.
"""
