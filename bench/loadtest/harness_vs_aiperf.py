"""The load harness and aiperf 0.13.0 on one mock server, alternately: ours, aiperf, ours, aiperf; p50 of every figure.

    python3.11 -m venv FOLDER && FOLDER/bin/pip install aiperf==0.13.0
    .venv/bin/python -P bench/loadtest/harness_vs_aiperf.py FOLDER --out bench/results/harness-vs-aiperf.json

aiperf counts from the actual send, ours from the intended one; `ttft_from_send_ms` is ours by aiperf's definition.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from diptych.bench.result import surroundings, write
from diptych.cli.bench.capacity import mock_process, own_lateness
from diptych.cli.models.store import resolve_model
from diptych.loadtest.mock_server import Script

RATE, INPUT, OUTPUT, WARMUP = 10, 64, 33, 5
FIGURES = ("ttft_ms", "itl_ms", "e2e_ms")


def tokenizer_cache(root: Path) -> dict[str, str]:
    """Put the model's tokenizer into a hub cache, where aiperf looks for it; returns the environment for it."""
    snapshot = root / "hub" / "models--local--smol" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (snapshot / name).symlink_to(resolve_model("smollm2") / name)
    return {"HF_HOME": str(root), "HF_HUB_OFFLINE": "1"}


def ours(url: str, requests: int, out: Path) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "diptych.cli", "bench", "serve", "--target", f"mock={url}", "--api", "chat"]
    command += ["--num-requests", str(requests), "--request-rate", str(RATE), "--burstiness", "inf"]
    command += ["--input-len", str(INPUT), "--output-len", str(OUTPUT), "--warmup", str(WARMUP), "--no-explain"]
    subprocess.run([*command, "--out", str(out), "--label", "run"], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((out / "serve-run.json").read_text())
    lines = (line for line in (out / "serve-run.csv").read_text().splitlines() if not line.startswith("#"))
    rows = [row for row in csv.DictReader(lines) if row["warmup"] == "0"]
    return {
        "ttft_ms": found["p50_ttft_ms"],
        "ttft_from_send_ms": statistics.median(float(r["first_token_ms"]) - float(r["sent_ms"]) for r in rows),
        "itl_ms": found["p50_itl_ms"],
        "e2e_ms": found["p50_e2el_ms"],
        "loop_lag_p99_ms": found["diptych"]["lag"]["loop"]["p99"],
    }


def aiperf(environment: Path, url: str, requests: int, out: Path, env: dict[str, str]) -> dict[str, float]:
    flags = (
        f"--endpoint-type chat --streaming --tokenizer local/smol --request-rate {RATE} --request-rate-mode constant"
    )
    flags += f" --request-count {requests} --warmup-request-count {WARMUP} --isl {INPUT} --isl-stddev 0"
    flags += f" --osl {OUTPUT} --osl-stddev 0 --extra-inputs ignore_eos:true --random-seed 0 --ui none --workers-max 2"
    command = [str(environment / "bin" / "aiperf"), "profile", "--model", "mock", "--url", url, *flags.split()]
    base = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    base["PATH"] = f"{environment / 'bin'}:{base.get('PATH', '')}"
    subprocess.run(
        [*command, "--artifact-dir", str(out)], check=True, env=base | env, cwd=out, stdout=subprocess.DEVNULL
    )
    found: dict[str, Any] = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    return {
        "ttft_ms": found["time_to_first_token"]["p50"],
        "itl_ms": found["inter_token_latency"]["p50"],
        "e2e_ms": found["request_latency"]["p50"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="aiperf's virtual environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("bench-out/harness-vs-aiperf.json"))
    given = parser.parse_args()
    script = Script()
    environment = surroundings()
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "aiperf": []}
    with tempfile.TemporaryDirectory() as root, mock_process(script) as url:
        env = tokenizer_cache(Path(root))
        for number in range(given.rounds):
            for name in runs:
                out = Path(root) / f"{name}-{number}"
                out.mkdir()
                if name == "ours":
                    runs[name].append(ours(url, given.requests, out))
                else:
                    runs[name].append(aiperf(given.environment.absolute(), url, given.requests, out, env))
                print(name, runs[name][-1], flush=True)
        lateness = own_lateness(url)
    middle = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    ratios = {key: middle["ours"][key] / middle["aiperf"][key] for key in FIGURES}
    ratios["ttft_from_send"] = middle["ours"]["ttft_from_send_ms"] / middle["aiperf"]["ttft_ms"]
    body = {
        "what": f"One scripted server (first token {script.first_token_s * 1e3:g} ms, then {script.token_s * 1e3:g} ms a token, "
        f"{script.tokens_per_chunk} tokens a chunk, {OUTPUT} tokens), {given.requests} requests at a constant {RATE}/s, chat "
        "API, streamed; ours and aiperf in turns; p50 in milliseconds, medians of the rounds.",
        "environment": environment,
        "aiperf": "0.13.0",
        "the_mock_itself": lateness,
        "median": middle,
        "ours_over_aiperf": ratios,
        "runs": runs,
    }
    write(given.out, body)
    print(ratios)
    return int(any(abs(value - 1.0) > 0.05 for value in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
