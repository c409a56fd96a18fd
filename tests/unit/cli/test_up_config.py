from __future__ import annotations

import pytest

from diptych.cli.settings.options import field_help
from diptych.cli.up.config import UpConfig, threads_for
from diptych.cli.up.supervisor import exit_reason, restart_delay_s
from diptych.common.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prefill_workers": 0}, "prefill_workers"),
        ({"http_port": 70000}, "http_port"),
        ({"http_port": 9, "grpc_port": 9}, "grpc_port"),
        ({"local_prefill_max_tokens": -1}, "local_prefill_max_tokens"),
        ({"startup_timeout_s": 0.0}, "startup_timeout_s"),
        ({"dtype": "int3"}, "dtype"),
        ({"transport": "foo"}, "transport"),
    ],
)
def test_bad_values_are_named(values, field):
    with pytest.raises(ConfigError, match=field):
        UpConfig(**values)


def test_threads_share_the_cores_and_are_never_zero():
    assert threads_for(UpConfig(), cores=2) == 1
    assert threads_for(UpConfig(), cores=1) == 1
    assert threads_for(UpConfig(), cores=16) == 8
    assert threads_for(UpConfig(threads_per_worker=3), cores=2) == 3


def test_restart_delay_grows_and_is_bounded():
    delays = [restart_delay_s(failures) for failures in range(1, 20)]
    assert delays[0] == 0.25
    assert delays == sorted(delays)
    assert delays[-1] == 10.0


def test_exit_reason():
    assert exit_reason(-9) == "killed by SIGKILL"
    assert exit_reason(3) == "exit code 3"


def test_field_help_reads_the_docstring():
    texts = field_help(UpConfig)
    assert texts["model"].startswith("a local Hugging Face folder")
    assert "more on larger machines" in texts["threads_per_worker"]
