"""Parsing of one event of an OpenAI-compatible stream."""

from __future__ import annotations

import msgspec
import pytest

from diptych.loadtest.targets.openai import _chunk_of, _Event
from diptych.loadtest.targets.target import Accepted, Chunk


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
def test_text_of_any_kind_is_a_token(field: str) -> None:
    """`delta.reasoning` was not counted: a reasoning answer's first token seemed to arrive after the reasoning."""
    event = msgspec.json.decode(msgspec.json.encode({"choices": [{"delta": {field: "so"}}]}), type=_Event)
    assert _chunk_of(event) == Chunk("so")


def test_a_chunk_without_text_is_no_token() -> None:
    event = msgspec.json.decode(b'{"choices": [{"delta": {"role": "assistant"}}]}', type=_Event)
    assert _chunk_of(event) == Accepted()
