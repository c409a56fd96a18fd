"""Quantized KV caches: KV is quantized once, where it is computed, and whoever reads it gets the same elements."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.common.kv_format import QUANTIZED_KV
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.attention import PagedAttention
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.messages import BlockCopy, CopyKind
from diptych.kernels.reference import paged_attention_ref

KV_DTYPES = sorted(QUANTIZED_KV)
MODELS = ["llama", "mistral-window", "qwen3-one-kv-head"]
"""With a group of three, with windows, with one KV head."""


@pytest.fixture(params=KV_DTYPES)
def kv_dtype(request):
    return request.param


@pytest.fixture
def quantized(tiny_dir, driver_of, kv_dtype, backend):
    """quantized(**load arguments) -> a driver whose KV is quantized, on either back end of the CPU."""
    return lambda **kwargs: driver_of(tiny_dir, backend=backend, kv_cache_dtype=kv_dtype, **kwargs)


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def chunked(driver, prompt, cuts, table, count):
    """Greedy ids behind a prompt whose chunks end at `cuts`."""
    starts = sorted({0, *(cut for cut in cuts if cut < len(prompt))})
    for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True):
        [row] = driver.runner.execute(
            [driver.seq(prompt[start:end], start, table, sample=end == len(prompt))]
        ).token_ids
    out = list(row)
    for index in range(1, count):
        [row] = driver.runner.execute([driver.seq([out[-1]], len(prompt) + index - 1, table, index=index)]).token_ids
        out += row
    return out


def test_the_bytes_of_a_token_are_at_most_55_percent_of_bfloat16(quantized, kv_dtype):
    """With heads of 32: 36 bytes of 64 are 56%; of 64, as in SmolLM2, 53%."""
    driver = quantized()
    assert driver.runner.kv_bytes_per_token == 3 * 2 * 2 * (32 + 4)
    assert driver.runner.capabilities.kv == driver.runner.pool.kv
    assert driver.runner.kv_dtype == QUANTIZED_KV[kv_dtype]
    model = replace_heads(driver.runner.description)
    half = kv_format_of(model, block_size=16, dtype="bfloat16").bytes_per_token
    assert kv_format_of(model, block_size=16, kv_cache_dtype=kv_dtype).bytes_per_token <= 0.55 * half


def replace_heads(description):
    attention = replace(description.blocks[0].attention, head_dim=64)
    return replace(description, blocks=(replace(description.blocks[0], attention=attention),))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 40), max_size=8), seed=st.integers(0, 5))
def test_chunks_of_any_size_give_the_same_tokens(quantized, cuts, seed):
    """Drill: a chunk that attends to its own KV before it is quantized differs from the next one, which reads it back."""
    driver, prompt = quantized(), prompt_of(41, seed)
    table, again = driver.table(48), driver.table(48)
    assert chunked(driver, prompt, cuts, again, 6) == chunked(driver, prompt, [], table, 6)


@pytest.mark.parametrize("variant_name", MODELS)
def test_a_batch_and_a_preempted_sequence_have_the_tokens_of_a_lone_one(
    model_of, driver_of, kv_dtype, backend, variant_name
):
    driver = driver_of(model_of(variant_name)[0], backend=backend, kv_cache_dtype=kv_dtype)
    prompts = [prompt_of(n, seed=n) for n in (1, 9, 24, 37)]
    alone = [driver.generate([prompt], 7)[0] for prompt in prompts]
    assert driver.generate(prompts, 7, chunk=5) == alone
    # Preempted after three tokens: prompt and answer are computed again as one prompt.
    for prompt, out in zip(prompts, alone, strict=True):
        assert driver.generate([prompt + out[:3]], 4, chunk=11)[0] == out[3:]


def test_decode_goes_on_from_unpacked_kv_as_from_its_own(tiny_dir, quantized):
    """P/D: whatever a former owner left in the blocks."""
    here, there = quantized(), quantized()
    prompt = prompt_of(29)
    [expected] = here.generate([prompt], 6)
    table = here.table(29)
    first = here.prefill(prompt, table, chunk=10)
    size = 29 * here.runner.kv_bytes_per_token
    payload = bytearray(size)
    checksum = here.runner.pack(table, 29, memoryview(payload))
    assert checksum == xxhash.xxh3_64_intdigest(payload)
    there.runner.pool.tensor.fill_(0xFF)  # NaN as code and as scale
    target = there.table(35)
    there.runner.unpack(target, 29, memoryview(payload))
    again = bytearray(size)
    assert there.runner.pack(target, 29, memoryview(again)) == checksum
    assert again == payload
    assert continued(there, prompt, first, target, 6) == expected


def continued(driver, prompt, first, table, count):
    out = [first]
    for index in range(1, count):
        step = driver.seq([out[-1]], len(prompt) + index - 1, table, index=index)
        out += driver.runner.execute([step]).token_ids[0]
    return out


def test_layers_of_a_range_and_ranges_of_a_prompt_move_alone(quantized):
    """A hand-off sends blocks while later ones are computed, and layers of the last range one after the other."""
    here, there = quantized(), quantized()
    prompt = prompt_of(29)
    [expected] = here.generate([prompt], 4)
    table, target = here.table(29), there.table(33)
    first = here.prefill(prompt, table, chunk=16)
    token = here.runner.kv_bytes_per_token
    early = bytearray(16 * token)
    here.runner.pack(table[:2], 16, memoryview(early))
    there.runner.unpack(target[:2], 16, memoryview(early))
    for layers in (range(1), range(1, 3)):
        part = bytearray(13 * token * len(layers) // 3)
        here.runner.pack(table[2:], 13, memoryview(part), layers)
        there.runner.unpack(target[2:4], 13, memoryview(part), layers)
    assert continued(there, prompt, first, target, 4) == expected


def test_blocks_come_back_from_the_host_tier_with_their_scales(quantized):
    driver = quantized(num_host_blocks=8)
    prompt = prompt_of(24)
    [expected] = driver.generate([prompt], 5)
    table, fork = driver.table(24), driver.table(32)
    first = driver.prefill(prompt, table, chunk=24)
    runner = driver.runner
    runner.copy_blocks([BlockCopy(CopyKind.TO_HOST, block, slot) for slot, block in enumerate(table)])
    runner.pool.tensor.fill_(0xFF)
    runner.copy_blocks([BlockCopy(CopyKind.FROM_HOST, slot, block) for slot, block in enumerate(table)])
    runner.copy_blocks([BlockCopy(CopyKind.FORK, a, b) for a, b in zip(table, fork[:3], strict=True)])
    assert continued(driver, prompt, first, fork, 5) == expected


def test_a_bad_row_is_reported_and_neighbours_are_untouched(quantized):
    driver = quantized()
    prompts = [prompt_of(n, seed=n) for n in (10, 11, 12)]
    expected = driver.generate(prompts, 2)
    tables = [driver.table(16) for _ in prompts]
    firsts = [driver.prefill(p, t, chunk=99) for p, t in zip(prompts, tables, strict=True)]
    codec = driver.runner.pool.groups[0].codec
    codec.scales_of(driver.runner.pool.tensor[tables[1][0], 1, 0, 3])[..., 1] = float("nan")
    step = [driver.seq([f], len(p), t, index=1) for p, f, t in zip(prompts, firsts, tables, strict=True)]
    result = driver.runner.execute(step)
    assert result.token_ids == [(expected[0][1],), (), (expected[2][1],)]
    assert list(result.bad_rows) == [1]


def test_bytes_of_a_former_owner_spoil_nobody(quantized):
    driver = quantized()
    prompts = [prompt_of(n, seed=n) for n in (3, 8, 13)]
    expected = driver.generate(prompts, 8, chunk=5)
    driver.runner.pool.tensor.fill_(0xFF)
    assert driver.generate(prompts, 8, chunk=5) == expected


def test_attention_reads_exactly_what_the_pool_holds(driver_of, tiny_dir, kv_dtype, monkeypatch):
    """Whole prompts, chunks behind cached tokens and single tokens: each output is the reference's over the pool's elements."""
    driver = driver_of(tiny_dir, backend="torch", kv_cache_dtype=kv_dtype)
    table, checked = driver.table(30), []
    attend = PagedAttention.attend
    place = {"start": 0}

    def compare(self, q, k, v, batch):
        out = attend(self, q, k, v, batch)
        group = driver.runner.pool.groups[0]
        elements = group.codec.decode(group.tensor.squeeze(4), torch.float32)
        index = len(checked) % 3
        expected = paged_attention_ref(q, elements, index, table, place["start"], scale=self._layer.scale)
        torch.testing.assert_close(out, expected.flatten(1).float(), atol=2e-5, rtol=2e-5)
        checked.append(index)
        return out

    monkeypatch.setattr(PagedAttention, "attend", compare)
    prompt = prompt_of(24)
    for start, end in ((0, 13), (13, 14), (14, 24)):
        place["start"] = start
        driver.runner.execute([driver.seq(prompt[start:end], start, table)])
    assert len(checked) == 9


def test_the_cache_is_close_to_one_that_is_not_quantized(driver_of, tiny_dir, kv_dtype, backend):
    """Log-probabilities of the tokens, against KV in float32."""
    bound = {"int8": 0.1, "fp8_e4m3": 1.5, "fp8_e5m2": 3.0}[kv_dtype]  # random weights exaggerate
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
    prompt, found = prompt_of(60), []
    for name in ("auto", kv_dtype):
        driver = driver_of(tiny_dir, backend=backend, kv_cache_dtype=name)
        result = driver.runner.execute([driver.seq(prompt, 0, driver.table(60), sampling=sampling)])
        found.append(dict(result.logprobs[0][0].top))
    shared = found[0].keys() & found[1].keys()
    assert shared
    difference = max(abs(found[0][token] - found[1][token]) for token in shared)
    assert 0 < difference < bound


@pytest.mark.parametrize("backend_name", ["torch", "native"])
def test_an_unknown_cache_dtype_is_refused_by_name(tiny_dir, driver_of, backend_name):
    with pytest.raises(ConfigError) as error:
        driver_of(tiny_dir, backend=backend_name, kv_cache_dtype="int4")
    assert error.value.field == "kv_cache_dtype"
    assert "int8" in str(error.value)


def test_codes_that_end_within_a_scale_are_refused(tiny_model_dir, tmp_path, driver_of):
    folder = tiny_model_dir(tmp_path / "odd", "LlamaForCausalLM", head_dim=6, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="must end at a multiple of 4 bytes"):
        driver_of(folder, backend="torch", kv_cache_dtype="int8")
