"""Install commands in error messages work."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from diptych.common import extras
from diptych.common.errors import ConfigError
from diptych.common.observe.tracing import Tracing


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({"url": "file:///src/a", "dir_info": {"editable": True}}, ["-e", "/src/a[otel,cli]"]),
        ({"url": "file:///src/a", "dir_info": {}}, ["/src/a[otel,cli]"]),
        (
            {"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            ["diptych[otel,cli] @ git+https://h/r.git"],
        ),
        ({"url": "file:///w/d.whl", "archive_info": {}}, ["diptych[otel,cli] @ file:///w/d.whl"]),
        (None, ["diptych[otel,cli]"]),
    ],
)
def test_the_command_installs_from_where_the_package_came(monkeypatch, origin, source) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    words = shlex.split(extras.install_command("otel", "cli"))
    assert words[1:] == ["-m", "pip", "install", *source]
    assert words[0] in (sys.executable, ".venv/bin/python")


def test_2_4_tracing_without_its_packages_names_a_command_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*needs opentelemetry") as caught:
        Tracing().configure("test", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert extras.install_command("otel") in str(caught.value)


def test_2_4_what_make_installs_has_tracing() -> None:
    makefile = (Path(__file__).resolve().parents[3] / "Makefile").read_text()
    (line,) = (line for line in makefile.splitlines() if "constraints.txt -e" in line and "router" in line)
    assert "otel" in line.split("[")[1].split("]")[0].split(",")
