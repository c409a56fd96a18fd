"""Issue 15, 4.9: log probabilities beside those of transformers, over CJK, emoji, combining marks and special tokens; from a
disaggregated cluster and from one process, whole and streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from diptych.cli.models.store import default_model_path

pytestmark = pytest.mark.multiproc

TEXTS = [
    "The sky is blue.",
    "\u7a7a\u306f\u9752\u3044\u3067\u3059\u3002 \ud55c\uad6d\uc5b4",
    "Fine \U0001f642\U0001f9d1\u200d\U0001f33e!",
    "e\u0301 is not \u00e9, a\u0308\u0323 neither",
    "<|im_start|>user\n  two  spaces<|im_end|>\n",
    "x",
]
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Expected:
    """transformers' result for one text. `top` has one more entry: the next token."""

    ids: list[int]
    offsets: list[int]
    own: list[float]
    top: list[tuple[list[int], list[float]]]
    text: str


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = default_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for text in TEXTS:
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = encoded.input_ids
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        top = [row.topk(3) for row in logprobs]
        found.append(
            Expected(
                ids=ids,
                offsets=[begin for begin, _ in encoded.offset_mapping],
                own=[logprobs[i, token].item() for i, token in enumerate(ids[1:])],
                top=[(row.indices.tolist(), row.values.tolist()) for row in top],
                text=tokenizer.decode(ids, skip_special_tokens=True),
            )
        )
    return found


@pytest.fixture(scope="module", params=["cluster", "colocated"])
def http(request: pytest.FixtureRequest, cluster, colocated):
    server = {"cluster": cluster, "colocated": colocated}[request.param]
    with httpx.Client(base_url=server.http_url, timeout=300.0) as client:
        yield client


def complete(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"temperature": 0, "local_prefill_max_tokens": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choices_of_stream(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"temperature": 0, "local_prefill_max_tokens": 0, "stream": True} | body
    choices: dict[int, dict[str, Any]] = {}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for shown in json.loads(line)["choices"]:
            choice = choices.setdefault(shown["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            choice["text"] += shown["text"]
            choice["finish_reason"] = shown["finish_reason"]
            for name, values in (shown["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def check_numbers(logprobs: dict[str, Any], expected: Expected) -> None:
    """Check the prompt's positions."""
    count = len(expected.ids)
    first, *own = logprobs["token_logprobs"][:count]
    assert first is None
    assert own == pytest.approx(expected.own, abs=TOLERANCE)
    first, *tops = logprobs["top_logprobs"][:count]
    assert first is None
    for i, top in enumerate(tops):
        ids, values = expected.top[i]
        assert list(top.values())[:3] == pytest.approx(values, abs=TOLERANCE)
        assert len(top) == 3 + (expected.ids[i + 1] not in ids)
        assert top[logprobs["tokens"][i + 1]] == logprobs["token_logprobs"][i + 1]


def test_echoes_of_several_texts_with_max_tokens_0(http, expected):
    """As lm-eval-harness requests them."""
    answer = complete(http, {"prompt": TEXTS, "echo": True, "logprobs": 3, "max_tokens": 0})
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(len(one.ids) for one in expected)
    for choice, text, reference in zip(answer["choices"], TEXTS, expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert {len(values) for values in choice["logprobs"].values()} == {len(reference.ids)}
        assert choice["logprobs"]["text_offset"] == reference.offsets
        check_numbers(choice["logprobs"], reference)


def test_echoes_of_token_ids(http, expected):
    """Special tokens are left out of the text, and their offsets are where the text goes on."""
    prompts = [one.ids for one in expected]
    answer = complete(http, {"prompt": prompts, "echo": True, "logprobs": 3, "max_tokens": 1})
    for choice, reference in zip(answer["choices"], expected, strict=True):
        assert choice["text"].startswith(reference.text)
        shown = choice["logprobs"]
        assert {len(values) for values in shown.values()} == {len(reference.ids) + 1}
        check_numbers(shown, reference)
        assert shown["text_offset"][len(reference.ids)] == len(reference.text)
        for offset, name in zip(shown["text_offset"], shown["tokens"], strict=True):
            if not name.startswith(("bytes:", "<|")):
                assert choice["text"].startswith(name, offset), (name, offset)


def test_streamed_echo_is_the_whole_one(http, expected):
    body = {"prompt": TEXTS, "echo": True, "logprobs": 3, "max_tokens": 3, "n": 2}
    whole = complete(http, body)["choices"]
    stream = choices_of_stream(http, body)
    assert len(whole) == len(stream) == 2 * len(TEXTS)
    for index, (one, other) in enumerate(zip(whole, stream, strict=True)):
        check_numbers(other["logprobs"], expected[index // 2])
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        for name in ("tokens", "text_offset"):
            assert one["logprobs"][name] == other["logprobs"][name]


def test_echo_together_with_prompt_logprobs(http, expected):
    body = {"prompt": TEXTS[:3], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    for choice, reference in zip(complete(http, body)["choices"], expected, strict=False):
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for i, place in enumerate(rest):
            ids, values = reference.top[i]
            assert {int(token) for token in place} == {*ids, reference.ids[i + 1]}
            assert [place[str(token)]["logprob"] for token in ids] == pytest.approx(values, abs=TOLERANCE)
        assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])


def test_bytes_of_a_chat_answer_joined_are_its_text(http):
    said = "\u7a7a \U0001f9d1\u200d\U0001f33e e\u0301"
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "structured_outputs": {"choice": [said]},
        "logprobs": True,
        "top_logprobs": 0,
    }
    answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["message"]["content"] == said
    entries = answer["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode() == said
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert all(entry["token"] for entry in entries)
