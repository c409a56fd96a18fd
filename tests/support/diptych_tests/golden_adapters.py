"""The trained adapters of tests/adapters, and what peft and transformers answer with each: see the README there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).resolve().parents[2] / "adapters"
BASE = "base"


@dataclass(frozen=True)
class AdapterCase:
    """Greedy ids of one prompt, with an EOS or `max_new_tokens` of them.

    Args:
        first_logprobs: most likely ids of the first token.
        logits: of some prompts every `logit_step()`-th one, of the first and of the last token of the answer.
    """

    adapter: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    first_logprobs: tuple[tuple[int, float], ...]
    logits: tuple[tuple[float, ...], ...] = ()

    @property
    def folder(self) -> Path | None:
        """None: the base model alone."""
        return None if self.adapter == BASE else FOLDER / self.adapter


@cache
def _golden() -> dict:
    return json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))


def max_new_tokens() -> int:
    return _golden()["max_new_tokens"]


def logit_step() -> int:
    return _golden()["logit_step"]


def names() -> list[str]:
    """Of the adapters, without the base."""
    return [name for name in _golden()["adapters"] if name != BASE]


def cases(prompts: int | None = None) -> list[AdapterCase]:
    """Prompt by prompt, of the base and of each adapter in turn. Args: prompts: how many of them, from the first; None: all."""
    golden = _golden()
    return [
        AdapterCase(
            name,
            tuple(prompt),
            tuple(golden["adapters"][name]["answers"][number]),
            tuple((token, value) for token, value in golden["adapters"][name]["first_logprobs"][number]),
            tuple(map(tuple, golden["adapters"][name]["logits"][2 * number : 2 * number + 2])),
        )
        for number, prompt in enumerate(golden["prompts"][:prompts])
        for name in golden["adapters"]
    ]


def flags() -> list[str]:
    """Of `diptych up` and `diptych serve`: they load every adapter at the start, under its name here."""
    modules = [flag for name in names() for flag in ("--lora-modules", f"{name}={FOLDER / name}")]
    return ["--enable-lora", "--lora-dir", str(FOLDER), *modules]


async def ask(http: httpx.AsyncClient, model: str, case: AdapterCase, max_tokens: int) -> dict[str, Any]:
    """The body of a greedy answer, computed by prefill and decode. Args: model: empty: the base model."""
    body = {
        "prompt": list(case.prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "return_token_ids": True,
        "local_prefill_max_tokens": 0,
    }
    answer = await http.post(
        "/v1/completions", json=body | ({"model": model} if model else {}), headers={"x-diptych-explain": "1"}
    )
    assert answer.status_code == 200, answer.text
    facts = answer.json()["diptych"]
    assert not facts["local_prefill"]
    assert facts["prefill_pid"] != facts["decode_pid"]
    return answer.json()


def ids_of(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])


async def check_mixed(http: httpx.AsyncClient, base_model: str, asked: list[AdapterCase], new_tokens: int) -> None:
    """All at once, across the pools: each answer is as the reference."""

    async def check(case: AdapterCase) -> None:
        model = "" if case.folder is None else case.adapter
        answer = await ask(http, model, case, new_tokens)
        assert ids_of(answer) == case.answer[:new_tokens], case
        assert answer["model"] == (model or base_model)
        assert (answer["diptych"].get("adapter") or {}).get("name", "") == model

    await asyncio.gather(*map(check, asked))
