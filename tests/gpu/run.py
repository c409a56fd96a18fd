"""`make test-gpu`: all tests that need a GPU, and the result as JSON with cards and versions.

First whole clusters on two GPUs, then the tests that measure free memory, each alone; then the rest, several at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from diptych.bench.gpu.over_http import facts

ROOT = Path(__file__).resolve().parents[2]
SIZING = "tests/unit/engine_exec/test_exec_sizing.py"
PARTS: dict[str, list[str]] = {
    "clusters": ["tests/gpu"],
    "memory": [SIZING],
    "kernels and runner": ["tests/kernels", "tests/unit/engine_exec", "--ignore", SIZING],
}
TOGETHER = "kernels and runner"
DEADLINE_S = 600.0


def counted(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, and the names of what failed."""
    if not report.exists():
        return {"tests": 0, "failed": ["no report: pytest was ended"]}
    cases = list(ET.parse(report).iter("testcase"))
    failed = [
        f"{c.get('classname')}::{c.get('name')}" for c in cases if {"failure", "error"} & {part.tag for part in c}
    ]
    skipped = sum(any(part.tag == "skipped" for part in case) for case in cases)
    return {"tests": len(cases) - skipped, "skipped": skipped, "failed": failed}


def run(part: str, arguments: list[str], processes: int, report: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [f"--junitxml={report}", *PARTS[part], *arguments]
    if part == TOGETHER:
        command += ["-n", str(processes)]
    began = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    return {"seconds": round(time.monotonic() - began, 1), "code": code, **counted(report)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results/gpu-tests.json")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--commit", default="", help="to write into the result")
    args, more = parser.parse_known_args()
    result: dict[str, Any] = {"commit": args.commit, "facts": facts("cuda"), "parts": {}}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            result["parts"][part] = run(part, more, args.processes, Path(folder) / "report.xml")
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for part, row in result["parts"].items():
        print(f"{part}: {row['tests']} tests in {row['seconds']} s, failed: {', '.join(row['failed']) or 'none'}")
    return int(any(row["code"] for row in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
