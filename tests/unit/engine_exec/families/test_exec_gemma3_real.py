"""Gemma 3 270M out of its GGUF file: tensors are those of transformers' own loader of such files, greedy ids its model's.
Through a cluster: tests/e2e/test_gemma3_pd.py."""

from __future__ import annotations

import pytest
import torch

from diptych.bench.engine import gemma3
from diptych.cli.models.store import resolve_model
from diptych.common.errors import ConfigError
from diptych.common.kv_groups import PoolDemand
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych_tests import gemma3_real
from diptych_tests.kv_groups import GroupDriver

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf_file():
    try:
        return gemma3.gguf_file(cache_dir())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(gguf_file):
    return resolve_model(str(gguf_file))


@pytest.fixture(scope="module")
def prompts(folder):
    return gemma3_real.tokenized(folder)


@pytest.fixture(scope="module")
def model(folder):
    return gemma3_real.load(folder)


def test_tensors_are_those_of_transformers_own_loader(gguf_file, model):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(model.named_parameters())
    assert theirs.keys() - {"lm_head.weight"} == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(torch.as_tensor(theirs[name]), tensor), name


@pytest.fixture(scope="module")
def expected(model, prompts):
    return gemma3_real.answers(model, prompts)


def test_the_committed_answers_are_transformers(prompts, expected):
    assert gemma3_real.golden() == list(zip(prompts, expected, strict=True))


def test_colocated_and_across_a_hand_off(driver_of, folder, prompts, expected):
    """Prompts in chunks, decoded together; then each prompt's KV is packed, unpacked into other blocks and decoded there."""
    driver = driver_of(folder, num_blocks=1100, block_size=16)
    runner, count = driver.runner, gemma3_real.TOKENS
    assert driver.generate(prompts, count, chunk=256) == expected
    driver.free = list(range(runner.num_blocks))
    outputs, tables = [], []
    for prompt in prompts:
        table = driver.table(len(prompt))
        outputs.append([driver.prefill(prompt, table, chunk=256)])
        payload = bytearray(len(prompt) * runner.kv_bytes_per_token)
        runner.pack(table, len(prompt), memoryview(payload))
        driver.free += table
        tables.append(driver.table(len(prompt) + count))
        runner.pool.tensor[tables[-1]] = 7.0
        runner.unpack(tables[-1], len(prompt), memoryview(payload))
    for index in range(1, count):
        steps = [
            driver.seq([out[-1]], len(prompt) + index - 1, table, index=index)
            for prompt, out, table in zip(prompts, outputs, tables, strict=True)
        ]
        for out, row in zip(outputs, runner.execute(steps).token_ids, strict=True):
            out.extend(row)
    assert outputs == expected


def test_17_in_window_groups_whose_blocks_are_freed(folder, prompts, expected):
    """The same, with the window's blocks freed behind it and filled with NaN, on both sides of the hand-off."""
    runner = TorchModelRunner.load(folder, num_blocks=400, block_size=16, demand=PoolDemand(8, 256), max_model_len=2048)
    assert [group.window for group in runner.pool.kv.groups] == [0, 512]
    driver = GroupDriver(runner)
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), 7):
        arrived = []
        for number, prompt in enumerate(prompts[first : first + 7], first):
            seq = driver.begin(f"p{number}", prompt)
            driver.prefill(seq, 256)
            parts = driver.packed(seq)
            driver.end(seq)
            arrived.append(driver.unpacked(f"d{number}", seq.tokens, len(prompt), parts))
        driver.decode(arrived, gemma3_real.TOKENS)
        outputs += [seq.outputs for seq in arrived]
        for seq in arrived:
            driver.end(seq)
    assert outputs == expected
    assert driver.reused > 100
