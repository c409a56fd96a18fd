"""Processes that are parts of a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.bench.part import running_part
from diptych.common.errors import ConfigError
from diptych_tests import waiting

LOUD = """
import sys, time
from pathlib import Path
print("serves one two", flush=True)
for stream in (sys.stdout, sys.stderr):
    stream.write("x" * (1 << 20))
    stream.flush()
Path(sys.argv[1]).touch()
while True:
    time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_part_that_logs_more_than_a_pipe_holds_goes_on(module: Path) -> None:
    (module / "loud_part.py").write_text(LOUD)
    done = module / "done"
    with running_part("loud_part", str(done)) as (process, addresses):
        assert addresses == ["one", "two"]
        waiting.wait_until(done.exists, what="all of its output is written")
        assert process.is_running()
    assert not process.is_running()


def test_a_part_that_ends_before_it_serves_is_reported_with_its_output(module: Path) -> None:
    (module / "broken_part.py").write_text("raise SystemExit('no port is left')")
    with pytest.raises(ConfigError, match="no port is left"), running_part("broken_part"):
        pass
