"""KV groups of layers with a window: blocks behind it are freed, and another sequence's or NaN when the next step runs.

What a step computes is what transformers, or plain torch with all of the KV, computes; on every back end.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace

import pytest
import torch
import transformers

from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError, InternalError
from diptych.common.kv_groups import PoolDemand
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import load_weights
from diptych.engine.exec.model_runner import TorchModelRunner, _read_json
from diptych.engine.exec.models.registry import describe
from diptych_tests.kv_groups import GroupDriver

DEMAND = PoolDemand(max_num_seqs=5, max_num_batched_tokens=24)
FAMILIES = {
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 9, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0, "num_hidden_layers": 4},
    ),
    "window-only": ("MistralForCausalLM", {"sliding_window": 13}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}  # fmt: skip
BACKENDS = ["torch", *ALL_LANES]
interpreted = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def prompts_of(*lengths, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(n)] for n in lengths]


@pytest.fixture
def backend_of(set_lanes):
    """backend_of("torch", "triton" or a number of floats per vector of the compiled kernels) -> name of the back end."""

    def choose(backend):
        if isinstance(backend, int):
            set_lanes(backend)
            return "native"
        if backend == "triton":
            from triton import knobs

            if not knobs.runtime.interpret:
                pytest.skip("set TRITON_INTERPRET=1")
        return backend

    return choose


def load(folder, backend, *, num_blocks=64, demand: PoolDemand | None = DEMAND, block_size=4) -> TorchModelRunner:
    runner = TorchModelRunner.load(
        folder, num_blocks=num_blocks, block_size=block_size, num_threads=1, backend=backend, demand=demand
    )
    assert runner.backend == backend
    return runner


def reference_ids(model, prompt, count):
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-4, "the random model has a tie: pick another seed"
            ids.append(best.indices[0].item())
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """family(name) -> folder, prompts, transformers' ids; made once."""
    made = {}

    def make(name, tiny_model_dir):
        if name not in made:
            torch.set_num_threads(1)
            architecture, overrides = FAMILIES[name]
            folder = tiny_model_dir(tmp_path_factory.mktemp(name), architecture, **overrides)
            kind = getattr(transformers, architecture)
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            prompts = prompts_of(1, 30, 61)
            made[name] = folder, prompts, [reference_ids(model, prompt, 20) for prompt in prompts]
        return made[name]

    return make


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_transformers_with_freed_blocks_reused(family, tiny_model_dir, backend_of, name, backend):
    folder, prompts, expected = family(name, tiny_model_dir)
    runner = load(folder, backend_of(backend), num_blocks=42)
    assert [group.window for group in runner.pool.kv.groups] == sorted(
        {window or 0 for window in runner.description.windows}
    )
    driver = GroupDriver(runner)
    assert driver.generate(prompts, 20, chunk=17) == expected
    assert driver.reused > 10
    for pool, free in zip(runner.pool.groups, driver.free, strict=True):
        assert sorted(free) == list(range(pool.num_blocks))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hand_off_of_what_the_windows_need_goes_on_as_transformers(family, tiny_model_dir, backend_of, backend):
    """Chunks of a prompt slide the window before it is packed; decode has the blocks that came and no others."""
    folder, prompts, expected = family("gemma3", tiny_model_dir)
    source, target = (GroupDriver(load(folder, backend_of(backend)), seed=seed) for seed in (1, 2))
    arrived = []
    for number, prompt in enumerate(prompts):
        seq = source.begin(f"p{number}", prompt)
        source.prefill(seq, 17)
        parts = source.packed(seq)
        assert [part.group for part in parts] == [0, 1, 1]
        moved = sum(len(part.data) for part in parts)
        assert moved <= source.kv.transfer_bytes(0, len(prompt)) + source.kv.block_bytes
        source.end(seq)
        arrived.append(target.unpacked(f"d{number}", seq.tokens, len(prompt), parts))
    target.decode(arrived, 20)
    assert [seq.outputs for seq in arrived] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_guesses_are_verified_beside_a_window(family, tiny_model_dir, backend_of, backend):
    folder, prompts, expected = family("gemma3", tiny_model_dir)
    driver = GroupDriver(load(folder, backend_of(backend)))
    seqs = [driver.begin(f"s{i}", prompt) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        driver.prefill(seq, 24)
    most = 0
    while going := [i for i, seq in enumerate(seqs) if len(seqs[i].outputs) < 20]:
        rows = []
        for i in going:
            done = len(seqs[i].outputs)
            guesses = expected[i][done : min(19, done + driver.rng.randint(0, 3))]
            if guesses and driver.rng.random() < 0.5:
                guesses[-1] = (guesses[-1] + 1) % 320
            rows.append((seqs[i], driver.row(seqs[i], 1, sample=True, guesses=guesses)))
        most = max(most, *(len(drawn) for drawn in driver.execute(rows).token_ids))
    assert [seq.outputs for seq in seqs] == expected
    assert most > 1


def placed(folder, windows, backend):
    """The model with other windows: what no config of a family says."""
    described = describe(_read_json(folder / "config.json"))
    blocks = tuple(
        replace(block, attention=replace(block.attention, window=window))
        for block, window in zip(described.blocks, windows, strict=True)
    )
    described = replace(described, blocks=blocks)
    kv = kv_format_of(described, block_size=4, window_groups=True)
    plan = plan_for(described, kv, device_type="cpu", dtype=torch.float32, wanted=backend)
    with Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu")) as source:
        return load_weights(source, plan)


def made(folder, windows, backend, demand, *, num_blocks=64, block_size=4) -> TorchModelRunner:
    return TorchModelRunner(
        placed(folder, windows, backend), eos_token_ids=(), num_blocks=num_blocks, block_size=block_size,
        max_model_len=200, demand=demand,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_windows_compute_what_torch_does_with_all_of_the_kv(model_dir_of, backend_of, backend, seed):
    """Several windows, of one token too; chunks and blocks of many sizes."""
    rng = random.Random(seed)
    folder = model_dir_of("Qwen3ForCausalLM", num_hidden_layers=5)
    windows = [rng.choice([None, 1, 2, 5, 8, 16, 33]) for _ in range(5)]
    block_size, chunk = rng.choice([2, 4, 8]), rng.randint(2, 24)
    prompts = prompts_of(*(rng.randint(1, 70) for _ in range(4)), seed=seed)
    torch.set_num_threads(1)
    whole = GroupDriver(made(folder, windows, "torch", None, num_blocks=400, block_size=block_size))
    expected = whole.generate(prompts, 12, chunk=chunk)
    driver = GroupDriver(
        made(folder, windows, backend_of(backend), DEMAND, num_blocks=200, block_size=block_size), seed=seed
    )
    assert driver.generate(prompts, 12, chunk=chunk) == expected


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
@pytest.mark.usefixtures("set_lanes")
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted)])
def test_triton_reads_no_freed_block(model_dir_of, backend_of, name, backend):
    """Through the interpreter, which takes seconds for each id: a few of them, over a hand-off."""
    architecture, overrides = FAMILIES[name]
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    folder = model_dir_of(architecture, **{**overrides, **small, "sliding_window": 7})
    prompts = prompts_of(3, 33)
    whole = GroupDriver(load(folder, "torch", demand=None))
    expected = whole.generate(prompts, 6, chunk=19)
    source, target = (GroupDriver(load(folder, backend_of(backend)), seed=seed) for seed in (1, 2))
    arrived = []
    for number, prompt in enumerate(prompts):
        seq = source.begin(f"p{number}", prompt)
        source.prefill(seq, 19)
        arrived.append(target.unpacked(f"d{number}", seq.tokens, len(prompt), source.packed(seq)))
        source.end(seq)
    target.decode(arrived, 6)
    assert [seq.outputs for seq in arrived] == expected


def test_a_host_tier_of_window_groups_is_refused_by_name(model_dir_of):
    folder = model_dir_of("MistralForCausalLM", sliding_window=9)
    with pytest.raises(ConfigError, match=r"num_host_blocks.*window-9") as error:
        TorchModelRunner.load(folder, num_blocks=64, num_host_blocks=4, demand=DEMAND)
    assert error.value.field == "num_host_blocks"


def test_a_table_that_begins_behind_the_window_is_refused(model_dir_of, backend):
    runner = load(model_dir_of("MistralForCausalLM", sliding_window=9), backend)
    driver = GroupDriver(runner)
    seq = driver.begin("a", prompts_of(40)[0])
    driver.prefill(seq, 20)
    row = driver.row(seq, 1, sample=True)
    for bad in (
        replace(row, first_blocks=(row.first_blocks[0] + 9,)),
        replace(row, first_blocks=(0, 0)),
        replace(row, first_blocks=(-1,)),
        replace(row, block_tables=([runner.pool.num_blocks[0]] * len(row.block_tables[0]),)),
    ):
        with pytest.raises(InternalError):
            runner.execute([bad])
