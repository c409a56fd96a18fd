"""One placement decision alone: 64 workers, a million indexed blocks, prompts of 2,048 tokens; no sockets.

    python -m diptych.bench.router.decision [--seconds 3] [--rounds 3] [--backend auto] [--out FILE]

A decision is a request's cost at the router between its tokens and its placement: block identities (with hashing), hits
of all workers, the costs of all pairs, the choice, the spares, and the reservation. Rates are per second of CPU time of
one core; p50 and p99 are wall time and so include other load. The best slice of 64 decisions shows the core's rate
without contention.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.common.block_identity import IdentityHeader, block_keys
from diptych.common.request import Prompt
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.native.library import Library, choose_library
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import Placement, PlacementRequest

BLOCK_SIZE = 16
NUM_TOKENS = 2048
_SLICE = 64
HEADER = IdentityHeader(bytes(32), "model", "tokenizer", "float16", BLOCK_SIZE)


def make_record(worker_id: str, role: str, chance: random.Random, block_size: int = BLOCK_SIZE) -> WorkerRecord:
    load = WorkerLoad(
        num_running=chance.randrange(64),
        waiting_prompt_tokens=chance.randrange(20_000),
        prefill_tokens_per_s=chance.uniform(15_000, 25_000),
        decode_step_s=chance.uniform(0.01, 0.02),
    )
    return WorkerRecord(
        worker_id=worker_id,
        incarnation="i",
        role=role,
        address="127.0.0.1:1",
        pid=1,
        model="model",
        compat={},
        kv_bytes_per_token=131_072,
        num_blocks=100_000,
        block_size=block_size,
        max_model_len=131_072,
        max_num_seqs=256,
        event_epoch=0,
        load=load,
    )


class Setup:
    """A cluster with a full index, and prompts whose prefix is held by some workers."""

    def __init__(self, num_workers: int, num_blocks: int, seed: int = 0, library: Library | None = None) -> None:
        chance = random.Random(seed)
        self.rng = chance
        self.index = BlockIndex(max_blocks=4 * num_blocks)
        self.reservations = Reservations(time.monotonic)
        self.placer = Placer.of(self.index, self.reservations, random.Random(seed + 1), library=library)
        half = num_workers // 2
        records = [make_record(f"p{i}", "prefill", chance) for i in range(half)]
        records += [make_record(f"d{i}", "decode", chance) for i in range(num_workers - half)]
        sequences = dict.fromkeys((record.worker_id for record in records), 0)
        for record in records:
            self.index.register(record.worker_id, "i", 0, 0)
        self.prompts = [tuple(chance.randrange(128_000) for _ in range(NUM_TOKENS)) for _ in range(256)]
        for prompt in self.prompts:
            keys = tuple(block_keys(HEADER, prompt))
            for record in chance.sample(records, chance.randrange(4)):
                self._store(record.worker_id, sequences, keys[: chance.randrange(1, len(keys) + 1)])
        fill = np.random.default_rng(seed)
        share = -(-(num_blocks - self.index.num_keys) // num_workers)
        for record in records:
            blob = fill.bytes(16 * share)
            self._store(record.worker_id, sequences, tuple(blob[i : i + 16] for i in range(0, len(blob), 16)))
        at = [Candidate(record, 0.0, HEADER) for record in records]
        self.placer.set_workers(at[:half], at[half:], {}, {})

    def _store(self, worker_id: str, sequences: dict[str, int], keys: tuple[bytes, ...]) -> None:
        sequences[worker_id] += 1
        self.index.apply(worker_id, KvEvent("i", 0, sequences[worker_id], "stored", keys))

    def decide(self, prompt: PromptBlocks, number: int) -> Placement:
        placement = self.placer.place(PlacementRequest(NUM_TOKENS, 64), prompt, 0.0)
        assert isinstance(placement, Placement)
        chosen = placement.chosen
        computes = chosen.prefill or chosen.decode
        attempt = str(number)
        self.reservations.reserve(
            attempt, Reservation(computes.worker_id, chosen.decode.worker_id, NUM_TOKENS - computes.hit_tokens)
        )
        if number >= 64:
            self.reservations.release(str(number - 64))
        return placement


def measure(setup: Setup, seconds: float, *, hashing: bool) -> dict[str, float]:
    """Decisions for `seconds`; without hashing the prompts' identities are known already."""
    known = [PromptBlocks(Prompt(tokens)) for tokens in setup.prompts]
    for prompt in known:
        prompt.keys(HEADER)
    walls: list[float] = []
    cpus: list[float] = []
    number = 0
    until = time.perf_counter() + seconds
    cpu = time.process_time()
    while (now := time.perf_counter()) < until:
        at = number % len(known)
        began = time.thread_time()
        setup.decide(PromptBlocks(Prompt(setup.prompts[at])) if hashing else known[at], number)
        cpus.append(time.thread_time() - began)
        walls.append(time.perf_counter() - now)
        number += 1
    cpu = time.process_time() - cpu
    p50, p99 = np.percentile(walls, [50, 99])
    cpu_p50, cpu_p99 = np.percentile(cpus, [50, 99])
    slices = [sum(cpus[i : i + _SLICE]) for i in range(0, len(cpus) - _SLICE + 1, _SLICE)]
    return {
        "decisions": number,
        "decisions_per_cpu_s": round(number / cpu, 1),
        "decisions_per_cpu_s_best_slice": round(_SLICE / min(slices), 1) if slices else 0.0,
        "cpu_p50_ms": round(1e3 * float(cpu_p50), 4),
        "cpu_p99_ms": round(1e3 * float(cpu_p99), 4),
        "p50_ms": round(1e3 * float(p50), 4),
        "p99_ms": round(1e3 * float(p99), 4),
    }


def rounds(setup: Setup, seconds: float, count: int, *, hashing: bool) -> dict[str, Any]:
    """The round with the most decisions per CPU second, and the results of each round."""
    measured = [measure(setup, seconds, hashing=hashing) for _ in range(count)]
    rates = [one["decisions_per_cpu_s"] for one in measured]
    return {**measured[rates.index(max(rates))], "decisions_per_cpu_s_by_round": rates}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each of the two measurements")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds; the report has the best one, and the rate of each"
    )
    parser.add_argument("--backend", default="auto", help="auto, native or numpy")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "decision.json", help="result file")
    given = parser.parse_args(arguments)
    library = choose_library(given.backend)
    setup = Setup(given.workers, given.blocks, library=library)
    measure(setup, 0.3, hashing=True)  # warm-up
    num_keys = setup.index.num_keys
    result = {
        "surroundings": surroundings(),
        "backend": "numpy" if library is None else "native",
        "setting": {
            "workers": given.workers,
            "indexed_blocks": num_keys,
            "prompt_tokens": NUM_TOKENS,
            "block_size": BLOCK_SIZE,
        },
        "with_hashing": rounds(setup, given.seconds, given.rounds, hashing=True),
        "without_hashing": rounds(setup, given.seconds, given.rounds, hashing=False),
        "bytes_per_indexed_block": round(setup.index.nbytes / num_keys, 1),
    }
    for name in ("with_hashing", "without_hashing", "bytes_per_indexed_block"):
        print(name, result[name])
    write(given.out, result)


if __name__ == "__main__":
    main()
