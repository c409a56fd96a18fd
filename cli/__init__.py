BENCH_HELP = "Measure any OpenAI-compatible server, or our own gRPC API, under load."
