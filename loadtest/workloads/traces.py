"""Readers of traces and data sets in public formats. Prompts are generated: traces contain lengths only.

mooncake   JSONL {timestamp ms, input_length, output_length, hash_ids of 512-token blocks}; also session_id and delay
           (ms), and the aliases created_time, input_tokens, output_tokens
azure      CSV TIMESTAMP,ContextTokens,GeneratedTokens
burstgpt   CSV Timestamp (s),Model,Request tokens,Response tokens,Total tokens,Log Type
sharegpt   JSON or JSONL {id, conversations: [{from, value}]}
prompts    JSONL {prompt, output_tokens?}
items      this harness's JSONL, see items.py
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from diptych.common.errors import ConfigError
from diptych.loadtest.workloads.items import Message, WorkItem, read_jsonl
from diptych.loadtest.workloads.prompts import Prompt, PromptMaker

BLOCK_TOKENS = 512
TOKENS_PER_WORD = 1.3
"""Estimated length of a text answer without a tokenizer; reports use the server's count."""


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """How a trace is scaled.

    Attributes:
        time_scale: 2 replays in half the time.
        length_scale: 0.125 makes every length (and hash block) an eighth.
        max_input_len, max_output_len: longer ones are cut; 0: no limit.
        limit: most items; 0: all.
        default_output_len: if the format has none.
    """

    maker: PromptMaker
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_input_len: int = 0
    max_output_len: int = 0
    limit: int = 0
    default_output_len: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.time_scale > 0:
            raise ConfigError("time_scale", self.time_scale, "must be above 0")
        if not self.length_scale > 0:
            raise ConfigError("length_scale", self.length_scale, "must be above 0")

    def input_len(self, num_tokens: float) -> int:
        scaled = max(1, round(num_tokens * self.length_scale))
        return min(scaled, self.max_input_len) if self.max_input_len else scaled

    def output_len(self, num_tokens: float) -> int:
        scaled = max(1, round(num_tokens * self.length_scale))
        return min(scaled, self.max_output_len) if self.max_output_len else scaled


def read(path: Path, form: str, spec: ReadSpec) -> list[WorkItem]:
    """Read a file of the named format. Raises: ConfigError naming the invalid part."""
    if form == "items":
        return read_jsonl(path)[: spec.limit or None]
    readers: dict[str, Callable[[str, str, ReadSpec], list[WorkItem]]] = {
        "mooncake": _mooncake,
        "azure": _azure,
        "burstgpt": _burstgpt,
        "sharegpt": _sharegpt,
        "prompts": _prompts,
    }
    if form not in readers:
        raise ConfigError("format", form, f"must be one of items, {', '.join(readers)}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", str(path), f"cannot be read: {error}") from None
    try:
        items = readers[form](text, str(path), spec)
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError("dataset", str(path), f"is not of format {form}: {type(error).__name__} {error}") from None
    if not items:
        raise ConfigError("dataset", str(path), "holds no requests")
    return items


def write_mooncake(path: Path, items: Sequence[WorkItem]) -> None:
    """Items with arrival times as a Mooncake trace. Raises: ConfigError when one has none."""
    lines: list[bytes] = []
    for item in items:
        if item.arrival_s is None:
            raise ConfigError("arrival_s", item.index, "a Mooncake trace needs an arrival time for every request")
        row: dict[str, Any] = {
            "timestamp": round(item.arrival_s * 1000),
            "input_length": item.input_tokens,
            "output_length": item.output_tokens,
            "hash_ids": list(item.hash_ids),
        }
        if item.session:
            row |= {"session_id": item.session, "delay": round(item.delay_s * 1000)}
        lines.append(msgspec.json.encode(row) + b"\n")
    path.write_bytes(b"".join(lines))


def _timed(rows: Sequence[tuple[float, float, float]], kind: str, spec: ReadSpec) -> list[WorkItem]:
    """Rows of (seconds, input, output); an answer without tokens is a request that failed in the recording."""
    kept = sorted(row for row in rows if row[1] >= 1 and row[2] >= 1)
    kept = kept[: spec.limit or None]
    rng = Random(f"{spec.seed}/{kind}")
    items: list[WorkItem] = []
    for at, num_input, num_output in kept:
        length = spec.input_len(num_input)
        prompt = spec.maker.join((spec.maker.body(rng, length),))
        arrival = (at - kept[0][0]) / spec.time_scale
        items.append(_item(len(items), prompt, length, spec.output_len(num_output), kind=kind, arrival_s=arrival))
    return items


def _item(index: int, prompt: Prompt, num_input: int, num_output: int, **more: Any) -> WorkItem:
    return WorkItem(
        index=index,
        input_tokens=num_input,
        output_tokens=num_output,
        token_ids=prompt.token_ids,
        text=prompt.text,
        messages=prompt.messages,
        **more,
    )


def _mooncake(text: str, path: str, spec: ReadSpec) -> list[WorkItem]:
    rows = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
    rows = rows[: spec.limit or None]
    start = min((_first(row, "timestamp", "created_time") for row in rows), default=0.0)
    block = max(1, round(BLOCK_TOKENS * spec.length_scale))
    turns: dict[str, int] = {}
    items: list[WorkItem] = []
    for index, row in enumerate(rows):
        length = spec.input_len(_first(row, "input_length", "input_tokens"))
        hashes = tuple(int(value) for value in row.get("hash_ids") or ())
        session = str(row.get("session_id") or "")
        turn = turns.get(session, 0) if session else 0
        turns[session] = turn + 1
        arrival = (_first(row, "timestamp", "created_time") - start) / 1000.0 / spec.time_scale
        item = _item(
            index,
            _hashed_prompt(hashes, length, block, index, spec),
            length,
            spec.output_len(_first(row, "output_length", "output_tokens")),
            kind="mooncake",
            session=session,
            turn=turn,
            delay_s=float(row.get("delay") or 0.0) / 1000.0 / spec.time_scale if turn else 0.0,
            arrival_s=arrival if turn == 0 else None,
            hash_ids=hashes,
        )
        items.append(item)
    return items


def _hashed_prompt(hashes: tuple[int, ...], length: int, block: int, index: int, spec: ReadSpec) -> Prompt:
    """Equal hash ids become equal blocks of tokens, so prefix cache hits are as in the original."""
    pieces = [spec.maker.body(Random(f"{spec.seed}/block/{value}"), block) for value in hashes]
    missing = length - block * len(pieces)
    if missing > 0:
        pieces.append(spec.maker.body(Random(f"{spec.seed}/tail/{index}"), missing))
    prompt = spec.maker.join(pieces)
    if prompt.token_ids:
        return Prompt(token_ids=prompt.token_ids[:length])
    if prompt.text:
        return Prompt(text=" ".join(prompt.text.split(" ")[:length]))
    return Prompt(messages=(Message("user", " ".join(prompt.messages[0].content.split(" ")[:length])),))


def _first(row: dict[str, Any], *names: str) -> float:
    for name in names:
        if row.get(name) is not None:
            return float(row[name])
    raise KeyError(names[0])


def _azure(text: str, path: str, spec: ReadSpec) -> list[WorkItem]:
    rows = [
        (_instant(row["TIMESTAMP"]), float(row["ContextTokens"]), float(row["GeneratedTokens"]))
        for row in csv.DictReader(io.StringIO(text))
    ]
    return _timed(rows, "azure", spec)


def _instant(text: str) -> float:
    """Seconds; the trace has seven decimals and no time zone."""
    head, _, fraction = text.strip().partition(".")
    return (datetime.fromisoformat(head) - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")


def _burstgpt(text: str, path: str, spec: ReadSpec) -> list[WorkItem]:
    rows = [
        (float(row["Timestamp"]), float(row["Request tokens"]), float(row["Response tokens"]))
        for row in csv.DictReader(io.StringIO(text))
    ]
    return _timed(rows, "burstgpt", spec)


def _json_rows(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        rows: list[dict[str, Any]] = msgspec.json.decode(text)
        return rows
    return [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]


def _words(text: str) -> int:
    return max(1, round(len(text.split()) * TOKENS_PER_WORD))


def _sharegpt(text: str, path: str, spec: ReadSpec) -> list[WorkItem]:
    """Every human turn is a request of its conversation's session; max_tokens is the length of the recorded answer, and
    its history is the real one. Text cannot be sent as ids: the form is text or messages."""
    items: list[WorkItem] = []
    for number, row in enumerate(_json_rows(text)):
        said = [(str(turn["from"]), str(turn["value"])) for turn in row.get("conversations") or ()]
        pairs = [
            (said[i][1], said[i + 1][1])
            for i in range(len(said) - 1)
            if said[i][0] in ("human", "user") and said[i + 1][0] in ("gpt", "assistant", "bot", "chatgpt")
        ]
        for turn, (question, answer) in enumerate(pairs):
            item = _item(
                len(items),
                _written(question, spec),
                spec.input_len(_words(question)),
                spec.output_len(_words(answer)),
                kind="sharegpt",
                session=str(row.get("id") or number) if len(pairs) > 1 else "",
                turn=turn,
                follows=turn > 0,
            )
            items.append(item)
            if len(items) == spec.limit:
                return items
    return items


def _prompts(text: str, path: str, spec: ReadSpec) -> list[WorkItem]:
    rows = _json_rows(text)[: spec.limit or None]
    return [
        _item(
            index,
            _written(str(row["prompt"]), spec),
            spec.input_len(_words(str(row["prompt"]))),
            spec.output_len(float(row.get("output_tokens") or spec.default_output_len)),
            kind="prompts",
        )
        for index, row in enumerate(rows)
    ]


def _written(text: str, spec: ReadSpec) -> Prompt:
    if spec.max_input_len:
        text = " ".join(text.split(" ")[: max(1, int(spec.max_input_len / TOKENS_PER_WORD))])
    return Prompt(messages=(Message("user", text),)) if spec.maker.form == "messages" else Prompt(text=text)
