"""llama.cpp's server as a child of the benchmark, in the environment of `bench/peers/setup_llamacpp.sh` (no Diptych there).

    python llamacpp_process.py '{"model": FILE.gguf, "threads": 1, "sequences": 8, "tokens": 128}'

Prints `serves URL` once it answers and ends when it is terminated. Settings are those that its documentation recommends for
throughput on CPUs: as many threads for prompts as for decode, flash attention, the file mapped, weights repacked where it can, a
logical batch that holds all prompts, no prompt cache, no time spent on samplers that a greedy answer does not need.
"""

import json
import signal
import sys

import xllamacpp


def main() -> None:
    wanted = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = wanted["model"]
    params.n_parallel = wanted["sequences"]
    params.n_ctx = wanted["sequences"] * wanted["tokens"]
    params.n_batch, params.n_ubatch = 2048, wanted["ubatch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted["threads"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type(int(wanted["flash_attention"]))
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.fit_params = False
    params.cache_ram_mib = params.n_ctx_checkpoints = params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"serves {server.listening_address}", flush=True)
    signal.pause()


main()
