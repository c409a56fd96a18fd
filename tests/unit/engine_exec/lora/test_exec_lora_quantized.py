"""Adapters over quantized layers: what they add does not depend on how the weights below are kept."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from diptych.common.adapters.peft import read_adapter
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes, merge_adapter, write_adapter
from diptych_tests.quantized import AWQ, COMPRESSED_FP8, COMPRESSED_INT8

CHECKPOINTS = {
    "int4": (AWQ, partial(quantized.awq, size=32), 1e-4),
    "int8": (COMPRESSED_INT8, quantized.int8_rows, 0.12),  # activations are rounded as well
    "fp8": (COMPRESSED_FP8, quantized.fp8_rows, 0.4),
}
PROMPTS = [[5, 9, 17, 250, 31, 8, 77, 120, 3], [44, 12, 90]]


def logprobs_of(driver, slot):
    """Of the likeliest tokens behind each prompt, by their ids: one step."""
    steps = []
    for prompt in PROMPTS:
        seq = driver.seq(prompt, 0, driver.table(len(prompt) + 1))
        seq.adapter, seq.top_logprobs = slot, 5
        steps.append(seq)
    result = driver.runner.execute(steps)
    return np.array([[logprob for _, logprob in result.logprobs[i][0].top] for i in range(len(PROMPTS))])


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_an_adapter_adds_to_quantized_layers_what_it_adds_to_plain_ones(method, driver_of, tmp_path):
    config, quantize, tolerance = CHECKPOINTS[method]
    folder = quantized.write_llama(tmp_path / "model")
    plain = tmp_path / "plain"
    plain.mkdir()
    quantized.plain_folder(plain, folder, quantized.quantize_folder(folder, config, quantize))
    adapter = write_adapter(tmp_path / "adapter", linear_shapes(plain), rank=3, seed=5, size=0.25)
    driver = driver_of(folder, backend="torch", max_loras=2, max_lora_rank=4)
    assert driver.runner.description.method == method
    driver.runner.install_adapter(1, driver.runner.read_adapter(adapter, read_adapter(adapter)))
    merged = logprobs_of(driver_of(merge_adapter(plain, adapter, tmp_path / "merged"), backend="torch"), -1)
    adapted, bare = logprobs_of(driver, 1), logprobs_of(driver, -1)
    assert np.abs(adapted - merged).max() < tolerance
    assert np.abs(adapted - merged).max() < np.abs(bare - merged).max() / 2
    np.testing.assert_array_equal(bare, logprobs_of(driver, 0), "an empty slot adds nothing")
