"""A worker of several ranks, loaded as a command loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common.sampling import SamplingParams
from diptych.engine.messages import ScheduledSeq
from diptych.worker.model import load_model
from diptych_tests.pd import SECRET_FILE, worker_config
from diptych_tests.quantized import write_windowed

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_23_layers_with_a_window_keep_the_window_over_ranks(tmp_path: Path) -> None:
    """The second one of two pipeline stages has a window only, and it samples."""
    folder = write_windowed(tmp_path / "model", window=16, full_layers=1)
    (folder / "tokenizer.json").write_text("{}")
    settings = {"model": str(folder), "num_blocks": 16, "secret_file": str(SECRET_FILE), "threads": 2}
    tables = ([3, 5, 7], [2, 4, 6])
    seq = ScheduledSeq(
        "a", list(range(40, 80)), 0, tables, True, SamplingParams(9, temperature=0.0), 0, first_blocks=(0, 0)
    )
    one = load_model(worker_config("prefill", "p", **settings))
    assert [group.name for group in one.compat.kv.groups] == ["full", "window-16"]
    want = one.runner.execute([seq])  # type: ignore[attr-defined]
    for degrees in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        two = load_model(worker_config("prefill", "p", **degrees, **settings))
        assert two.executor is not None
        try:
            able = two.executor.capabilities
            assert two.compat.kv == one.compat.kv == able.kv
            assert able.group_blocks == one.runner.capabilities.group_blocks
            names = [[group.name for group in part.groups] for part in two.compat.kv_parts]
            stages = "pipeline_parallel_size" in degrees
            assert names == ([["full"], ["window-16"]] if stages else [["full", "window-16"]] * 2)
            assert two.executor.execute([seq], lambda: False).token_ids == want.token_ids
        finally:
            two.executor.close()
