from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.settings.options import field_help
from diptych.cli.up.command import check_model, run_up
from diptych.cli.up.config import UpConfig, threads_for
from diptych.cli.up.startup_message import startup_message
from diptych.cli.up.supervisor import exit_reason, restart_delay_s
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.worker.config import WorkerConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
}


@pytest.mark.parametrize(
    ("field", "args", "flag"),
    [
        ("router_args", "--log-level debug --http-port 9000", "--http-port"),
        ("router_args", "--host=::1", "--host"),
        ("worker_args", "--metrics-port 9", "--metrics-port"),
    ],
)
def test_flags_by_which_up_finds_its_processes_are_not_given_to_these(field: str, args: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is chosen by `up` itself") as raised:
        UpConfig(**{field: args})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prefill_workers": 0}, "prefill_workers"),
        ({"http_port": 70000}, "http_port"),
        ({"http_port": 9, "grpc_port": 9}, "grpc_port"),
        ({"local_prefill_max_tokens": -1}, "local_prefill_max_tokens"),
        ({"startup_timeout_s": 0.0}, "startup_timeout_s"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"transport": "foo"}, "transport"),
    ],
)
def test_bad_values_are_named(values, field):
    with pytest.raises(ConfigError, match=field):
        UpConfig(**values)


def test_files_that_are_no_certificates_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """The public ones ended the start with a traceback, the inner ones at the first worker."""
    none, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    for file in (none, text):
        for names in (("tls_cert", "tls_key"), ("cluster_ca", "cluster_cert", "cluster_key")):
            config = UpConfig(**dict.fromkeys(names, file))
            with pytest.raises(ConfigError) as caught:
                run_up(config, tmp_path / ".run", lambda stages: pytest.fail("a model was fetched"))
            assert caught.value.field == names[0]


def test_5_8_what_the_workers_would_refuse_of_the_model_is_refused_before_they_start(tmp_path: Path) -> None:
    def reported(**values: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_model(UpConfig(**values), tmp_path)
        return str(caught.value)

    config = tmp_path / "config.json"
    assert "has no config.json" in reported()
    config.write_text("[]")
    assert "must hold a JSON object" in reported()
    config.write_text('{"architectures": ["GPTJForCausalLM"]}')
    assert "GPTJForCausalLM" in reported()
    config.write_text(json.dumps(LLAMA))
    check_model(UpConfig(max_model_len=512), tmp_path)
    check_model(UpConfig(), tmp_path)
    assert "max_model_len=513: must be at most the model's 512" in reported(max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len"):
        WorkerConfig(max_model_len=1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size=3: the model has 4 attention heads (num_attention_heads); --tensor-parallel-size can "
            "be 1, 2, 4",
        ),
        (
            {"decode_tensor_parallel_size": 8},
            "decode_tensor_parallel_size=8: the model has 4 attention heads (num_attention_heads); "
            "--decode-tensor-parallel-size can be 1, 2, 4",
        ),
        (
            {"prefill_pipeline_parallel_size": 3},
            "prefill_pipeline_parallel_size=3: the model has 2 layers; --prefill-pipeline-parallel-size can be 1 to 2",
        ),
    ],
)
def test_23_ranks_that_cannot_divide_the_model_are_refused_before_anything_starts(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError) as caught:
        check_model(UpConfig(**values), tmp_path)
    assert words == str(caught.value)


@pytest.mark.parametrize(
    ("values", "quantization", "words"),
    [
        (
            {"prefill_tensor_parallel_size": 2},
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            "prefill_tensor_parallel_size=2: decode has 1; with fp8 both pools need one degree: ranks quantize what they "
            "multiply by its own largest value",
        ),
        (
            {"tensor_parallel_size": 2, "decode_tensor_parallel_size": 4, "batch_invariant": True},
            {},
            "decode_tensor_parallel_size=4: prefill has 2; with --batch-invariant both pools need one degree, in whose order "
            "sums are added up",
        ),
        ({"tensor_parallel_size": 2}, {"quant_method": "fp8", "activation_scheme": "dynamic"}, ""),
        ({"decode_tensor_parallel_size": 2}, {}, ""),
    ],
)
def test_23_pools_that_would_refuse_each_other_are_refused_before_anything_starts(
    tmp_path: Path, values: dict[str, Any], quantization: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    if not words:
        check_model(UpConfig(**values), tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        check_model(UpConfig(**values), tmp_path)
    assert str(caught.value) == words


def test_23_each_pool_has_degrees_of_its_own_or_those_of_all() -> None:
    config = UpConfig(tensor_parallel_size=2, decode_tensor_parallel_size=1, prefill_pipeline_parallel_size=3)
    assert [config.degrees(role) for role in ("prefill", "decode")] == [Degrees(2, 3), Degrees(1, 1)]
    assert config.num_ranks == 7
    assert threads_for(config, 16) == 2
    assert threads_for(config, 16, num_ranks=6) == 12
    with pytest.raises(ConfigError, match="decode_pipeline_parallel_size=65"):
        UpConfig(decode_pipeline_parallel_size=65)
    with pytest.raises(ConfigError, match="transport='ipc': KV of several ranks goes through host memory"):
        UpConfig(device="cuda", transport="ipc", prefill_tensor_parallel_size=2)


@pytest.mark.parametrize(("terminal", "words"), [(True, "Ctrl-C or `make down` stops"), (False, "`make down` stops")])
def test_5_8_the_greeting_speaks_of_ctrl_c_only_where_it_arrives(
    terminal: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = startup_message(http_url="http://x", grpc_address="x", model="m", logs="logs", chat=True, terminal=terminal)
    assert words in text
    assert ("Ctrl-C" in text) is terminal
    program = "from diptych.cli.up.command import _has_terminal; print(_has_terminal())"
    detached = subprocess.run(
        [sys.executable, "-c", program],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert detached.stdout == b"False\n"


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
    assert exit_reason(-9) == "killed by SIGKILL, as the kernel does where memory runs out"
    assert exit_reason(-11) == "killed by SIGSEGV"
    assert exit_reason(3) == "exit code 3"


def test_field_help_reads_the_docstring():
    texts = field_help(UpConfig)
    assert texts["model"].startswith("a local Hugging Face folder")
    assert "more on larger machines" in texts["threads_per_worker"]
