"""Issue 15: lm-eval-harness through the API, beside itself with transformers: the same log likelihoods, and the same choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.multiproc]

TOLERANCE, RELATIVE = 1e-4, 5e-6
"""Sums of many tokens' logarithms in 32 bits: the rounding grows with the sum (seen: 2.4e-6 of -48.9)."""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "\u7a7a"], "answer": 0},
    {
        "question": "\u65e5\u672c\u306e\u9996\u90fd\u306f",
        "choices": ["\u6771\u4eac", "\u5927\u962a", "\U0001f642"],
        "answer": 0,
    },
    {
        "question": "Water is made of hydrogen and",
        "choices": ["oxygen", "gold", "e\u0301\U0001f9d1\u200d\U0001f33e"],
        "answer": 0,
    },
    {"question": "One, two, three,", "choices": ["four, five", "nine"], "answer": 0},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: " "
"""
CHOICE = """output_type: multiple_choice
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
"""
ANSWER = """output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
  temperature: 0
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in QUESTIONS), encoding="utf-8")
    for name, kind in (("capitals", CHOICE), ("capitals_free", ANSWER)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + kind, encoding="utf-8")
    return folder


def evaluate(
    clients, tasks: Path, out: Path, task: str, model: str, arguments: str, *more: str
) -> list[dict[str, Any]]:
    """The samples that lm-eval logs."""
    clients.run(
        "lm_eval", "run", "--model", model, "--model_args", arguments, "--include_path", str(tasks), "--tasks", task,
        "--log_samples", "--output_path", str(out), *more,
    )  # fmt: skip
    (samples,) = out.glob("*/samples_*.jsonl")
    return sorted(
        map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda sample: sample["doc_id"]
    )


def through_the_api(cluster, clients, route: str = "completions") -> str:
    parts = {
        "model": cluster.model,
        "base_url": f"{cluster.http_url}/v1/{route}",
        "tokenizer": str(clients.model_folder),
        "tokenizer_backend": "huggingface",
        "max_retries": "1",
    }
    return ",".join(f"{name}={value}" for name, value in parts.items())


def likelihoods(samples: list[dict[str, Any]]) -> list[tuple[float, str]]:
    return [(float(value), greedy) for sample in samples for ((value, greedy),) in sample["resps"]]


@pytest.fixture(scope="module")
def expected(clients, tasks, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, str]]:
    """Results of lm-eval with transformers in 32 bits."""
    arguments = f"pretrained={clients.model_folder},dtype=float32"
    out = tmp_path_factory.mktemp("transformers")
    return likelihoods(
        evaluate(clients, tasks, out, "capitals", "hf", arguments, "--device", "cpu", "--batch_size", "1")
    )


@pytest.mark.parametrize("form", ["token ids", "text", "batches"])
def test_log_likelihoods_are_those_of_transformers(form, clients, cluster, tasks, expected, counted, tmp_path) -> None:
    arguments = through_the_api(cluster, clients) + f",num_concurrent=2,tokenized_requests={form != 'text'}"
    more = ("--batch_size", "3" if form == "batches" else "1")
    samples = evaluate(clients, tasks, tmp_path, "capitals", "local-completions", arguments, *more)
    found = likelihoods(samples)
    numbers = pytest.approx([value for value, _ in expected], abs=TOLERANCE, rel=RELATIVE)
    assert [value for value, _ in found] == numbers
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    counted(requests=sum(len(one["choices"]) for one in QUESTIONS))


def test_generated_answers(clients, cluster, tasks, counted, tmp_path) -> None:
    samples = evaluate(
        clients,
        tasks,
        tmp_path,
        "capitals_free",
        "local-completions",
        through_the_api(cluster, clients),
        "--batch_size",
        "1",
    )
    assert samples[0]["resps"][0][0].strip().startswith("Paris")
    counted(requests=len(QUESTIONS))


def test_generated_answers_of_chats(clients, cluster, tasks, counted, tmp_path) -> None:
    arguments = through_the_api(cluster, clients, "chat/completions")
    samples = evaluate(
        clients, tasks, tmp_path, "capitals_free", "local-chat-completions", arguments, "--apply_chat_template"
    )
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
    counted(requests=len(QUESTIONS))
