"""Tiny random models of every architecture, written by transformers, and a driver that runs the runner by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.messages import ScheduledSeq
from diptych.engine.step_messages import UNKNOWN_TOKEN
from diptych_tests import quick_interpreter

quick_interpreter.install()

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
# Shapes that the compiled kernels take at every width of vectors.
BASE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    "llama-gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "mistral-gelu-tanh": ("MistralForCausalLM", {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 11}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-one-kv-head": ("Qwen3ForCausalLM", {"head_dim": 64, "num_key_value_heads": 1, "attention_bias": True}),
}  # fmt: skip
FOR_TORCH = {"llama-tied", "llama-gelu"}
"""Variants that no width of the compiled kernels takes."""
BACKENDS = [(name, lanes) for name in sorted(VARIANTS) for lanes in (None, *(() if name in FOR_TORCH else ALL_LANES))]


@dataclass(frozen=True)
class Variant:
    """A random model of one architecture, transformers' own beside it. `lanes`: floats of a vector of the compiled
    kernels; None: plain torch computes."""

    folder: Path
    model: Any
    lanes: int | None

    def driver(self) -> Driver:
        backend = "torch" if self.lanes is None else "native"
        runner = TorchModelRunner.load(self.folder, num_blocks=96, block_size=8, num_threads=1, backend=backend)
        return Driver(runner)


def tiny_model_dir(
    folder: Path, architecture: str, *, seed: int = 0, shard: str | None = None, **overrides: object
) -> Path:
    """Write a random model of `architecture` into `folder`; biases and norms are random too."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**BASE, **overrides})
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


@dataclass
class Driver:
    """One runner, block tables dealt out at random from the pool."""

    runner: TorchModelRunner
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.free = list(range(self.runner.num_blocks))
        self.rng.shuffle(self.free)

    def table(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.runner.block_size))]

    def seq(self, tokens, start, table, *, sample=True, sampling=GREEDY, index=0, history=None) -> ScheduledSeq:
        seq = ScheduledSeq(f"att-{table[0]}", list(tokens), start, (table,), sample, sampling, index)
        seq.top_logprobs = sampling.logprobs
        if sampling.constrained and history is not None:
            seq.history, seq.num_prompt = history, len(history) - index
        return seq

    def prefill(self, prompt, table, *, chunk: int, sampling=GREEDY) -> int:
        row: tuple[int, ...] = ()
        for start in range(0, len(prompt), chunk):
            end = min(len(prompt), start + chunk)
            last = end == len(prompt)
            step = self.seq(prompt[start:end], start, table, sample=last, sampling=sampling, history=list(prompt))
            [row] = self.runner.execute([step]).token_ids
        return row[0]

    def generate(self, prompts, count: int, *, chunk: int = 1000, sampling=GREEDY) -> list[list[int]]:
        """All prompts decode together; their prefills ran one by one."""
        tables = [self.table(len(p) + count) for p in prompts]
        outputs = [[self.prefill(p, t, chunk=chunk, sampling=sampling)] for p, t in zip(prompts, tables, strict=True)]
        for index in range(1, count):
            batch = [
                self.seq([out[-1]], len(p) + index - 1, table, sampling=sampling, index=index, history=[*p, *out])
                for p, out, table in zip(prompts, outputs, tables, strict=True)
            ]
            for out, row in zip(outputs, self.runner.execute(batch).token_ids, strict=True):
                out.extend(row)
        return outputs

    def in_one_batch(
        self, prompts, slots, count: int = 6, *, ahead: bool = False
    ) -> tuple[list[list[int]], np.ndarray]:
        """All prompts at once, greedy: their chunks in one step, then decodes, the rows of each with its adapter's slot.

        Args: ahead: decodes are launched, and then read.
        Returns: token ids, and logprobs [prompts, count].
        """
        tables = [self.table(len(prompt) + count) for prompt in prompts]
        outputs, logprobs = [[] for _ in prompts], [[] for _ in prompts]
        for index in range(count):
            steps = []
            for prompt, slot, table, out in zip(prompts, slots, tables, outputs, strict=True):
                seq = self.seq(out[-1:] or prompt, len(prompt) + index - 1 if out else 0, table, index=index)
                seq.adapter, seq.top_logprobs = slot, 0
                steps.append(seq)
            if ahead and index:
                flying = self.runner.launch(steps)
                flying.draw()
                result = flying.result()
            else:
                result = self.runner.execute(steps)
            for i, row in enumerate(result.token_ids):
                outputs[i] += row
                logprobs[i] += [one.logprob for one in result.logprobs[i]]
        self.free += [block for table in tables for block in table]
        return outputs, np.array(logprobs)

    def generate_with_drafts(self, prompts, truths, *, most: int = 4, sampling=GREEDY) -> tuple[list, list, list[int]]:
        """As `generate`, with guesses in every row: right ones from `truths` (the outputs to come), some of them made
        wrong. Returns: outputs, logprobs, and the number of tokens that each row yielded."""
        tables = [self.table(len(p) + len(t) + most) for p, t in zip(prompts, truths, strict=True)]
        outputs = [[self.prefill(p, t, chunk=1000, sampling=sampling)] for p, t in zip(prompts, tables, strict=True)]
        logprobs, yielded = [[] for _ in prompts], []
        memos = [None] * len(prompts)
        while going := [i for i, truth in enumerate(truths) if len(outputs[i]) < len(truth)]:
            batch = []
            for i in going:
                prompt, out, truth = prompts[i], outputs[i], truths[i]
                count = min(self.rng.randint(0, most), len(truth) - len(out) - 1)
                guesses = truth[len(out) : len(out) + count]
                if count and self.rng.random() < 0.4:
                    guesses[self.rng.randrange(count)] = self.rng.randrange(self.runner.vocab_size)
                start = len(prompt) + len(out) - 1
                seq = self.seq(
                    [out[-1], *guesses], start, tables[i], sampling=sampling, index=len(out), history=[*prompt, *out]
                )
                seq.num_drafts, seq.memo = count, memos[i]
                batch.append(seq)
            result = self.runner.execute(batch)
            for at, i in enumerate(going):
                row = result.token_ids[at]
                assert 1 <= len(row) <= 1 + batch[at].num_drafts
                outputs[i].extend(row)
                logprobs[i].extend(result.logprobs.get(at, ()))
                memos[i] = batch[at].memo
                yielded.append(len(row))
        return outputs, logprobs, yielded

    def generate_ahead(self, prompts, count: int, *, sampling=GREEDY) -> list[list[int]]:
        """As `generate`, but every decode step is launched before the one before it is read; the order of the sequences changes
        from step to step, and the first token is given by hand again halfway."""
        tables = [self.table(len(p) + count) for p in prompts]
        outputs = [[self.prefill(p, t, chunk=1000, sampling=sampling)] for p, t in zip(prompts, tables, strict=True)]
        histories = [[*prompt, *out] for prompt, out in zip(prompts, outputs, strict=True)]
        flying, rows = None, list(range(len(prompts)))
        for index in range(1, count):
            before = rows
            rows = rows[1:] + rows[:1]
            known = flying is None
            if index == count // 2:  # land, and go on with tokens that are known
                self._land(flying, before, outputs, histories)
                flying, known = None, True
            batch, sources = [], []
            for i in rows:
                token = outputs[i][-1] if known else UNKNOWN_TOKEN
                start = len(prompts[i]) + index - 1
                batch.append(self.seq([token], start, tables[i], sampling=sampling, index=index))
                if sampling.constrained:  # one token short until the step before is read
                    batch[-1].history, batch[-1].num_prompt = histories[i], len(prompts[i])
                sources.append(-1 if known else before.index(i))
            step = self.runner.launch(batch, sources)
            if flying is not None:
                self._land(flying, before, outputs, histories)
            step.draw()
            flying = step
        self._land(flying, rows, outputs, histories)
        return outputs

    def chunks_ahead(self, a, b, c, *, sampling=GREEDY) -> list[list[int]]:
        """Three prompts in steps that are launched before the one before them is read: in two chunks; whole; and in two chunks
        of which the last is one token. Sequences change places. Returns: 3, 4 and 2 tokens."""
        in_a, in_b, in_c = (self.table(len(prompt) + 4) for prompt in (a, b, c))
        new, at_a, at_b, at_c = [UNKNOWN_TOKEN], len(a), len(b), len(c)

        def seq(tokens, start, table, index=0, sample=True):
            return self.seq(tokens, start, table, index=index, sample=sample, sampling=sampling)

        steps = [
            ([], [seq(a[:4], 0, in_a, sample=False)], []),
            ([0, 1], [seq(a[4:], 4, in_a), seq(b, 0, in_b)], []),
            (
                [0, 1],
                [seq(new, at_a, in_a, 1), seq(new, at_b, in_b, 1), seq(c[:-1], 0, in_c, sample=False)],
                [0, 1, -1],
            ),
            (
                [1, 0, 2],
                [seq(new, at_b + 1, in_b, 2), seq(new, at_a + 1, in_a, 2), seq(c[-1:], at_c - 1, in_c)],
                [1, 0, -1],
            ),
            ([2, 1], [seq(new, at_c, in_c, 1), seq(new, at_b + 2, in_b, 3)], [2, 0]),
        ]
        drawn: list[list[int]] = [[], [], []]
        flying, rows = None, []

        def land() -> None:
            tokens = [token for row in flying.result().token_ids for token in row]
            for row, token in zip(rows, tokens, strict=True):
                drawn[row].append(token)

        for of, seqs, sources in steps:
            step = self.runner.launch(seqs, sources)
            if flying is not None:
                land()
            step.draw()
            flying, rows = step, of
        land()
        return drawn

    @staticmethod
    def _land(step, rows, outputs, histories) -> None:
        result = step.result()
        assert step.done()
        for i, row in zip(rows, result.token_ids, strict=True):
            outputs[i].extend(row)
            histories[i].extend(row)


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both back ends of the CPU; the compiled one where there is a compiler."""
    if request.param == "native":
        request.getfixturevalue("compiler")
    return request.param


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """model_of(name of a variant) -> (folder, transformers model)."""
    torch.set_num_threads(1)

    @cache
    def make(name):
        architecture, overrides = VARIANTS[name]
        folder = tiny_model_dir(tmp_path_factory.mktemp(name), architecture, **overrides)
        return folder, getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()

    return make


@pytest.fixture(params=sorted(VARIANTS))
def each_model(request, model_of):
    return model_of(request.param)


@pytest.fixture(params=BACKENDS, ids=[f"{name}-{lanes or 'torch'}" for name, lanes in BACKENDS])
def variant(request, model_of, set_lanes) -> Variant:
    name, lanes = request.param
    if lanes is not None:
        set_lanes(lanes)
    return Variant(*model_of(name), lanes)


def greedy_ids(model, prompt, guess):
    """Greedy by hand: generate() has settings of its own. guess: what a back end gave; where it is right, one pass shows it.
    Returns: as many ids, least gap between the first two logits, and the logits of the first id."""
    key = model, tuple(prompt), len(guess)
    if key not in _greedy:
        _greedy[key] = _greedy_ids(model, list(prompt), list(guess))
    ids, gap, first = _greedy[key]
    return list(ids), gap, first


_greedy: dict = {}
"""Known by any back end's guess."""


@torch.inference_mode()
def _greedy_ids(model, prompt, guess):
    logits = model(torch.tensor([[*prompt, *guess[:-1]]])).logits[0, len(prompt) - 1 :]
    top = logits.topk(2)
    if top.indices[:, 0].tolist() == guess:
        return guess, (top.values[:, 0] - top.values[:, 1]).min().item(), logits[0]
    ids, gap, first = list(prompt), float("inf"), None
    for _ in guess:
        logits = model(torch.tensor([ids])).logits[0, -1]
        first = logits if first is None else first
        top = logits.topk(2)
        gap = min(gap, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[len(prompt) :], gap, first


def check_family(driver, model, *, count: int, lengths: tuple[int, ...] = (1, 17, 40), chunk: int = 11) -> None:
    """Greedy ids of ragged prompts that decode together, and the logits behind each prompt, are transformers'. `count`:
    ids of each prompt. `chunk`: tokens of a prompt's chunks."""
    rng = random.Random(3)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in lengths]
    found = driver.generate(prompts, count, chunk=chunk)
    expected = [greedy_ids(model, prompt, out) for prompt, out in zip(prompts, found, strict=True)]
    assert min(gap for _, gap, _ in expected) > 1e-4, "the random model has a tie: pick another seed"
    logits = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)
    for prompt, (ids, _, first) in zip(prompts, expected, strict=True):
        table = driver.table(len(prompt))
        step = driver.seq(prompt, 0, table, sampling=logits)
        result = driver.runner.execute([step])
        assert [list(row) for row in result.token_ids] == [ids[:1]]
        known = torch.log_softmax(first, -1)
        [got] = result.logprobs[0]
        for token, logprob in got.top:
            assert abs(logprob - known[token].item()) < 2e-4
        driver.free += table
    assert found == [ids for ids, _, _ in expected]


@pytest.fixture(scope="session")
def family_of(tmp_path_factory):
    """family_of(architecture, config overrides) -> folder of a random model, and transformers' own; made once."""
    made = {}

    def make(architecture: str, overrides: dict) -> tuple[Path, Any]:
        key = architecture, repr(overrides)
        if key not in made:
            folder = tiny_model_dir(tmp_path_factory.mktemp("family"), architecture, **overrides)
            model_class = getattr(transformers, architecture)
            model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            made[key] = folder, model
        return made[key]

    return make


@pytest.fixture
def check_family_of(family_of, set_lanes, driver_of):
    """check_family_of(architecture, backend, config overrides): a random model of the family on that back end is
    transformers'. backend: torch, triton, or a number of floats per vector of the compiled kernels."""

    def check(architecture: str, backend: str | int, overrides: dict, **kwargs) -> None:
        torch.set_num_threads(1)
        folder, model = family_of(architecture, overrides)
        if isinstance(backend, int):
            set_lanes(backend)
        name = backend if isinstance(backend, str) else "native"
        driver = driver_of(folder, backend=name)
        assert driver.runner.backend == name
        check_family(driver, model, **kwargs)

    return check


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture
def tiny(tiny_dir) -> Driver:
    return Driver(TorchModelRunner.load(tiny_dir, num_blocks=64, block_size=8, num_threads=1))


@pytest.fixture
def driver_of():
    """driver_of(folder, **load arguments) -> Driver; with `runner` of that one."""

    def make(folder, *, num_blocks=96, block_size=8, runner=None, **kwargs):
        settings = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": 1, **kwargs}
        return Driver(runner or TorchModelRunner.load(folder, **settings))

    return make


@pytest.fixture
def model_dir_of(tmp_path):
    """model_dir_of(architecture, **config) -> folder of a random model."""

    def make(architecture, **overrides):
        return tiny_model_dir(tmp_path / "model", architecture, **overrides)

    return make


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    folder = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip(f"the real model is not in {folder}: `make model` puts it there")
    return folder


@pytest.fixture(name="greedy_ids", scope="session")
def greedy_ids_fixture():
    return greedy_ids


@pytest.fixture(name="tiny_model_dir", scope="session")
def tiny_model_dir_fixture():
    return tiny_model_dir
