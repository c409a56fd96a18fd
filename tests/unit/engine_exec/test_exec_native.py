"""The compiled CPU kernels, at every width of vectors: bit for bit the same in any company, and loud where they cannot be had."""

from __future__ import annotations

import ctypes
import logging
import random
from dataclasses import replace

import pytest
import torch

from diptych.common.compiled import ALL_LANES, LANES_VARIABLE, register_lanes, wanted_lanes
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.kernels.native.api import HugePages, Library, WeightFormat, Weights
from diptych.kernels.native.build import SOURCES, NativeError, build, find_compiler, library_path


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


@pytest.fixture(params=ALL_LANES)
def lanes(request, set_lanes):
    set_lanes(request.param)
    return request.param


@pytest.fixture
def library(lanes):
    return Library(build(cache_dir() / "native", lanes=lanes))


@pytest.fixture
def native_of(lanes, driver_of):
    """native_of(folder, **load arguments) -> Driver of the kernels at this width."""

    def make(folder, **kwargs):
        driver = driver_of(folder, backend="native", **kwargs)
        assert driver.runner.backend == "native"
        return driver

    return make


@pytest.fixture
def native_tiny(native_of, tiny_dir):
    return native_of(tiny_dir)


@pytest.fixture
def seen(native_tiny):
    """Logits of every step that wanted some."""
    tiny = native_tiny
    logits, forward = [], tiny.runner._decoder.forward

    def record(*args):
        out = forward(*args)
        if out is not None:
            logits.append(out)
        return out

    tiny.runner._decoder.forward = record
    return logits


def test_the_library_has_the_width_that_was_asked_for(lanes, library):
    assert library.lanes == lanes
    assert wanted_lanes() == lanes


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (75, 33), (1, 8), (50, 600)])
def test_a_row_of_a_product_depends_on_nothing_else(library, outputs, inputs):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(160, inputs)
    packed = library.pack(WeightFormat.PLAIN, weight, HugePages())
    weights = Weights(packed=packed.data_ptr(), bias=bias.data_ptr(), format=WeightFormat.PLAIN, outputs=outputs)
    alone = torch.cat([library.linear(x[i : i + 1], weights, outputs, 1) for i in range(len(x))])
    torch.testing.assert_close(alone, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    for rows in (2, 3, 4, 5, 6, 7, 13, 160):
        for threads in (1, 3):
            assert torch.equal(library.linear(x[:rows].contiguous(), weights, outputs, threads), alone[:rows])


def test_logits_and_kv_are_the_same_bits_at_every_chunk_size(native_tiny, seen):
    tiny, prompt, kv = native_tiny, prompt_of(41), []
    for chunk in (1, 2, 3, 5, 8, 16, 41):
        table = tiny.table(41)
        tiny.prefill(prompt, table, chunk=chunk)
        kv.append(tiny.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :41].clone())
        tiny.free += table
    for some, other in zip(kv[1:], seen[1:], strict=True):
        assert torch.equal(some, kv[0])
        assert torch.equal(other, seen[0])


def test_logits_are_the_same_bits_alone_and_in_a_batch(native_tiny, seen):
    tiny = native_tiny
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


def test_windows_are_the_same_bits_at_every_chunk_size(native_of, model_dir_of):
    driver = native_of(model_dir_of("MistralForCausalLM", sliding_window=11))
    kv = []
    for chunk in (1, 3, 7, 45):
        table = driver.table(45)
        driver.prefill(prompt_of(45), table, chunk=chunk)
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :45])
    assert all(torch.equal(other, kv[0]) for other in kv[1:])


@pytest.mark.parametrize(
    ("architecture", "length", "settings"),
    [
        ("LlamaForCausalLM", 1500, {"max_position_embeddings": 2048}),
        ("Qwen3ForCausalLM", 205, {"head_dim": 64, "num_key_value_heads": 1}),
        ("MistralForCausalLM", 205, {"num_key_value_heads": 6, "sliding_window": 50}),
    ],
)
def test_a_long_chunk_is_the_same_bits_as_its_tokens_one_by_one(
    native_of, model_dir_of, architecture, length, settings
):
    """Several tiles of queries, several packs of keys, and rows that are alone."""
    driver = native_of(model_dir_of(architecture, **settings), num_blocks=200)
    prompt, kv = prompt_of(length), []
    for chunks in ((length,), (64,) * (length // 64) + (length % 64,), (length - 30, *[1] * 30)):
        table, start = driver.table(length), 0
        for chunk in chunks:
            driver.runner.execute([driver.seq(prompt[start : start + chunk], start, table)])
            start += chunk
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :length].clone())
        driver.free += table
    assert all(torch.equal(other, kv[0]) for other in kv[1:])


def test_threads_change_no_bit(native_tiny, seen):
    tiny = native_tiny
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            tiny.prefill(prompt_of(60), tiny.table(60), chunk=60)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(seen[0], seen[1])


def test_plain_torch_draws_the_same_ids(native_tiny, tiny_dir, driver_of):
    driver = driver_of(tiny_dir, backend="torch")
    assert driver.runner.backend == "torch"
    prompts = [prompt_of(n, seed=n) for n in (1, 9, 40)]
    assert driver.generate(prompts, 10, chunk=11) == native_tiny.generate(prompts, 10)


@pytest.mark.parametrize("reader", ["torch", *ALL_LANES])
def test_kv_of_one_width_serves_another(native_tiny, set_lanes, tiny_dir, driver_of, reader):
    """As between prefill and decode on machines that differ."""
    prompt, sender = prompt_of(29), native_tiny
    [expected] = driver_of(tiny_dir, backend="torch").generate([prompt], 6)
    table = sender.table(29)
    out = [sender.prefill(prompt, table, chunk=10)]
    payload = bytearray(29 * sender.runner.kv_bytes_per_token)
    sender.runner.pack(table, 29, memoryview(payload))
    if reader != "torch":
        set_lanes(reader)
    peer = driver_of(tiny_dir, backend="torch" if reader == "torch" else "native")
    there = peer.table(35)
    peer.runner.unpack(there, 29, memoryview(payload))
    for index in range(1, 6):
        out += peer.runner.execute([peer.seq([out[-1]], 28 + index, there, index=index)]).token_ids[0]
    assert out == expected


@pytest.mark.parametrize(
    ("lanes", "change", "words"),
    [
        (16, {"head_dim": 16}, "head_dim 16 is no multiple of 32"),
        (8, {"head_dim": 24}, "head_dim 24 is no multiple of 16"),
        (4, {"head_dim": 12}, "head_dim 12 is no multiple of 8"),
        (16, {"hidden_size": 72}, "hidden_size 72 is no multiple of 16"),
        (8, {"hidden_size": 60}, "hidden_size 60 is no multiple of 8"),
        (16, {"intermediate_size": 144}, "intermediate_size 144 is no multiple of 32"),
        (8, {"intermediate_size": 168}, "intermediate_size 168 is no multiple of 16"),
        (16, {"head_dim": 288}, "head_dim 288 is above 256"),
    ],
)
def test_what_a_width_cannot_take_is_torchs_and_named(model_dir_of, driver_of, set_lanes, caplog, lanes, change, words):
    set_lanes(lanes)
    folder = model_dir_of("LlamaForCausalLM", **change)
    with caplog.at_level(logging.WARNING):
        driver = driver_of(folder)
    assert driver.runner.backend == "torch"
    assert words in caplog.text
    assert driver.generate([prompt_of(9)], 3) == driver_of(folder, backend="torch").generate([prompt_of(9)], 3)
    with pytest.raises(ConfigError, match=words):
        driver_of(folder, backend="native")


@pytest.mark.parametrize(("lanes", "head_dim"), [(4, 8), (8, 16), (16, 32)])
def test_the_least_heads_that_a_width_takes(model_dir_of, driver_of, set_lanes, lanes, head_dim):
    set_lanes(lanes)
    folder = model_dir_of("LlamaForCausalLM", head_dim=head_dim)
    ids = [driver_of(folder, backend=name).generate([prompt_of(30)], 6, chunk=7) for name in ("native", "torch")]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("text", ["12", "0", "wide", "-8", "8.0", " "])
def test_a_width_that_there_is_not_is_refused(tiny_dir, driver_of, monkeypatch, text):
    monkeypatch.setenv(LANES_VARIABLE, text)
    with pytest.raises(ConfigError, match="must be one of 4, 8, 16") as refused:
        driver_of(tiny_dir)
    assert refused.value.field == LANES_VARIABLE


@pytest.fixture(params=["nothing on PATH", "CC names nothing"])
def no_compiler(request, monkeypatch, tmp_path):
    """Returns: what is said of it."""
    if request.param == "CC names nothing":
        monkeypatch.setenv("CC", "no-such-compiler")
        return "CC=no-such-compiler is not installed"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return "no C compiler (cc, gcc or clang) is installed"


def test_without_a_compiler_torch_serves_and_says_so(tiny_dir, driver_of, no_compiler, caplog):
    """Though libraries lie in the cache: whose they are, only a compiler could tell."""
    with caplog.at_level(logging.WARNING):
        driver = driver_of(tiny_dir)
    assert driver.runner.backend == "torch"
    [decoder] = [line for line in caplog.messages if "compiled CPU kernels" in line]
    [moves] = [line for line in caplog.messages if "KV is packed" in line]
    assert no_compiler in decoder
    assert no_compiler in moves
    [ids] = driver.generate([prompt_of(29)], 4)
    payload = bytearray(29 * driver.runner.kv_bytes_per_token)
    driver.runner.pack(list(range(4)), 29, memoryview(payload))
    assert len(ids) == 4
    with pytest.raises(ConfigError, match="backend") as refused:
        driver_of(tiny_dir, backend="native")
    assert no_compiler in str(refused.value)


@pytest.mark.usefixtures("compiler")
def test_other_dtypes_are_for_torch(tiny_dir):
    runner = TorchModelRunner.load(tiny_dir, num_blocks=4, dtype="float16")
    assert runner.backend == "torch"
    assert "they compute in float32 and bfloat16, not float16" in runner.refusals[0]


@pytest.mark.usefixtures("compiler")
def test_the_library_is_compiled_once(tmp_path):
    """One function, as the decoder's sources are compiled, without their half a minute."""
    (tmp_path / "one.c").write_text('__attribute__((visibility("default"))) int lanes(void) { return LANES; }\n')
    sources, folder = replace(SOURCES, folder=tmp_path, files=("one.c",)), tmp_path / "built"
    first = sources.build(folder, lanes=4)
    before = first.stat().st_mtime_ns
    assert sources.build(folder, lanes=4) == first
    assert first.stat().st_mtime_ns == before
    assert ctypes.CDLL(str(first)).lanes() == 4
    assert {path.name for path in folder.iterdir()} == {first.name, "lock"}


def test_each_width_has_a_file_of_its_own(tmp_path, compiler):
    """That of this machine's registers is the one that is compiled where none is asked for."""
    files = {lanes: library_path(tmp_path, compiler, lanes) for lanes in ALL_LANES}
    assert len(set(files.values())) == len(ALL_LANES)
    assert library_path(tmp_path, compiler) == files[register_lanes()]


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


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_beside_its_packed_head_is_counted(model_dir_of, driver_of, tied):
    folder = model_dir_of("LlamaForCausalLM", tie_word_embeddings=tied)
    packed, plain = (driver_of(folder, backend=name).runner for name in ("native", "torch"))
    model = packed.description
    one = 4 * model.head_weights
    assert (packed.weight_sizes.head, packed.weight_sizes.embedding) == (one, one)
    assert packed.weight_sizes.layers == 4 * model.layer_weights
    assert plain.weight_sizes.layers >= packed.weight_sizes.layers  # wide ones are there twice
    assert plain.weight_sizes.head >= one
