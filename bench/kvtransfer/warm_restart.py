"""Every worker is killed and starts again: the first hit of a prompt comes from files. Its time to first token beside computing
the prompt, in one run of one cluster (1P + 1D, `diptych up`).

    python -P -m diptych.bench warm-restart [--tokens 1500] [--prompts 6] [--out FILE]

Each prompt is asked for three times: cold (computed), after the restart (from files, which half of the prompts find in the
system's memory, and half on the disk only), and once more (from the first tier). The ids must be the same.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.result import RESULTS, spread, surroundings, write
from diptych.bench.router.beside_long_prompts import REQUEST_S, Cluster
from diptych.cli.up.run_folder import RunFolder

ANSWER = 16
BLOCK = 16
BACK_S = 600.0


class Asked:
    def __init__(self, cluster: Cluster, tokens: int, prompts: int) -> None:
        chance = random.Random(11)
        self.prompts = [[chance.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(prompts)]
        self._cluster, self._model = cluster, cluster.model()

    def ask(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._cluster.keys['one']}", "x-diptych-explain": "1"}
        answer = httpx.post(
            f"{self._cluster.url}/v1/completions", json=body | fields, headers=headers, timeout=REQUEST_S
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*/*/*/*-*"))


def wait_for(what: str, condition: Any, deadline_s: float = BACK_S) -> None:
    """Raises: RuntimeError."""
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.1)


def restart_all(cluster: Cluster, run_folder: Path, num_workers: int) -> float:
    """kill -9, and wait for the supervisor's new ones. Returns: seconds until an answer came through both pools."""

    def incarnations() -> dict[str, str]:
        headers = {"authorization": f"Bearer {cluster.keys['one']}"}
        status = httpx.get(f"{cluster.url}/status.json", headers=headers, timeout=30).json()["cluster"]
        return {
            one["id"]: one["incarnation"] for one in status["workers"] if one["state"] == "ready" and not one["why_not"]
        }

    state = RunFolder(run_folder).read_state()
    assert state is not None
    before, began = incarnations(), time.monotonic()
    for child in state.children:
        if child.role in ("prefill", "decode"):
            os.kill(child.pid, signal.SIGKILL)

    def back() -> bool:
        now = incarnations()
        return len(now) == num_workers and not set(now.values()) & set(before.values())

    wait_for("all workers are back", back)
    return time.monotonic() - began


def drop_cached(folder: Path) -> None:
    """The next reads are from the disk."""
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(tokens: int, prompts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root, kv = Path(folder), Path(folder) / "kv"
        cluster = Cluster(1, root, ("--worker-args", f"--disk-kv-dir {kv}"))
        try:
            cluster.wait_ready()
            asked = Asked(cluster, tokens, prompts)
            asked.ask(asked.prompts[0][:300])  # warm: links are measured
            cold = [asked.ask(prompt, local_prefill_max_tokens=0) for prompt in asked.prompts]
            least = prompts * ((tokens - 1) // BLOCK) * 2  # both pools keep them
            wait_for("the blocks are in files", lambda: len(files(kv)) >= least)
            restart_s = restart_all(cluster, root, 2)
            asked.ask(asked.prompts[0][:300][::-1])  # another prompt: connections are there again
            warm, cached = [], []
            for number, prompt in enumerate(asked.prompts):
                if number % 2:
                    drop_cached(kv)
                warm.append(asked.ask(prompt))
                cached.append(asked.ask(prompt))
        finally:
            cluster.stop()
    ids = [[one["choices"][0]["token_ids"] for one in arm] for arm in (cold, warm, cached)]
    ttft = [[one["diptych"]["ttft_s"] for one in arm] for arm in (cold, warm, cached)]
    why = [one["diptych"] for one in warm]
    found = {
        "tokens": tokens,
        "identical": ids[0] == ids[1] == ids[2],
        "computed_ttft_s": spread(ttft[0]),
        "from_files_in_memory_ttft_s": spread(ttft[1][0::2]),
        "from_files_on_disk_ttft_s": spread(ttft[1][1::2]),
        "from_the_first_tier_ttft_s": spread(ttft[2]),
        "ratio_in_memory": spread([w / c for w, c in zip(ttft[1][0::2], ttft[0][0::2], strict=True)]),
        "ratio_on_disk": spread([w / c for w, c in zip(ttft[1][1::2], ttft[0][1::2], strict=True)]),
        "from_files": [one["cached_tiers_decode"] or one["cached_tiers_prefill"] for one in why],
        "local_prefill": [one["local_prefill"] for one in why],
        "predicted_ttft_s": [round(one["predicted_ttft_s"], 4) for one in why],
        "reserved_s": [round(one["reserved_s"], 4) for one in why],
        "restart_of_all_s": round(restart_s, 2),
    }
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS / "warm-restart.json")
    args = parser.parse_args()
    body = {"what": "first hit after a restart of every worker, from files", "surroundings": surroundings()}
    write(args.out, body | run(args.tokens, args.prompts))


if __name__ == "__main__":
    main()
