"""What a runner vouches for is read off the rows that it laid out, on every backend."""

from __future__ import annotations

import random

import pytest

from diptych.common.text.prompt_digest import prompt_digest
from diptych.engine.messages import BlockCopy, CopyKind

PROMPT = random.Random(5).choices(range(320), k=21)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(params=["native", "torch", "triton"])
def driver(request, tiny, tiny_dir, model_dir_of, driver_of):
    if request.param == "native":
        if tiny.runner.backend != "native":
            pytest.skip("no native backend here")
        return tiny
    if request.param == "torch":
        return driver_of(tiny_dir, backend="torch")
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    return driver_of(model_dir_of("LlamaForCausalLM", **SMALL), backend="triton")


def computed(driver, tokens, start, table, *, vouch=True, beside=()):
    seq = driver.seq(tokens, start, table, sample=False)
    seq.vouch = vouch
    return driver.runner.execute([*beside, seq]).computed_from.get(len(beside))


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_rows_chunks_cached_blocks_and_copies(driver):
    size = driver.runner.block_size
    table, other = driver.table(40), driver.table(40)
    assert computed(driver, PROMPT[:13], 0, table).num_tokens == 13
    neighbours = [driver.seq([3, 4, 5], 0, driver.table(3)), driver.seq([9], 0, driver.table(1))]
    reported = computed(driver, PROMPT[13:], 13, table, beside=neighbours)
    assert (reported.num_tokens, reported.block_size) == (21, size)
    assert reported.digest == prompt_digest(PROMPT, size)
    shared = [table[0], *other[1:]]
    assert computed(driver, PROMPT[size : size + 3], size, shared).digest == prompt_digest(PROMPT[: size + 3], size)
    driver.runner.copy_blocks([BlockCopy(CopyKind.FORK, table[0], other[0])])
    assert computed(driver, [7], size, other).digest == prompt_digest([*PROMPT[:size], 7], size)
    driver.runner.unpack(table[:1], 1, memoryview(bytes(driver.runner.kv_bytes_per_token)))
    assert computed(driver, [7], size, table) is None, "the block before it was written by somebody else"


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_nobody_is_vouched_for_who_did_not_ask(driver):
    assert computed(driver, PROMPT, 0, driver.table(21), vouch=False) is None
    assert driver.runner._provenance is None


def test_a_row_that_the_layout_loses_is_told(driver, monkeypatch):
    """A fault in the runner itself: the model is given another token than the scheduler named."""
    if driver.runner.backend == "triton":
        pytest.skip("one layout is enough")
    lay_out = driver.runner._decoder.lay_out

    def faulty(seqs):
        batch = lay_out(seqs)
        batch.token_ids[4] = 0
        return batch

    monkeypatch.setattr(driver.runner._decoder, "lay_out", faulty)
    prompt = [*PROMPT[:4], 17, *PROMPT[5:]]
    reported = computed(driver, prompt, 0, driver.table(21))
    assert reported.digest == prompt_digest([*PROMPT[:4], 0, *PROMPT[5:]], driver.runner.block_size)
