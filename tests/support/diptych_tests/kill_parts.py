"""The command of the kills of kill_run.py, on one cluster or several at once; `make chaos-kill`.

    python -P tests/chaos/kill_workers.py --kills 200 --out FILE
    python -P tests/chaos/kill_workers.py --kills 200 --clusters 5 --out FILE     each on its share of the cores
    python -P tests/chaos/kill_workers.py --merge RECORD RECORD ... --out FILE

The record is written again and again while it runs; `broken` says then that the run has not ended. SIGTERM and SIGINT end the
run at once, with what it has found. `holds` says which promises it shows; the exit status is 1 only where an answer failed,
differs, or is missing, since times are those of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from diptych.bench import result
from diptych.cli.up.processes import spawn
from diptych_tests import clusters
from diptych_tests.kill_run import PHASES, Run, flags, run, summed

_PART_ENDS_S = 60.0
"""For a part that was told to end to write its record and stop its cluster."""
_MERGE_EVERY_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of several."""
    lists = ("seeds", "references", "seconds", "failed", "wrong", "resources", "kills")
    body: dict[str, Any] = {name: sum((record[name] for record in records), []) for name in lists}
    body |= {name: sum(record[name] for record in records) for name in ("answers", "moved")}
    body["references"] = sorted(set(body["references"]))
    body["logprobs"] = {name: sum(record["logprobs"][name] for record in records) for name in records[0]["logprobs"]}
    offsets = [*accumulate((len(record["kills"]) for record in records), initial=0)]
    for name in ("losses", "gaps"):
        body[name] = [
            one | {"kill": one["kill"] + n} for n, record in zip(offsets, records, strict=False) for one in record[name]
        ]
    body["phases"] = [phase for phase in PHASES if any(phase in record["phases"] for record in records)]
    body["streams"] = records[0]["streams"]
    body["broken"] = "; ".join(record["broken"] for record in records if record["broken"])
    parts = [part for record in records for part in record.get("parts") or [record["environment"]]]
    return {"parts": parts, **summed(body)}


def _records(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _write(file: Path, body: Mapping[str, Any]) -> None:
    """In one piece: it may be read, or this process be killed, at any time."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def _one(chosen: argparse.Namespace, phases: Sequence[str], head: Mapping[str, Any]) -> dict[str, Any]:
    """Run one cluster. Returns: its record."""
    done = Run(chosen.seed, phases, chosen.tensor_parallel_size * chosen.pipeline_parallel_size)
    until = time.monotonic() + 60.0 * chosen.minutes

    def save() -> None:
        _write(chosen.out, {**head, **done.record()})

    async def until_told(cluster: clusters.Cluster) -> None:
        task = asyncio.current_task()
        assert task is not None
        for signum in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
        try:
            await run(
                done, cluster, kills=chosen.kills, most_down=chosen.most_down, until=until, save=save,
                say=lambda line: print(f"{chosen.seed:4} {line}", flush=True),
            )  # fmt: skip
        finally:
            save()

    with tempfile.TemporaryDirectory(prefix="kills-") as root:
        degrees = {"tensor_parallel": chosen.tensor_parallel_size, "pipeline": chosen.pipeline_parallel_size}
        given = [*flags(Path(root), chosen.model, **degrees), *chosen.up_args.split()]
        try:
            with clusters.running_cluster(Path(root), *given) as cluster:
                asyncio.run(until_told(cluster))
            done.broken = ""
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            done.broken = "ended by a signal"
        except (AssertionError, TimeoutError) as error:  # what it has found so far is told all the same
            done.broken = repr(error)
            traceback.print_exc()
    return done.record()


def _several(chosen: argparse.Namespace, arguments: Sequence[str], head: Mapping[str, Any]) -> dict[str, Any]:
    """Run clusters at once, each as this command with one. Returns: their record."""
    cores, number = sorted(os.sched_getaffinity(0)), chosen.clusters
    parts: list[subprocess.Popen[bytes]] = []
    ends = math.inf

    def tell(*_: object) -> None:
        nonlocal ends
        ends = min(ends, time.monotonic() + _PART_ENDS_S)
        for part in parts:
            part.terminate()

    for signum in _SIGNALS:
        signal.signal(signum, tell)
    with tempfile.TemporaryDirectory(prefix="kills-") as root:
        files = [Path(root) / f"{i}.json" for i in range(number)]
        for i, file in enumerate(files):
            command = [
                sys.executable, "-P", "-m", "diptych_tests.kill_parts", *arguments, "--clusters", "1", "--out", str(file),
                "--seed", str(chosen.seed + i), "--kills", str(math.ceil(chosen.kills / number)),
            ]  # fmt: skip
            os.sched_setaffinity(0, cores[i * len(cores) // number : (i + 1) * len(cores) // number] or cores)
            parts.append(spawn(command, log=None, env=os.environ, cwd=Path.cwd()))
        os.sched_setaffinity(0, cores)
        merge_at = 0.0
        while any(part.poll() is None for part in parts) and time.monotonic() < ends:
            time.sleep(0.2)  # sleep: a pause between two looks at the parts
            if time.monotonic() >= merge_at and (there := [file for file in files if file.exists()]):
                merge_at = time.monotonic() + _MERGE_EVERY_S
                _write(chosen.out, {**head, **merged(_records(there))})
        for part in parts:
            part.kill()
            part.wait()
        there = [file for file in files if file.exists()]
        if not there:
            raise SystemExit("no cluster has a record")
        body = merged(_records(there))
    if len(there) < number:
        body["broken"] += f"; {number - len(there)} clusters have no record"
    return body


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kill_workers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="of all clusters together")
    parser.add_argument("--clusters", type=int, default=1, help="that run at once, each on its share of the cores")
    parser.add_argument("--seed", type=int, default=1, help="of the first cluster; the others have the next ones")
    parser.add_argument("--phases", default="", help="separated by commas; empty: " + ", ".join(PHASES))
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill nothing later than that")
    parser.add_argument(
        "--most-down", type=int, default=1, help="workers that may be away at the next kill: with 1 two are then"
    )
    parser.add_argument("--model", default="smollm2", help="the default model, or a folder of it")
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        parser.add_argument(name, type=int, default=1, help="of each worker; of several ranks one is killed or stopped")
    parser.add_argument("--up-args", default="", help="further flags of `diptych up`, as one string")
    parser.add_argument("--commit", default="", help="of the code, where it lies in no repository")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="records of earlier runs; nothing is run")
    chosen = parser.parse_args(arguments)
    phases = [name.strip() for name in chosen.phases.split(",") if name.strip()] or list(PHASES)
    if unknown := set(phases) - set(PHASES):
        parser.error(f"--phases: {', '.join(sorted(unknown))}: must be of {', '.join(PHASES)}")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.merge:
        _write(chosen.out, merged(_records(chosen.merge)))
        return 0
    environment = result.surroundings()
    environment["git_hash"] = environment["git_hash"] or chosen.commit
    head = {"environment": environment, "command": ["kill_workers", *arguments]}
    clusters.OF_USERS = frozenset(os.environ)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    body = _several(chosen, arguments, head) if chosen.clusters > 1 else _one(chosen, phases, head)
    _write(chosen.out, {**head, **body})
    shown = (
        "holds",
        "num_kills",
        "by_phase",
        "replace_s",
        "gone_s",
        "gap_s",
        "gap_less_recompute_s",
        "failed",
        "wrong",
        "broken",
    )
    print(json.dumps({name: body[name] for name in shown}, indent=1))
    return 1 if body["failed"] or body["wrong"] or body["broken"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
