"""Unmodified third-party clients, from a separate environment, against a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.cli.models.store import default_model_path

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
"""For one client; each takes seconds."""


class Clients:
    """Their environment, without a network: everything they would download is provided. `home`: a folder for their
    files; its hub cache has the model as local/smol."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self.model_folder = Path(default_model_path())
        hub = home / "hub" / "models--local--smol"
        (hub / "refs").mkdir(parents=True)
        (hub / "refs" / "main").write_text("abc")
        (hub / "snapshots").mkdir()
        (hub / "snapshots" / "abc").symlink_to(self.model_folder)

    def run(self, program: str, *arguments: str, more: Mapping[str, str] | None = None) -> str:
        """Output of a program of the environment; fails the test with all of it on an error."""
        offline_env = {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")
        }
        done = subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            env=environment | offline_env | dict(more or {}), cwd=self.home, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{program} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def script(self, name: str, *arguments: str) -> Any:
        """The JSON that a script of this folder prints as its last line."""
        said = self.run("python", str(Path(__file__).with_name(name)), *arguments)
        return json.loads(said.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    folder = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients"))
    assert (folder / "bin" / "python").exists(), f"no clients in {folder}: `make test-clients` installs them"
    return Clients(folder, tmp_path_factory.mktemp("clients"))


Check = Callable[..., tuple[Any, Any, Any]]


@pytest.fixture
def counted(cluster, metric_laws) -> Check:
    """counted(requests=N, more_choices=M): what the cluster has counted since the start of the test is N answered requests and
    nothing else, and all its figures add up. Returns: those of router, decode, prefill."""

    def scrape() -> dict[str, Any]:
        cluster.wait_idle()
        urls: dict[str, list[str]] = {"router": [cluster.http_url], "prefill": [], "decode": []}
        for child in cluster.state.children:
            if child.role in ("prefill", "decode"):
                urls[child.role].append(f"http://{child.metrics}")
        return {
            role: metric_laws.Figures.parse(*[httpx.get(f"{url}/metrics", timeout=20.0).text for url in found])
            for role, found in urls.items()
        }

    before = scrape()

    def check(*, requests: int, more_choices: int = 0) -> tuple[Any, Any, Any]:
        now = scrape()
        router, decode, prefill = (now[role].since(before[role]) for role in ("router", "decode", "prefill"))
        assert router.total("request_errors_total") == 0
        assert router.total("requests_total") == router.total("request_success_total") == requests
        assert not metric_laws.check_router(router, more_choices=more_choices)
        assert not metric_laws.check_workers(router, decode, prefill, exact=True)
        return router, decode, prefill

    return check
