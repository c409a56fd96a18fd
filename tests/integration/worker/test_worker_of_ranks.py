"""A worker of several ranks, loaded as a command loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.common.sampling import SamplingParams
from diptych.engine.messages import ScheduledSeq
from diptych.worker.model import load_model
from diptych_tests.pd import SECRET_FILE, worker_config
from diptych_tests.quantized import write_llama

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_23_layers_with_a_window_keep_every_token_over_ranks(tmp_path: Path) -> None:
    """Ranks have one KV group. With window groups, as one process has them, their runner would want a table for each."""
    folder = write_llama(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    settings = {"model": str(folder), "num_blocks": 16, "secret_file": str(SECRET_FILE), "threads": 2}
    [one, two] = [load_model(worker_config("prefill", "p", tensor_parallel_size=n, **settings)) for n in (1, 2)]
    assert two.executor is not None
    try:
        assert not one.compat.kv.has_one_full_group
        assert two.compat.kv.has_one_full_group
        seq = ScheduledSeq("a", list(range(40, 80)), 0, ([3, 5, 7],), True, SamplingParams(9, temperature=0.0), 0)
        want = one.runner.execute([seq])  # type: ignore[attr-defined]
        assert two.executor.execute([seq], lambda: False).token_ids == want.token_ids
    finally:
        two.executor.close()
