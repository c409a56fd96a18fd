"""The real Gemma 3 270M: its GGUF file, twenty prompts, and what transformers answers, greedy.

`python tests/support/diptych_tests/gemma3_real.py FOLDER` computes the answers again and writes tests/golden/gemma3_270m.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from diptych.bench.engine import gemma3

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
    found = {
        "gguf": gemma3.FILE,
        "sha256": gemma3.SHA256,
        "prompts": prompts,
        "answers": answers(load(folder), prompts),
    }
    GOLDEN.write_text(json.dumps(found) + "\n", encoding="utf-8")
