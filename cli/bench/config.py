"""Settings of the clusters that `diptych bench` starts itself."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.cores import usable_cores


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """Clusters that the benchmark starts when no target is given.

    Args:
        prefill_workers: number in the P/D cluster.
        decode_workers: number in the P/D cluster; the colocated baseline has as many workers as both pools together.
        threads_per_worker: torch threads, the same in both clusters; 0: the cores divided by the workers.
        serve_model: smollm2, a local folder, a GGUF file or a hub id.
        baseline: measure the colocated baseline, too.
        cluster_args: further flags of the workers, as one string.
    """

    prefill_workers: int = 1
    decode_workers: int = 1
    threads_per_worker: int = 0
    serve_model: str = "smollm2"
    baseline: bool = True
    cluster_args: str = ""

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def threads(self) -> int:
        return self.threads_per_worker or max(1, usable_cores() // self.num_workers)
