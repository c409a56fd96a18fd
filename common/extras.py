"""Install commands for optional dependencies of this package."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

_PACKAGE = "diptych"


def install_command(*extras: str) -> str:
    """A shell command that installs the extras into this interpreter's environment, from the origin of this package: a
    checkout, an archive, a repository or a package index."""
    return shlex.join([_interpreter(), "-m", "pip", "install", *_source(f"[{','.join(extras)}]", _origin())])


def _interpreter() -> str:
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _source(extras: str, origin: dict[str, Any] | None) -> list[str]:
    """The pip requirement. `origin`: the installed package's direct_url.json; None: it was installed from an index."""
    if origin is None:
        return [f"{_PACKAGE}{extras}"]
    url: str = origin["url"]
    if "dir_info" in origin:
        editable = ["-e"] if origin["dir_info"].get("editable") else []
        return [*editable, f"{url.removeprefix('file://')}{extras}"]
    vcs = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return [f"{_PACKAGE}{extras} @ {vcs}{url}"]


def _origin() -> dict[str, Any] | None:
    """The PEP 610 record. A checkout that is only on sys.path counts as installed from its folder."""
    from importlib import metadata  # takes 20 ms, and few commands need it

    try:
        written = metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        checkout = Path(__file__).resolve().parents[1]
        return {"url": f"file://{checkout}", "dir_info": {"editable": True}}
    found: dict[str, Any] | None = None if written is None else json.loads(written)
    return found
