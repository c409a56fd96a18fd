from __future__ import annotations

import json
import random

import pytest
import torch
import xxhash

from diptych.common.errors import ConfigError, InternalError
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.attention import split_runs
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.runner import ModelRunner, StepAborted


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def test_is_a_model_runner(tiny):
    runner: ModelRunner = tiny.runner
    assert (runner.num_blocks, runner.block_size, runner.vocab_size, runner.max_model_len) == (64, 8, 320, 256)
    assert runner.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4
    assert runner.eos_token_ids == (2,)
    assert runner.execute([]).token_ids == []


def test_no_token_where_none_was_asked_for(tiny):
    result = tiny.runner.execute([tiny.seq(prompt_of(9), 0, tiny.table(9), sample=False)])
    assert result.token_ids == [()]


def test_seeded_tokens_do_not_depend_on_the_batch(tiny):
    sampling = SamplingParams(max_tokens=9, seed=77, temperature=0.9, top_p=0.95, top_k=50)
    prompts = [prompt_of(n, seed=n) for n in (12, 3, 25)]
    together = tiny.generate(prompts, 8, sampling=sampling)
    assert together == [tiny.generate([p], 8, sampling=sampling, chunk=5)[0] for p in prompts]


def test_abort_between_layers(tiny):
    calls = []
    step = [tiny.seq(prompt_of(5), 0, tiny.table(5))]
    with pytest.raises(StepAborted):
        tiny.runner.execute(step, lambda: len(calls) == 2 or bool(calls.append(1)))
    assert len(calls) == 2
    assert tiny.runner.execute(step, lambda: False).token_ids[0]


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 24, 29])
def test_pack_and_unpack_move_the_kv(tiny, num_tokens):
    table, other = tiny.table(29), tiny.table(29)
    tiny.prefill(prompt_of(29), table, chunk=29)
    runner = tiny.runner
    size = num_tokens * runner.kv_bytes_per_token
    payload = bytearray(b"\xaa" * (size + 5))
    checksum = runner.pack(table, num_tokens, memoryview(payload))
    assert bytes(payload[size:]) == b"\xaa" * 5
    assert checksum == xxhash.xxh3_64_intdigest(bytes(payload[:size]))
    before = runner.pool.tensor[other].clone().fill_(3.0)
    runner.pool.tensor[other] = before
    runner.unpack(other, num_tokens, memoryview(bytes(payload[:size])))
    for i, (source, target) in enumerate(zip(table, other, strict=True)):
        used = min(8, max(0, num_tokens - 8 * i))
        assert torch.equal(runner.pool.tensor[target][:, :, :used], runner.pool.tensor[source][:, :, :used])
        assert (runner.pool.tensor[target][:, :, used:] == 3.0).all()


def test_decode_goes_on_from_unpacked_kv(tiny, tiny_dir, driver_of):
    prompt = prompt_of(29)
    [expected] = tiny.generate([prompt], 5)
    table = tiny.table(29)
    first = tiny.prefill(prompt, table, chunk=10)
    payload = bytearray(29 * tiny.runner.kv_bytes_per_token)
    tiny.runner.pack(table, 29, memoryview(payload))
    peer = driver_of(tiny_dir)
    peer.runner.pool.tensor.fill_(float("nan"))  # whatever a former owner left
    there = peer.table(34)
    peer.runner.unpack(there, 29, memoryview(payload))
    out = [first]
    for index in range(1, 5):
        out += peer.runner.execute([peer.seq([out[-1]], 28 + index, there, index=index)]).token_ids[0]
    assert out == expected


@pytest.mark.parametrize(
    ("blocks", "num_tokens", "size"), [([1], 9, 10**6), ([1, 2], 9, 10), ([1, 64], 9, 10**6), ([1], 0, 10**6)]
)
def test_pack_refuses_what_does_not_fit(tiny, blocks, num_tokens, size):
    with pytest.raises(InternalError):
        tiny.runner.pack(blocks, num_tokens, memoryview(bytearray(size)))
    with pytest.raises(InternalError):
        tiny.runner.unpack(blocks, num_tokens, memoryview(bytearray(size)))


def test_a_bad_row_is_reported_and_neighbours_are_untouched(tiny):
    prompts = [prompt_of(n, seed=n) for n in (10, 11, 12)]
    expected = tiny.generate(prompts, 2)
    tables = [tiny.table(16) for _ in prompts]
    firsts = [tiny.prefill(p, t, chunk=99) for p, t in zip(prompts, tables, strict=True)]
    tiny.runner.pool.tensor[tables[1][0], 1, 0, 3] = float("nan")
    step = [tiny.seq([f], len(p), t, index=1) for p, f, t in zip(prompts, firsts, tables, strict=True)]
    result = tiny.runner.execute(step)
    assert result.token_ids == [(expected[0][1],), (), (expected[2][1],)]
    assert list(result.bad_rows) == [1]


def test_nan_of_a_former_owner_spoils_nobody(tiny):
    prompts = [prompt_of(n, seed=n) for n in (3, 8, 13)]
    expected = tiny.generate(prompts, 8, chunk=5)
    tiny.runner.pool.tensor.fill_(float("nan"))
    assert tiny.generate(prompts, 8, chunk=5) == expected


def test_broken_promises_of_the_scheduler_are_our_bugs(tiny):
    table = tiny.table(8)
    for step in (
        tiny.seq([1] * 9, 0, table),
        tiny.seq([], 0, table),
        tiny.seq([1], 0, [64]),
        tiny.seq([1], 256, list(range(40))),
    ):
        with pytest.raises(InternalError):
            tiny.runner.execute([step])


def test_groups_cover_all_sequences_and_stay_small():
    lens = [1000, 900, 500, 500, 400, 300, 10, 10, 10, 9, 1]
    runs = split_runs(lens, 4000)
    assert runs == [(0, 4), (4, 11)]
    assert split_runs([5000] * 6, 4000) == [(0, 4), (4, 6)]
    assert split_runs([], 4000) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny_dir, driver_of, dtype):
    driver = driver_of(tiny_dir, dtype=dtype)
    assert driver.runner.kv_dtype == dtype
    assert driver.runner.kv_bytes_per_token == 3 * 2 * 2 * 32 * 2
    [out] = driver.generate([prompt_of(20)], 4, chunk=7)
    assert all(0 <= t < 320 for t in out)
    payload = bytearray(20 * driver.runner.kv_bytes_per_token)
    driver.runner.pack([0, 1, 2], 20, memoryview(payload))
    driver.runner.unpack([3, 4, 5], 20, memoryview(payload))


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("device", {"device": "tpu"}),
        ("dtype", {"dtype": "int8"}),
        ("num_blocks", {"num_blocks": 0}),
        ("max_model_len", {"max_model_len": 257}),
    ],
)
def test_settings_are_checked(tiny_dir, driver_of, field, kwargs):
    with pytest.raises(ConfigError) as error:
        driver_of(tiny_dir, **kwargs)
    assert error.value.field == field


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        TorchModelRunner.load(tmp_path, num_blocks=1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        TorchModelRunner.load(tmp_path, num_blocks=1)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="JSON object"):
        TorchModelRunner.load(tmp_path, num_blocks=1)


@pytest.mark.parametrize("num_tokens", [7, 8, 29])
def test_layers_are_packed_alone_and_unpacked_alone(tiny, num_tokens):
    table, other = tiny.table(29), tiny.table(29)
    tiny.prefill(prompt_of(29), table, chunk=29)
    runner = tiny.runner
    runner.pool.tensor[other] = 3.0
    for layers in (range(2, 3), range(2)):
        payload = bytearray(num_tokens * runner.kv_bytes_per_token * len(layers) // runner.num_layers)
        assert runner.pack(table, num_tokens, memoryview(payload), layers) == xxhash.xxh3_64_intdigest(bytes(payload))
        runner.unpack(other, num_tokens, memoryview(bytes(payload)), layers)
        done = range(2, 3) if layers.start else range(3)
        for i, (source, target) in enumerate(zip(table, other, strict=True)):
            used = min(8, max(0, num_tokens - 8 * i))
            for layer in range(3):
                got = runner.pool.tensor[target][layer, :, :used]
                assert (
                    torch.equal(got, runner.pool.tensor[source][layer, :, :used]) if layer in done else (got == 3).all()
                )


@pytest.mark.parametrize("sample", [True, False])
def test_what_a_step_says_of_its_layers_is_true(tiny, sample):
    """Their KV is final when it is said: packed then or after the step, it is the same."""
    table, runner = tiny.table(13), tiny.runner
    prompt, reported = prompt_of(13), []

    def on_layers(num_layers):
        payload = bytearray(13 * runner.kv_bytes_per_token * num_layers // runner.num_layers)
        reported.append((num_layers, runner.pack(table, 13, memoryview(payload), range(num_layers)), payload))

    runner.on_layers = on_layers
    try:
        runner.execute([tiny.seq(prompt, 0, table, sample=sample)])
    finally:
        runner.on_layers = lambda num_layers: None
    assert runner.capabilities.reports_layers
    assert [num_layers for num_layers, *_ in reported] == [1, 2]
    for num_layers, checksum, payload in reported:
        again = bytearray(len(payload))
        assert runner.pack(table, 13, memoryview(again), range(num_layers)) == checksum
        assert again == payload
