"""Settings that name files are refused before a model's weights are read, which may take minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.serve.command import run_serve
from diptych.cli.serve.config import ServeConfig
from diptych.common.errors import ConfigError
from diptych.worker.config import WorkerConfig
from diptych.worker.process import run_process

NONE = "none.pem"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"secret_file": ""}, "secret_file"),
        ({"secret_file": NONE}, "secret_file"),
        ({"cluster_ca": NONE, "cluster_cert": NONE, "cluster_key": NONE}, "cluster_ca"),
        ({"redis_url": "rediss://h", "redis_ca": NONE}, "redis_ca"),
        ({"client_port": 0, "client_tls_cert": NONE, "client_tls_key": NONE}, "client_tls_cert"),
    ],
)
def test_a_worker_refuses_files_first(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex())
    config = WorkerConfig(role="decode", **{"secret_file": str(secret), "model": str(tmp_path / "nothing")} | settings)
    with pytest.raises(ConfigError) as caught:
        run_process(config, make_services=lambda runtime: ())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"keys_file": Path(NONE)}, "keys_file"), ({"tls_cert": Path(NONE), "tls_key": Path(NONE)}, "tls_cert")],
)
def test_serve_refuses_files_first(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_serve(ServeConfig(**settings), tmp_path / "nothing", "nothing")
    assert caught.value.field == field
