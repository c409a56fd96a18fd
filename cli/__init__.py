BENCH_HELP = "Measure an OpenAI-compatible or gRPC server under load."
