"""A model on several ranks gives the tokens that it gives on one: ranks as threads, sums over their memory."""

from __future__ import annotations

import random

import pytest

from diptych_tests.rank_threads import ThreadedRanks

LLAMA = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 96, "num_hidden_layers": 4}
SETTINGS = {"num_blocks": 64, "block_size": 8, "backend": "torch", "num_threads": 1}


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.fixture
def ranks():
    made = []

    def make(folder, *degrees, **settings):
        made.append(ThreadedRanks(folder, *degrees, **{**SETTINGS, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("degrees", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_give_the_tokens_of_one(model_dir_of, driver_of, ranks, degrees, kv_heads):
    folder = model_dir_of("LlamaForCausalLM", **LLAMA, num_key_value_heads=kv_heads)
    prompts = prompts_of(1, 9, 20)
    expected = driver_of(folder, backend="torch").generate(prompts, 12, chunk=7)
    driver = driver_of(folder, runner=ranks(folder, *degrees))
    assert driver.generate(prompts, 12, chunk=7) == expected
