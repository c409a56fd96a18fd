"""Run a benchmark by name:  python -P -m diptych.bench [NAME [ARGUMENTS]]        without a name: the list

Benchmarks are part of the checkout, not of the wheel. Commands for users (`diptych bench serve`, `compare`, `sweep`,
`replay`) are in `diptych.cli.bench` and `diptych.loadtest`. Results are committed to bench/results; its README lists
them.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`target`: the make target that runs it with the recorded arguments; empty: none."""

    module: str
    measures: str
    target: str = ""


BENCHMARKS: dict[str, Benchmark] = {
    "engine": Benchmark("engine.vs_transformers", "our engine beside transformers, in one run", "bench-engine"),
    "quantized": Benchmark(
        "engine.quantized", "decode with quantized weights on the CPU beside float32", "bench-quantized"
    ),
    "llamacpp": Benchmark("peers.llamacpp", "our engine beside llama.cpp with the same GGUF files", "bench-llamacpp"),
    "lora": Benchmark("engine.lora", "adapters beside the base model, over HTTP", "bench-lora"),
    "dtypes": Benchmark("engine.dtypes", "our engine in float32 and in bfloat16, in turns"),
    "scheduler": Benchmark("engine.scheduler", "a step of the scheduler, by the number of sequences"),
    "mixed-steps": Benchmark(
        "engine.mixed_steps", "what a bound on mixed steps gives and costs, on a modelled machine"
    ),
    "quality": Benchmark("engine.quality", "perplexity of each method of quantization and each dtype", "quality"),
    "kernels": Benchmark("kernels.kernels", "each Triton kernel beside its floor", "bench-gpu"),
    "matmul": Benchmark("kernels.matmul", "matrix products beside cuBLAS"),
    "gpu-step": Benchmark("gpu.step", "whole steps of an 8B model on one GPU", "bench-gpu"),
    "gpu-ranks": Benchmark(
        "gpu.ranks", "tensor parallelism over two GPUs: all-reduces, identity, steps of a 70B model"
    ),
    "gpu-quantized": Benchmark("gpu.quantized", "whole steps with quantized weights, beside bf16"),
    "gpu-quantized-shapes": Benchmark(
        "kernels.quantized", "products with weights of 4 and 8 bits: kinds and shapes of kernels, alone and in steps"
    ),
    "gpu-lora": Benchmark("gpu.lora", "whole steps with eight adapters, beside steps without"),
    "gpu-vllm": Benchmark(
        "gpu.beside_vllm", "`serve` and vLLM over HTTP: bf16, adapters, quantized, two ranks", "bench-gpu-vllm"
    ),
    "gpu-step-parts": Benchmark("gpu.step_parts", "what the parts of a step take"),
    "gpu-batch-invariant": Benchmark(
        "gpu.batch_invariant", "identity and cost of --batch-invariant on one GPU", "bench-gpu-batch-invariant"
    ),
    "gpu-async": Benchmark("gpu.async_scheduling", "what launching the next step early gives"),
    "gpu-pair": Benchmark("gpu.pair", "prefill and decode on two GPUs of one host", "bench-gpu-pair"),
    "gpu-cross": Benchmark("gpu.cross", "two GPUs at one load, used three ways, over prompt lengths"),
    "gpu-http": Benchmark("gpu.over_http", "a cluster on two GPUs through HTTP, default flags", "bench-gpu-http"),
    "gpu-checkouts": Benchmark("gpu.checkouts", "several checkouts in turn on one machine: start, loads, hand-off"),
    "kv-loopback": Benchmark("kvtransfer.loopback", "transports on loopback beside their floor", "bench-kv"),
    "kv-handoff": Benchmark(
        "kvtransfer.handoff", "what of a transfer a client waits for; cancelled prompts", "bench-kv"
    ),
    "warm-restart": Benchmark("kvtransfer.warm_restart", "the first hit after a restart of every worker, from files"),
    "router-decision": Benchmark("router.decision", "placement decisions a second, and memory", "bench-router"),
    "router-quality": Benchmark("router.quality", "how well policies place, in simulation", "bench-router"),
    "router-overload": Benchmark(
        "router.overload", "admission under five times the load, in virtual time", "bench-overload"
    ),
    "router-beside": Benchmark("router.beside_long_prompts", "a short request beside long prompts", "bench-beside"),
    "router-processes": Benchmark(
        "router.processes", "throughput of a router by the number of its processes", "bench-router-processes"
    ),
    "router-peers": Benchmark("peers.routers", "our router beside sglang-router and vllm-router", "bench-peers"),
    "worker-calls": Benchmark("router.worker_calls", "what the token of calls to workers costs"),
    "prefix-timing": Benchmark("router.prefix_timing", "whether times tell what another tenant has sent"),
    "large-bodies": Benchmark("router.large_bodies", "stalls of the router's loop by large bodies"),
    "harness-vs-aiperf": Benchmark("loadtest.harness_vs_aiperf", "our load harness beside aiperf, one mock server"),
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print((__doc__ or "").strip() + "\n")
        for name, one in BENCHMARKS.items():
            print(f"  {name:<21}{one.measures}" + (f" (make {one.target})" if one.target else ""))
        return 0
    name = sys.argv[1]
    if name not in BENCHMARKS:
        print(f"error: no benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = f"diptych.bench.{BENCHMARKS[name].module}"
    sys.argv[:2] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
