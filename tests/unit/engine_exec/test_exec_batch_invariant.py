"""--batch-invariant through the runner: KV, logprobs and ids of a sequence to the bit, alone and beside others, in chunks of
any size, behind a cached prefix, and handed over; and who refuses the flag. See tests/kernels/test_triton_invariant.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.attention import attention_version
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.models.registry import describe

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
# Three tiles of rows of the head; two chains and two splits (see small_orders); prompts of two splits and a partial block.
SMALL = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SEEDED = SamplingParams(max_tokens=9, seed=5, temperature=0.9, top_p=0.9, logprobs=4)


@pytest.fixture
def small_orders(monkeypatch):
    """Chains and splits in a tiny model; matrix products in the interpreter as a chain of instructions computes them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton import knobs

    from diptych.bench.kernels.ordered_dot import replaced
    from diptych.kernels import triton_invariant_attention as attention
    from diptych.kernels import triton_invariant_matmul as matmul

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")

    monkeypatch.setattr(*replaced())
    monkeypatch.setattr(matmul, "CHAINS_FROM", 64)
    monkeypatch.setattr(matmul, "_SHARE_GRAIN", 32)
    for launcher in (attention.invariant_decode, attention.invariant_prefill):
        monkeypatch.setitem(launcher.__kwdefaults__, "split_tokens", 32)


class Sequence:
    """A prompt, its blocks and what came out of it."""

    def __init__(self, driver, prompt, count):
        self.driver, self.prompt = driver, prompt
        self.table, self.out, self.logprobs = driver.table(len(prompt) + count), [], []

    def step(self, start, end, *, sampling=SEEDED):
        tokens = [*self.prompt, *self.out][start:end]
        last = end == len(self.prompt) + len(self.out)
        return self.driver.seq(tokens, start, self.table, sample=last, sampling=sampling, index=len(self.out))

    def decode(self, **kwargs):
        end = len(self.prompt) + len(self.out)
        return self.step(end - 1, end, **kwargs)

    def kv(self):
        """Bytes of the KV of all tokens but the last."""
        count = len(self.prompt) + len(self.out) - 1
        out = bytearray(count * self.driver.runner.kv_bytes_per_token)
        self.driver.runner.pack(self.table[: -(-count // self.driver.runner.block_size)], count, memoryview(out))
        return bytes(out)

    @property
    def seen(self):
        return self.out, self.logprobs, self.kv()


def run(driver, steps):
    """steps: (sequence, its step). One step of the runner."""
    result = driver.runner.execute([step for _, step in steps])
    for i, (sequence, _) in enumerate(steps):
        sequence.out.extend(result.token_ids[i])
        sequence.logprobs.extend((e.token_id, e.logprob, e.top) for e in result.logprobs.get(i, ()))


def alone(driver, prompt, count, cuts=()):
    sequence = Sequence(driver, prompt, count)
    for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
        run(driver, [(sequence, sequence.step(start, end))])
    while len(sequence.out) < count:
        run(driver, [(sequence, sequence.decode())])
    return sequence


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(SMALL["vocab_size"]) for _ in range(n)] for n in lengths]


@pytest.mark.usefixtures("small_orders")
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [  # both: layers with windows and without
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
        ("Gemma2ForCausalLM", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 34}),
    ],
)
def test_a_sequence_is_the_same_to_the_bit_in_any_company(model_dir_of, driver_of, architecture, overrides):
    folder = model_dir_of(architecture, **{**SMALL, **overrides})
    driver = driver_of(folder, backend="triton", batch_invariant=True, num_blocks=200)
    prompt, short, long = prompts_of(37, 3, 12)
    first = alone(driver, prompt, 2)
    # In chunks, to a split's end; the first and the last one are one token, which a decoding row's kernel computes.
    assert alone(driver, prompt, 2, (1, 32, 36)).seen == first.seen
    # Beside a prompt's chunk and decoding rows.
    a, b, c = (Sequence(driver, tokens, 4) for tokens in (prompt, short, long))
    run(driver, [(b, b.step(0, 3)), (c, c.step(0, 7)), (a, a.step(0, 29))])
    run(driver, [(a, a.step(29, 37)), (c, c.step(7, 12)), (b, b.decode())])
    run(driver, [(c, c.decode()), (b, b.decode()), (a, a.decode())])
    assert a.seen == first.seen
    # Handed over, and behind a prefix whose KV was computed by decoding: what was generated is a prompt now.
    there = driver_of(folder, backend="triton", batch_invariant=True)
    d = Sequence(there, prompt, 2)
    payload = bytearray(36 * driver.runner.kv_bytes_per_token)
    driver.runner.pack(first.table[:5], 36, memoryview(payload))
    there.runner.unpack(d.table[:5], 36, memoryview(bytes(payload)))
    run(there, [(d, d.step(36, 37))])
    run(there, [(d, d.decode())])
    assert (d.out, d.logprobs) == (first.out, first.logprobs)
    again = alone(there, [*prompt, *first.out[:-1]], 1)
    assert again.kv() == first.kv()


@pytest.mark.usefixtures("small_orders")
def test_the_reference_draws_the_same_ids(model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM", **SMALL)
    prompts = prompts_of(12, 3)
    driver = driver_of(folder, backend="triton", batch_invariant=True)
    assert driver.generate(prompts, 2, chunk=9) == driver_of(folder, backend="torch").generate(prompts, 2)


@pytest.mark.usefixtures("small_orders")
def test_what_others_ask_for_does_not_choose_how_a_row_is_drawn(model_dir_of, driver_of, monkeypatch):
    """Beside several choices, a beam's candidates and a prompt's logprobs a plain row is still drawn by the kernels, and each of
    the others by itself."""
    from diptych.engine.exec.cuda import backend

    driver = driver_of(model_dir_of("LlamaForCausalLM", **SMALL), backend="triton", batch_invariant=True)
    tokens = prompts_of(5, 6, 7, 9)
    calls = []
    monkeypatch.setattr(backend, "draw_step", lambda *a: calls.append((list(a[1]), a[2])) or original(*a))
    from diptych.engine.exec.sampling import draw_step as original

    def steps():
        plain, choices, beam, logged = (driver.seq(t, 0, driver.table(12), sampling=SEEDED) for t in tokens)
        choices.num_draws, beam.num_candidates = 3, 4
        logged.prompt_targets, logged.sampling = tokens[3][1:], replace(SEEDED, prompt_logprobs=2)
        return [plain, choices, beam, logged]

    together = driver.runner.execute(steps())
    assert calls == [([], [(3, 8)]), ([1], []), ([2], [])]
    for i, step in enumerate(steps()):
        one = driver.runner.execute([step])
        assert one.token_ids[0] == together.token_ids[i]
        for field in ("logprobs", "more_draws", "candidates", "prompt_logprobs"):
            assert getattr(one, field).get(0) == getattr(together, field).get(i), field


# ---- on a GPU, with graphs ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"hidden_size": 2048, "intermediate_size": 2560, "num_attention_heads": 32}),
        ("Qwen3ForCausalLM", {"hidden_size": 2048, "intermediate_size": 2560}),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 32, "sliding_window": 300}),
    ],
)
def test_a_sequence_is_the_same_to_the_bit_on_a_gpu(model_dir_of, driver_of, architecture, overrides, dtype):
    """Prompts over several splits, with two chains in some weights; in graphs and kernel by kernel, in steps of 1 to 900 rows."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    folder = model_dir_of(architecture, **{**sizes, **overrides})
    fields = {"device": "cuda", "dtype": dtype, "batch_invariant": True, "num_blocks": 2000}
    driver = driver_of(folder, graph_sizes=[1, 2, 8, 32], **fields)
    prompt, *others = prompts_of(1100, 3, 513, 64, *range(20, 60))
    first = alone(driver, prompt, 6)
    for cuts in ((512,), (1, 700, 1099), (64, 65, 130, 387)):
        assert alone(driver, prompt, 6, cuts).seen == first.seen, cuts
    a, *rest = (Sequence(driver, tokens, 40) for tokens in (prompt, *others))
    run(driver, [(s, s.step(0, len(s.prompt))) for s in rest])
    for start in range(0, 1100, 275):
        run(driver, [(a, a.step(start, start + 275)), *((s, s.decode()) for s in rest)])
    while len(a.out) < 6:
        run(driver, [*((s, s.decode()) for s in rest[: 5 * len(a.out)]), (a, a.decode())])
    assert a.seen == first.seen
    eager = driver_of(folder, graph_sizes=[], **fields)
    assert alone(eager, prompt, 6).seen == first.seen
    assert alone(eager, [*prompt, *first.out[:-1]], 1).kv() == first.kv()


# ---- who refuses it ----

RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def plan(wanted, **kwargs):
    kv = full_format(2, 2, 8, block_size=8, dtype="float32")
    return plan_for(describe(RAW), kv, device_type="cpu", dtype=torch.float32, wanted=wanted, **kwargs)


def test_a_back_end_that_cannot_refuses_it_by_name():
    with pytest.raises(ConfigError, match=r"batch_invariant.*back end torch is not") as caught:
        plan("torch", batch_invariant=True)
    assert caught.value.field == "batch_invariant"
    plan("torch")


@pytest.mark.parametrize(("capability", "taken"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_a_gpu_that_the_kernels_were_not_written_for_refuses_it(monkeypatch, capability, taken):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    plan("triton")
    if taken:
        plan("triton", batch_invariant=True)
    else:
        with pytest.raises(ConfigError, match=rf"compute capability 9.x, this GPU has {capability[0]}.0"):
            plan("triton", batch_invariant=True)


def test_the_compiled_kernels_accept_it(compiler, tiny_dir, driver_of):
    """They are batch-invariant with and without the flag: see test_exec_native.py."""
    driver = driver_of(tiny_dir, backend="native", batch_invariant=True)
    assert driver.generate(prompts_of(9), 3) == driver_of(tiny_dir, backend="native").generate(prompts_of(9), 3)


def test_a_layer_that_falls_to_torch_refuses_it_with_the_reason(compiler, model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM", head_dim=24)
    with pytest.raises(ConfigError, match=r"back end torch is not.*native refuses.*head_dim"):
        driver_of(folder, batch_invariant=True)


def test_only_a_gpus_numbers_change_with_it():
    assert attention_version("cpu", batch_invariant=True) == attention_version("cpu")
    assert attention_version("cuda", batch_invariant=True) != attention_version("cuda")
