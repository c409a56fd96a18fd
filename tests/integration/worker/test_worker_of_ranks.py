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


def test_23_layers_with_a_window_keep_the_window_over_ranks(tmp_path: Path) -> None:
    """Over pipeline stages they keep every token."""
    folder = write_llama(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    settings = {"model": str(folder), "num_blocks": 16, "secret_file": str(SECRET_FILE), "threads": 2}
    seq = ScheduledSeq("a", list(range(40, 80)), 0, ([3, 5, 7],), True, SamplingParams(9, temperature=0.0), 0)
    one = load_model(worker_config("prefill", "p", **settings))
    assert not one.compat.kv.has_one_full_group
    want = one.runner.execute([seq])  # type: ignore[attr-defined]
    for degrees in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        two = load_model(worker_config("prefill", "p", **degrees, **settings))
        assert two.executor is not None
        try:
            stages = "pipeline_parallel_size" in degrees
            assert two.compat.kv.has_one_full_group is stages
            if not stages:
                assert two.compat.kv == one.compat.kv == two.executor.capabilities.kv
            assert two.executor.execute([seq], lambda: False).token_ids == want.token_ids
        finally:
            two.executor.close()
