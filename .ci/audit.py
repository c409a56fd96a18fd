"""Known vulnerabilities of the pinned packages (constraints.txt), by pip-audit, or by advisories that lie here.

    python .ci/audit.py [--service pypi|osv]
    python .ci/audit.py --database PATH      a checkout of PyPA's advisory database, a folder or a zip of OSV's JSON records

Exit code 0: none is known. 1: some are, and they are listed. 2: not all packages were audited, because pip-audit is not
installed here, or its advisory source (PyPI's or OSV's API) does not answer or knows nothing of them, or since the database is
older than MOST_DAYS. CI does not run it: it would fail by what others publish.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
_TIMEOUT_S = 900
MOST_DAYS = 30
"""Since the latest advisory of a database."""


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


# ---- advisories that lie here ----


_MODIFIED = re.compile(r"^modified: *['\"]?([-\dT:]+)", re.MULTILINE)


def normal(name: str) -> str:
    """A package's name, as PyPI compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Version by normal name, of a file of constraints."""
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in text.splitlines())
    return {normal(match[1]): match[2] for match in found if match}


def records(path: Path, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """OSV records; in PyPA's database, whose files take long to parse, of packages besides `names` only when they were modified.
    Raises: OSError, ValueError."""
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield json.loads(archive.read(name))
    elif (path / "vulns").is_dir():
        import yaml

        for file in sorted((path / "vulns").rglob("*.yaml")):
            text = file.read_text(encoding="utf-8")
            if normal(file.parent.name) in names:
                yield yaml.safe_load(text)
            elif modified := _MODIFIED.search(text):
                yield {"modified": modified[1]}
    else:
        for file in sorted(path.rglob("*.json")):
            yield json.loads(file.read_text(encoding="utf-8"))


def fixes(record: Mapping[str, Any], name: str, version: str) -> list[str] | None:
    """The versions with the fix, where the record is about this one; None: it is not."""
    from packaging.version import InvalidVersion, Version

    def number(text: object) -> Version:
        return Version("0" if text == "0" else str(text))

    if record.get("withdrawn"):
        return None
    here, about, fixed = Version(version), False, list[str]()
    for affected in record.get("affected", ()):
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI" or normal(str(package.get("name", ""))) != name:
            continue
        for listed in affected.get("versions", ()):
            try:
                about = about or number(listed) == here
            except InvalidVersion:
                continue  # of long ago: no pin looks so
        for part in affected.get("ranges", ()):
            if part.get("type") != "ECOSYSTEM":
                continue
            inside = False
            for event in part.get("events", ()):
                if "introduced" in event and number(event["introduced"]) <= here:
                    inside = True
                if "fixed" in event:
                    fixed.append(str(event["fixed"]))
                    inside = inside and number(event["fixed"]) > here
                if "last_affected" in event:
                    inside = inside and number(event["last_affected"]) >= here
            about = about or inside
    return fixed if about else None


def audit_by_database(path: Path, wanted: Mapping[str, str], today: datetime) -> int:
    """Returns: the exit code."""
    found, latest, number = list[str](), "", 0
    try:
        for record in records(path, wanted):
            number += 1
            latest = max(latest, str(record.get("modified") or record.get("published") or "").replace(" ", "T"))
            about = {normal(str(one.get("package", {}).get("name", ""))) for one in record.get("affected", ())}
            for name in sorted(about & wanted.keys()):
                if (fixed := fixes(record, name, wanted[name])) is not None:
                    found.append(f"{name} {wanted[name]}: {record['id']}, fixed in {fixed}")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        return _nothing(f"{path} cannot be read: {error!r}")
    if not number:
        return _nothing(f"{path} has no advisory of PyPA's database and no OSV record")
    print(f"audit: {len(found)} known vulnerabilities in {len(wanted)} pinned packages, by {number} advisories")
    print("\n".join(sorted(found)), end="\n" if found else "")
    days = (today - datetime.fromisoformat(latest[:10]).replace(tzinfo=UTC)).days
    if days > MOST_DAYS:
        print(
            f"audit: the latest of these advisories is {days} days old: later ones are not in this database",
            file=sys.stderr,
        )
    return 1 if found else 2 if days > MOST_DAYS else 0


def _nothing(why: str) -> int:
    print(f"audit: NOTHING WAS AUDITED: {why}", file=sys.stderr)
    print(
        "audit: it needs pip-audit and a way to its advisory source (--service pypi or osv), or --database",
        file=sys.stderr,
    )
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    parser.add_argument("--database", type=Path, help="advisories that lie here; nothing is asked for over a network")
    args = parser.parse_args()
    if args.database is not None:
        return audit_by_database(args.database, pins(PINS.read_text(encoding="utf-8")), datetime.now(UTC))
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINS), "--no-deps", "--disable-pip"]
    return audit([*command, "--progress-spinner", "off", "--format", "json", "--vulnerability-service", args.service])


if __name__ == "__main__":
    sys.exit(main())
