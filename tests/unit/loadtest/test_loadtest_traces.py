from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.loadtest.workloads import traces
from diptych.loadtest.workloads.items import sessions_of
from diptych.loadtest.workloads.prompts import PromptMaker
from diptych.loadtest.workloads.traces import ReadSpec

SAMPLES = Path(traces.__file__).resolve().parents[1] / "samples"
FILES = {
    "mooncake": "mooncake.jsonl",
    "azure": "azure.csv",
    "burstgpt": "burstgpt.csv",
    "sharegpt": "sharegpt.jsonl",
    "prompts": "prompts.jsonl",
}


def read(form: str, **more):
    text = "text" if form in ("sharegpt", "prompts") else "ids"
    return traces.read(SAMPLES / FILES[form], form, ReadSpec(PromptMaker(text), **more))


@pytest.mark.parametrize("form", FILES)
def test_every_sample_is_read_and_the_same_again(form):
    items = read(form)
    assert items
    assert items == read(form)
    assert all(item.output_tokens >= 1 and item.input_tokens >= 1 for item in items)


@pytest.mark.parametrize("form", ["mooncake", "azure", "burstgpt"])
def test_time_scale_and_length_scale(form):
    slow, fast = read(form), read(form, time_scale=4.0, length_scale=0.125, max_input_len=64)
    assert slow[0].arrival_s == 0.0
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s / 4)
    assert max(len(item.token_ids) for item in fast) == 64
    assert fast[3].output_tokens == max(1, round(slow[3].output_tokens * 0.125))


def test_equal_hash_ids_become_equal_blocks(tmp_path):
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = traces.read(path, "mooncake", ReadSpec(PromptMaker("ids")))
    assert (len(one.token_ids), len(two.token_ids)) == (1100, 1536)
    assert one.token_ids[:1024] == two.token_ids[:1024]
    assert one.token_ids[1024:] != two.token_ids[1024:1100]
    assert (one.arrival_s, two.arrival_s) == (0.0, 1.5)


def test_mooncake_round_trip_aliases_and_sessions(tmp_path):
    rows = [
        {"created_time": 0, "input_tokens": 20, "output_tokens": 3, "session_id": "s", "delay": 0},
        {"created_time": 10, "input_tokens": 30, "output_tokens": 3, "session_id": "s", "delay": 1500},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = traces.read(path, "mooncake", ReadSpec(PromptMaker("ids")))
    assert (first.turn, second.turn, second.delay_s) == (0, 1, 1.5)
    items = read("mooncake")
    traces.write_mooncake(tmp_path / "again.jsonl", items)
    again = traces.read(tmp_path / "again.jsonl", "mooncake", ReadSpec(PromptMaker("ids")))
    assert again == items


def test_failed_requests_of_a_recording_are_left_out():
    total = len((SAMPLES / "burstgpt.csv").read_text().splitlines()) - 1
    assert 0 < len(read("burstgpt")) < total


def test_sharegpt_turns_are_sessions_with_history():
    sessions = sessions_of(read("sharegpt"))
    turns = sessions["a3"]
    assert [item.follows for item in turns] == [False, True, True]
    assert turns[1].text == "And what is a miss?"
    array = traces.read(SAMPLES / "sharegpt.jsonl", "sharegpt", ReadSpec(PromptMaker("messages"), limit=2))
    assert len(array) == 2
    assert array[0].messages[0].role == "user"


@pytest.mark.parametrize(
    ("form", "content"), [("mooncake", "{}\n"), ("azure", "a,b\n1,2\n"), ("sharegpt", "{"), ("prompts", "[]")]
)
def test_a_file_of_another_format_is_named(tmp_path, form, content):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigError, match="dataset"):
        traces.read(path, form, ReadSpec(PromptMaker("text")))
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read(tmp_path / "none", form, ReadSpec(PromptMaker("text")))
