"""KV that some ranks computed, handed over to others: each pair of degrees, with the real KV of a model. The ids are those of one
rank that computed all."""

from __future__ import annotations

import random

import pytest

from diptych.kvtransfer.slabs.convert import FedRange, RangeConverter
from diptych_tests.rank_threads import ThreadedRanks

LLAMA = {
    "hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 96, "num_hidden_layers": 4,
}  # fmt: skip
SIDES = [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)]
"""tensor_parallel, pipeline."""
COUNT = 7


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(21, 48)


def packed(driver, table, num_tokens):
    """Of each rank: the KV of these tokens."""
    out = []
    for runner in driver.runner.runners:
        payload = memoryview(bytearray(num_tokens * runner.capabilities.kv_bytes_per_token))
        runner.pack(table[: -(-num_tokens // driver.runner.block_size)], num_tokens, payload)
        out.append(payload)
    return out


def received(driver, source, payloads, num_tokens):
    """A table with this KV in every rank's pool."""
    table, target = driver.table(num_tokens + COUNT), [runner.pool.kv for runner in driver.runner.runners]
    converter, size = RangeConverter(source, target, 0, num_tokens), driver.runner.block_size
    for part in sorted(converter.ranks):
        for one in converter.feed(FedRange(0, num_tokens, payloads[part], part)):
            blocks = table[one.first_token // size : -(-(one.first_token + one.num_tokens) // size)]
            layers = range(one.first_layer, one.first_layer + one.num_layers)
            driver.runner.runners[one.part].unpack(blocks, one.num_tokens, one.payload, layers)
    assert converter.num_open == 0
    return table


def decoded(driver, tables, firsts):
    """All in one batch, behind the prompts and their first tokens."""
    outputs = [[first] for first in firsts]
    for index in range(1, COUNT):
        batch = [
            driver.seq([out[-1]], len(prompt) + index - 1, table, index=index)
            for prompt, table, out in zip(PROMPTS, tables, outputs, strict=True)
        ]
        for out, row in zip(outputs, driver.runner.execute(batch).token_ids, strict=True):
            out.extend(row)
    return outputs


@pytest.mark.parametrize(("kv_heads", "kv_cache_dtype"), [(4, "auto"), (2, "auto"), (2, "int8")])
def test_what_some_ranks_computed_others_go_on_with(model_dir_of, driver_of, kv_heads, kv_cache_dtype):
    folder = model_dir_of("LlamaForCausalLM", **LLAMA, num_key_value_heads=kv_heads)
    settings = {"block_size": 8, "backend": "torch", "kv_cache_dtype": kv_cache_dtype}
    expected = driver_of(folder, **settings).generate(PROMPTS, COUNT, chunk=16)
    drivers = {
        side: driver_of(folder, runner=ThreadedRanks(folder, *side, num_blocks=96, num_threads=1, **settings))
        for side in SIDES
    }
    for source in drivers.values():
        tables = [source.table(len(prompt)) for prompt in PROMPTS]
        firsts = [source.prefill(prompt, table, chunk=16) for prompt, table in zip(PROMPTS, tables, strict=True)]
        payloads = [packed(source, table, len(prompt)) for prompt, table in zip(PROMPTS, tables, strict=True)]
        parts = [runner.pool.kv for runner in source.runner.runners]
        for target in drivers.values():
            there = [
                received(target, parts, payload, len(prompt)) for prompt, payload in zip(PROMPTS, payloads, strict=True)
            ]
            assert decoded(target, there, firsts) == expected
            target.free += [block for table in there for block in table]
        source.free += [block for table in tables for block in table]
    for driver in drivers.values():
        driver.runner.close()
