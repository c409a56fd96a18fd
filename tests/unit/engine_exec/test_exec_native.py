"""The compiled CPU kernels: bit for bit the same in any company, and loud where they cannot be had."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.native import library as native_library
from diptych.kernels.native.api import HugePages, Library
from diptych.kernels.native.build import NativeError, build, find_compiler, library_path


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


@pytest.fixture(scope="module")
def library():
    return Library(build(cache_dir() / "native"))


@pytest.fixture
def seen(tiny):
    """Logits of every step that wanted some."""
    assert tiny.runner.backend == "native"
    logits, forward = [], tiny.runner._decoder.forward

    def record(*args):
        out = forward(*args)
        if out is not None:
            logits.append(out)
        return out

    tiny.runner._decoder.forward = record
    return logits


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (75, 33), (1, 8), (50, 600)])
def test_a_row_of_a_product_depends_on_nothing_else(library, outputs, inputs):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(160, inputs)
    packed = library.pack(weight, HugePages())
    alone = torch.cat([library.linear(x[i : i + 1], packed, bias, outputs, 1) for i in range(len(x))])
    torch.testing.assert_close(alone, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    for rows in (2, 3, 4, 5, 6, 7, 13, 160):
        for threads in (1, 3):
            assert torch.equal(library.linear(x[:rows].contiguous(), packed, bias, outputs, threads), alone[:rows])


def test_logits_and_kv_are_the_same_bits_at_every_chunk_size(tiny, seen):
    prompt, kv = prompt_of(41), []
    for chunk in (1, 2, 3, 5, 8, 16, 41):
        table = tiny.table(41)
        tiny.prefill(prompt, table, chunk=chunk)
        kv.append(tiny.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :41].clone())
        tiny.free += table
    for some, other in zip(kv[1:], seen[1:], strict=True):
        assert torch.equal(some, kv[0])
        assert torch.equal(other, seen[0])


def test_logits_are_the_same_bits_alone_and_in_a_batch(tiny, seen):
    prompts = [prompt_of(n, seed=n) for n in (3, 30, 17, 8)]
    tables = [tiny.table(len(p) + 1) for p in prompts]
    for p, t in zip(prompts, tables, strict=True):
        tiny.prefill(p, t, chunk=99)
    steps = [tiny.seq([7], len(p), t, index=1) for p, t in zip(prompts, tables, strict=True)]
    tiny.runner.execute(steps)
    together = seen[-1]
    for row, step in enumerate(steps):
        tiny.runner.execute([step])
        assert torch.equal(seen[-1][0], together[row])


def test_windows_are_the_same_bits_at_every_chunk_size(driver_of, model_dir_of):
    folder = model_dir_of("MistralForCausalLM", sliding_window=11, head_dim=32)
    driver = driver_of(folder)
    assert driver.runner.backend == "native"
    kv = []
    for chunk in (1, 3, 7, 45):
        table = driver.table(45)
        driver.prefill(prompt_of(45), table, chunk=chunk)
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :45])
    assert all(torch.equal(other, kv[0]) for other in kv[1:])


@pytest.mark.parametrize(
    ("architecture", "length", "settings"),
    [
        ("LlamaForCausalLM", 1500, {"head_dim": 32, "max_position_embeddings": 2048}),
        ("Qwen3ForCausalLM", 205, {"head_dim": 64, "num_key_value_heads": 1}),
        ("MistralForCausalLM", 205, {"head_dim": 32, "num_key_value_heads": 6, "sliding_window": 50}),
    ],
)
def test_a_long_chunk_is_the_same_bits_as_its_tokens_one_by_one(
    driver_of, model_dir_of, architecture, length, settings
):
    """Several tiles of queries, several packs of keys, and rows that are alone."""
    driver = driver_of(model_dir_of(architecture, **settings), num_blocks=200)
    assert driver.runner.backend == "native"
    prompt, kv = prompt_of(length), []
    for chunks in ((length,), (64,) * (length // 64) + (length % 64,), (length - 30, *[1] * 30)):
        table, start = driver.table(length), 0
        for chunk in chunks:
            driver.runner.execute([driver.seq(prompt[start : start + chunk], start, table)])
            start += chunk
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :length].clone())
        driver.free += table
    assert all(torch.equal(other, kv[0]) for other in kv[1:])


def test_threads_change_no_bit(tiny, seen):
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            tiny.prefill(prompt_of(60), tiny.table(60), chunk=60)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(seen[0], seen[1])


def test_plain_torch_draws_the_same_ids(tiny, tiny_dir, driver_of):
    driver = driver_of(tiny_dir, backend="torch")
    assert driver.runner.backend == "torch"
    prompts = [prompt_of(n, seed=n) for n in (1, 9, 40)]
    assert driver.generate(prompts, 10, chunk=11) == tiny.generate(prompts, 10)


def test_without_a_compiler_torch_serves_and_says_so(tiny_dir, monkeypatch, caplog):
    def no_compiler():
        raise NativeError("no C compiler")

    monkeypatch.setattr(native_library, "_load", no_compiler)
    with caplog.at_level(logging.WARNING):
        assert TorchModelRunner.load(tiny_dir, num_blocks=4).backend == "torch"
    assert "no C compiler" in caplog.text
    with pytest.raises(ConfigError, match="backend"):
        TorchModelRunner.load(tiny_dir, num_blocks=4, backend="native")


def test_other_dtypes_are_for_torch(tiny_dir):
    assert TorchModelRunner.load(tiny_dir, num_blocks=4, dtype="bfloat16").backend == "torch"


def test_the_library_is_compiled_once(tmp_path):
    first = build(tmp_path)
    before = first.stat().st_mtime_ns
    assert build(tmp_path) == first
    assert first.stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {first.name, "lock"}


def test_a_compiler_that_is_missing_or_fails_is_named(tmp_path):
    with pytest.raises(NativeError, match="CC=no-such-compiler"):
        find_compiler({"CC": "no-such-compiler"})
    with pytest.raises(NativeError, match="failed with status"):
        build(tmp_path, "false")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    broken = library_path(tmp_path, "false")
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeError, match="cannot load"):
        Library(broken)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_beside_its_packed_head_is_counted(model_dir_of, driver_of, tied):
    folder = model_dir_of("LlamaForCausalLM", tie_word_embeddings=tied)
    packed, plain = (driver_of(folder, backend=name).runner for name in ("native", "torch"))
    config = packed.config
    one = 4 * config.vocab_size * config.hidden_size
    assert (packed.weight_sizes.head, packed.weight_sizes.embedding) == (one, one)
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    assert packed.weight_sizes.layers == 4 * config.num_layers * layer
    assert plain.weight_sizes.layers >= packed.weight_sizes.layers  # wide ones are there twice
    assert plain.weight_sizes.head >= one
