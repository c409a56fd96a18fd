"""Verdicts of `diptych doctor` on workers of several ranks: how their GPUs are connected. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.cli.doctor.facts import Facts, Worker
from diptych.cli.doctor.verdict import Verdict, info, ok, warn
from diptych.worker.visible_gpus import NVLINK, OTHER_NODE

TOPOLOGY = "`nvidia-smi topo -m` shows which GPUs are connected; name them with --devices"


def ranks(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.answering:
        if worker.num_ranks > 1:
            yield _connection(worker)


def _connection(worker: Worker) -> Verdict:
    degree, stages = worker.setting("tensor_parallel_size", 1), worker.setting("pipeline_parallel_size", 1)
    seen = f"{worker.id}: {worker.num_ranks} ranks (tensor parallel {degree}, pipeline {stages})"
    if worker.num_nodes > 1:
        seen += f", {worker.ranks_here} on each of {worker.num_nodes} hosts"
    if worker.ranks_here % degree:
        return warn(
            "ranks",
            f"{seen}: what they exchange in every layer crosses the network",
            "have whole stages on each host: --pipeline-parallel-size at least --nnodes, and a multiple of it",
        )
    if not worker.on_gpu:
        return ok("ranks", f"{seen} on CPU cores")
    num_gpus, link = worker.setting("rank_gpus", 0), worker.settings.get("rank_link", "")
    if num_gpus < worker.ranks_here:
        return warn(
            "ranks",
            f"{seen} on {num_gpus} GPUs: ranks that share one wait for each other",
            "give each rank a GPU of its own: --devices",
        )
    if worker.num_nodes > 1 and worker.ranks_here == 1:
        return ok("ranks", seen)
    if not link:
        return info("ranks", f"{seen}; NVML does not say how their GPUs are connected")
    if link == NVLINK or degree == 1:
        return ok("ranks", f"{seen}, {link} between their GPUs")
    further = "crosses NUMA nodes" if link == OTHER_NODE else "goes over PCIe"
    return warn(
        "ranks",
        f"{seen}: what they exchange in every layer {further}",
        f"choose GPUs with NVLink between them, or pipeline stages instead of tensor parallelism. {TOPOLOGY}",
    )
