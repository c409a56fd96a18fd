"""Known vulnerabilities of the pinned packages (constraints.txt), by pip-audit.

    python .ci/audit.py [--service pypi|osv]

Exit code 0: none is known. 1: some are, and they are listed. 2: not all packages were audited, because pip-audit is not
installed here, or its advisory source (PyPI's or OSV's API) does not answer or knows nothing of them. CI does not run it: it
would fail by what others publish.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
_TIMEOUT_S = 900


def audit(command: list[str]) -> int:
    """Run pip-audit with `--format json` and say plainly what it means: it calls a package that it could not look up no
    vulnerable one. Returns: the exit code."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _nothing(f"pip-audit could not be run: {error}")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        said = (done.stdout + done.stderr).strip().splitlines()
        return _nothing(said[-1] if said else f"exit code {done.returncode}")
    audited = [package for package in packages if "vulns" in package]
    if not audited:
        why = packages[0].get("skip_reason", "") if packages else "no package was read"
        return _nothing(f"its source knows none of {len(packages)} packages: {why}")
    found = [
        f"{p['name']} {p['version']}: {v['id']}, fixed in {v['fix_versions']}" for p in audited for v in p["vulns"]
    ]
    skipped = sorted(package["name"] for package in packages if "vulns" not in package)
    print(f"audit: {len(found)} known vulnerabilities in {len(audited)} of {len(packages)} pinned packages")
    print("\n".join([*found, *(f"not looked up: {name}" for name in skipped)]))
    return 1 if found else 2 if skipped else 0


def _nothing(why: str) -> int:
    print(f"audit: NOTHING WAS AUDITED: {why}", file=sys.stderr)
    print("audit: it needs pip-audit and a way to its advisory source (--service pypi or osv)", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINS), "--no-deps", "--disable-pip"]
    return audit([*command, "--progress-spinner", "off", "--format", "json", "--vulnerability-service", args.service])


if __name__ == "__main__":
    sys.exit(main())
