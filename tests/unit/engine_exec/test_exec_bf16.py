"""bfloat16 on the compiled CPU back end: the same bits in any company, close to float32 and to torch, and handed over exactly."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.backends.native import NativeBackend
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.native import library as native_library
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import build

TILES = "AMX tiles"
CLOSE = 0.06
"""Of the largest logit: what rounding weights and rows to bfloat16 may change on these models. Torch's own is 0.05 to 0.1 away
from float32: it rounds every result."""


RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}  # fmt: skip


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


@pytest.fixture(params=[*ALL_LANES, TILES])
def native_of(request, compiler, set_lanes, driver_of, monkeypatch):
    """native_of(folder, **load arguments) -> Driver of the kernels in bfloat16: by vectors of each width, and by tiles."""
    tiles = request.param == TILES
    monkeypatch.setattr(native_library, "_choose_tiles", lambda library: None)
    if not tiles:
        set_lanes(request.param)
    library = Library(build(cache_dir() / "native", compiler, None if tiles else request.param))
    if library.use_tiles(tiles) != tiles:
        pytest.skip("this machine has no AMX tiles")

    def make(folder, **kwargs):
        driver = driver_of(folder, backend="native", dtype="bfloat16", **kwargs)
        assert driver.runner.backend == "native"
        return driver

    yield make
    library.use_tiles(False)


def watch(driver):
    """Logits of every step that wanted some."""
    logits, forward = [], driver.runner._decoder.forward

    def record(*args):
        out = forward(*args)
        if out is not None:
            logits.append(out)
        return out

    driver.runner._decoder.forward = record
    return logits


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-one-kv-head"])
def test_logits_and_kv_are_the_same_bits_in_any_company(native_of, model_of, name):
    driver, prompt = native_of(model_of(name)[0]), prompt_of(41)
    seen, kv = watch(driver), []
    for chunk in (1, 3, 8, 41):
        table = driver.table(41)
        driver.prefill(prompt, table, chunk=chunk)
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :41].clone())
        driver.free += table
    assert all(torch.equal(other, kv[0]) for other in kv[1:])
    assert all(torch.equal(other, seen[0]) for other in seen[1:])
    prompts = [prompt_of(n, seed=n) for n in (3, 30, 17, 8)]
    alone = [driver.generate([one], 8)[0] for one in prompts]
    assert driver.generate(prompts, 8, chunk=7) == alone


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "mistral-gelu-tanh"])
def test_logits_are_close_to_float32(native_of, model_of, driver_of, name):
    folder, _ = model_of(name)
    prompt, logits = prompt_of(40), []
    for driver in (native_of(folder), driver_of(folder, backend="torch")):
        seen = watch(driver)
        driver.prefill(prompt, driver.table(40), chunk=11)
        logits.append(seen[-1][0].float())
    ours, exact = logits
    assert (ours - exact).abs().max() < CLOSE * exact.abs().max()
    assert (ours - exact).abs().max() > 1e-5 * exact.abs().max()  # else it would be float32


@pytest.mark.parametrize("cut", [1, 16, 29])
def test_handed_over_kv_gives_the_tokens_of_a_lone_worker(native_of, tiny_dir, cut):
    """Prefill computes, packs and sends; decode unpacks, and computes what is missing."""
    prompt, sender, peer = prompt_of(29), native_of(tiny_dir), native_of(tiny_dir)
    [expected] = sender.generate([prompt], 6)
    table, there = sender.table(29), peer.table(35)
    sender.prefill(prompt, table, chunk=10)
    payload = bytearray(cut * sender.runner.kv_bytes_per_token)
    sender.runner.pack(table, cut, memoryview(payload))
    peer.runner.unpack(there, cut, memoryview(payload))
    rest = prompt[cut:] or prompt[-1:]
    out = list(peer.runner.execute([peer.seq(rest, len(prompt) - len(rest), there)]).token_ids[0])
    for index in range(1, 6):
        out += peer.runner.execute([peer.seq([out[-1]], 28 + index, there, index=index)]).token_ids[0]
    assert out == expected


def test_weights_and_kv_take_half_the_memory(native_of, driver_of, tiny_dir):
    half, whole = native_of(tiny_dir).runner, driver_of(tiny_dir, backend="native").runner
    assert half.weight_sizes.layers * 2 == whole.weight_sizes.layers
    assert half.weight_sizes.embedding * 2 == whole.weight_sizes.embedding
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_a_quantized_cache_beside_bfloat16_weights(native_of, tiny_dir, kv_cache_dtype):
    """Drill: codes were laid out by the dtype of the weights."""
    driver = native_of(tiny_dir, kv_cache_dtype=kv_cache_dtype)
    prompts = [prompt_of(n, seed=n) for n in (1, 9, 24)]
    alone = [driver.generate([prompt], 6)[0] for prompt in prompts]
    assert driver.generate(prompts, 6, chunk=5) == alone


def test_without_a_compiler_torch_serves_and_says_so(tiny_dir, driver_of, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        driver = driver_of(tiny_dir, dtype="bfloat16")
    assert driver.runner.backend == "torch"
    assert "CC=no-such-compiler is not installed" in caplog.text
    assert len(driver.generate([prompt_of(29)], 4)[0]) == 4
    with pytest.raises(ConfigError, match="no-such-compiler"):
        driver_of(tiny_dir, dtype="bfloat16", backend="native")


def test_without_tiles_vectors_compute_the_same_bits(compiler, tiny_dir, driver_of, monkeypatch, caplog):
    """What a machine without AMX does, and one whose kernel does not grant it."""
    logits, plain = [], Library.use_tiles

    def no_tiles(self, wanted):
        return plain(self, False)

    for granted in (True, False):
        native_library._choose_tiles.cache_clear()
        if not granted:
            monkeypatch.setattr(Library, "use_tiles", no_tiles)
        with caplog.at_level(logging.INFO):
            driver = driver_of(tiny_dir, backend="native", dtype="bfloat16")
        seen = watch(driver)
        driver.prefill(prompt_of(40), driver.table(40), chunk=11)
        logits.append(seen[-1])
    native_library._choose_tiles.cache_clear()
    assert "this machine has no AMX tiles" in caplog.text
    assert torch.equal(*logits)


def test_the_choice_between_tiles_and_vectors_is_logged_with_its_times(compiler, caplog):
    native_library._choose_tiles.cache_clear()
    with caplog.at_level(logging.INFO):
        native_library.load_library(torch.bfloat16)
    [line] = [line for line in caplog.messages if line.startswith("bfloat16 by ")]
    assert "us, vectors" in line or "has no AMX tiles" in line


def test_a_method_that_it_has_in_float32_only_is_refused_by_name(compiler):
    description = describe(RAW)
    block = description.blocks[0]
    attention = replace(block.attention, qkv=replace(block.attention.qkv, method="int8"))
    backend = NativeBackend(native_library.load_library(torch.bfloat16), description, torch.bfloat16)
    kv = kv_format_of(description, block_size=16, dtype="bfloat16")
    assert backend.refusal(block, kv) is None
    assert backend.refusal(replace(block, attention=attention), kv) == "it has no linear method int8 in bfloat16"
